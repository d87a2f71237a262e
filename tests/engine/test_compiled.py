"""torch.compile in each way that scripts use it: losses of the same way under DDP, and nothing of the engine in a graph."""

from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from cells import slow
from compiled import Cell, measure
from shared_ranks import on_ranks, run_on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from trainer_job import as_launched
from training import bert, bert_batch, checkpoint_activations, gpt2, gpt2_batch

from hf_zero import ZeroPlugin
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(300)
WIDTH = 16
EVERY = [0, 1, 2, 3]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.outer(nn.functional.gelu(self.inner(self.norm(hidden))))


class Stack(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(WIDTH, WIDTH), nn.ModuleList(), nn.Linear(WIDTH, 1)
        self.layers.extend(layer() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def sequential() -> nn.Module:
    """A layer of a class of torch, with hooks that torch.compile would trace if the parts were gathered one by one."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


class Graphs:
    """A backend that counts graphs, and those with a line of the engine in them."""

    def __init__(self) -> None:
        self.count = self.of_the_engine = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.count += 1
        self.of_the_engine += any("hf_zero/engine" in str(node.meta.get("stack_trace")) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def compile_forwards(model: nn.Module, graphs: Graphs) -> nn.Module:
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=graphs)
    return model


def compile_layers(model: nn.Module, graphs: Graphs) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend=graphs)
    return model


def wrap_layers(model: nn.Module, graphs: Graphs) -> nn.Module:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=graphs)
    return model


def compile_in_place(model: nn.Module, graphs: Graphs) -> nn.Module:
    model.compile(backend=graphs)
    return model


def wrap(model: nn.Module, graphs: Graphs) -> nn.Module:
    return torch.compile(model, backend=graphs)


BY_LAYER = (compile_forwards, compile_layers, wrap_layers)


def trained(
    rank: int, settings: dict | None, way: Callable, after: bool, layer: Callable
) -> tuple[list, list[int], set]:
    """Losses with an evaluation between, graphs after each step, and reasons of graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    graphs, model = Graphs(), Stack(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called = model if after else way(model, graphs)
    engine = None
    if settings is None:
        # What DDP itself adds to a graph is not to be compared.
        called = DistributedDataParallel(model if after else called)
    else:
        engine = ZeroEngine(model, [optimizer], settings, entry=called)
        if settings["stage"] == 3:
            assert engine.compiled_layers == (0 if after or way in BY_LAYER else len(model.layers))
    if after:
        called = way(model, graphs) if settings is not None or way in BY_LAYER else way(called, graphs)
        called = DistributedDataParallel(called) if settings is None and way in BY_LAYER else called
    data, losses, counts = torch.Generator().manual_seed(rank), [], []
    for step in range(4):
        loss = (called(torch.randn(4, WIDTH, generator=data)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        counts.append(graphs.count)
        if step == 1:
            with torch.no_grad():
                losses.append(called(torch.ones(4, WIDTH)).sum().item())
    assert not graphs.of_the_engine
    breaks = set(counters["graph_break"])
    if engine is not None:
        engine.close()
    return losses, counts, breaks


def as_under_ddp(rank: int, world_size: int, way: Callable, after: bool, layer: Callable, stages: list[int]) -> None:
    losses, counts, _ = trained(rank, None, way, after, layer)
    assert counts[0] > 0 or layer is sequential
    for stage in stages:
        small = {"unit_bytes": 0} if stage == 3 else {}
        found, graphs, breaks = trained(rank, {"stage": stage, "bucket_bytes": "1KiB", **small}, way, after, layer)
        assert found == losses, f"stage {stage}"
        # The evaluation after step 1 has graphs of its own.
        assert graphs[0] == graphs[1] and graphs[2] == graphs[3], f"stage {stage} compiles again: {graphs}"
        if way in BY_LAYER or stage < 3:
            assert graphs == counts or not counts[0], f"stage {stage} has other graphs"
        if not after or way in BY_LAYER or stage < 3:
            assert not breaks, f"stage {stage}: {breaks}"


@pytest.mark.parametrize(
    ("way", "after", "layer", "stages"),
    [
        (compile_forwards, True, Block, [3]),
        (wrap, False, Block, [3]),
        *(slow(way, False, sequential, EVERY) for way in (compile_forwards, compile_layers)),
        *(
            slow(way, after, Block, EVERY)
            for way in (compile_forwards, compile_layers, wrap, compile_in_place)
            for after in (False, True)
        ),
        slow(wrap_layers, False, Block, EVERY),
        slow(wrap, True, sequential, EVERY),
    ],
)
def test_losses_are_those_of_the_same_way_under_ddp_and_nothing_compiles_again(way, after, layer, stages):
    run_on_ranks(as_under_ddp, way=way, after=after, layer=layer, stages=stages)


def prepared_and_compiled(stage: int, compiles: bool) -> list[float]:
    """Losses of a model that is compiled after `prepare`, with the hooks that accelerate's methods have by then."""
    torch._dynamo.reset()
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    model = Stack(Block)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=stage), cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if compiles:
        model.compile(backend="eager")
    data, losses = torch.Generator().manual_seed(accelerator.process_index), []
    with accelerator.join_uneven_inputs([model]):
        for _ in range(2):
            loss = (model(torch.randn(4, WIDTH, generator=data)) - 1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.free_memory()
    return losses


@pytest.mark.parametrize("stage", [2, *map(slow, (0, 1, 3))])
@on_ranks(2)
def test_a_model_is_compiled_after_prepare(rank, world_size, stage):
    as_launched(rank, world_size)
    assert prepared_and_compiled(stage, True) == prepared_and_compiled(stage, False)


# Ways through accelerate's and Trainer's flags, and additions, that no test above covers.
CELLS = [
    *(("gpt2", way, "") for way in ("flag", "plugin", "regions", "wrap-after", "in-place-after", "loss")),
    *(
        ("gpt2", "plugin", addition)
        for addition in ("checkpointing", "lora", "bf16", "evaluation", "generate", "offload")
    ),
    *((family, "plugin", "") for family in ("bert", "modernbert", "llama", "vit")),
    *((family, "layers-before", "") for family in ("t5", "bart", "whisper")),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "way", "addition"), CELLS)
def test_families_compile_in_each_way_as_under_ddp(family, way, addition):
    for row in measure(Cell(family, way, addition=addition), [2, 3]):
        assert row["error"] is None
        assert (row["loss_difference"], row["breaks_in_layers"], row["of_hf_zero"]) == (0, 0, 0), row
        assert row["graphs_later"] == row["graphs_later_of_ddp"], row


def stepped(rank: int, stage: int | None) -> list[float]:
    """Losses of a run whose optimizer steps in a compiled function."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called = DistributedDataParallel(model) if stage is None else model
    engine = None if stage is None else ZeroEngine(model, [optimizer], {"stage": stage})
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    data, losses = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        loss = (called(torch.randn(4, WIDTH, generator=data)) - 1).square().mean()
        loss.backward()
        if engine is None:
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        else:
            engine.clip_grad_norm_(100.0)
        step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if engine is not None:
        engine.close()
    return losses


# To compile takes nearly all of the time.
@pytest.mark.slow
@on_ranks(2)
def test_a_compiled_step_of_the_optimizer_is_ddps(rank, world_size):
    losses = stepped(rank, None)
    for stage in EVERY:
        assert stepped(rank, stage) == losses, f"stage {stage}"


def family_trained(rank: int, make: Callable, batch: Callable, stage: int | None, checkpoints: bool) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().train()
    model.config.use_cache = False
    if checkpoints:
        checkpoint_activations(model, {"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    called = torch.compile(model, backend="aot_eager")
    engine = None if stage is None else ZeroEngine(model, [optimizer], {"stage": stage}, entry=called)
    called = DistributedDataParallel(called) if engine is None else called
    data, losses = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        loss = called(**batch(data, 2)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if engine is not None:
        engine.close()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize(("make", "batch"), [(bert, bert_batch), (gpt2, gpt2_batch)])
@on_ranks(2)
def test_compiled_models_of_transformers_train_as_under_ddp(rank, world_size, make, batch, checkpoints):
    losses = family_trained(rank, make, batch, None, checkpoints)
    for stage in (2, 3):
        assert family_trained(rank, make, batch, stage, checkpoints) == losses, f"stage {stage}"
