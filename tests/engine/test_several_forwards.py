"""Loops with several forwards a step: before one backward, under the model's own no_sync, and behind training."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate_job import make_accelerator
from cells import short_of, slow
from loops import engine_or_ddp, take_step
from shared_ranks import on_ranks, on_shared_ranks, run_on_ranks
from torch import nn
from torch.func import functional_call, grad, vmap
from trainer_job import as_launched
from training import bert, bert_batch

from hf_zero.engine.engine import ZeroEngine
from hf_zero.hooks.weak import engine_attached_to

STAGES = [0, 1, 2, 3]


class Normed(nn.Module):
    """Batch norms, one in training and one with frozen statistics, a boolean mask, and a constant of every element type."""

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.still = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("mask", torch.arange(8) > 2)
        self.register_buffer("order", torch.arange(8).flip(0).expand(1, -1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.entry(inputs)) * self.scale
        hidden = torch.where(self.mask, self.still(hidden), hidden)
        return self.head(hidden.gather(1, self.order.expand(len(hidden), -1)))

    def train(self, mode: bool = True) -> "Normed":
        super().train(mode)
        self.still.eval()
        return self


def normed_loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Contrastive in kind: two views of different inputs, pulled together."""
    one, two = (model(torch.randn(5, 6, generator=generator)) for _ in range(2))
    return (one - two).square().mean() + one.square().mean()


def bert_loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """R-Drop in kind: the same inputs twice."""
    batch = bert_batch(generator, 2)
    one, two = model(**batch), model(**batch)
    return one.loss + (one.logits - two.logits + 1).square().mean() + two.loss


def prepared(make: type, settings: dict | None):
    """The model, what to call, and its optimizer, under DDP where there are no settings."""
    torch.manual_seed(0)
    model = make()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, engine_or_ddp(model, optimizer, settings)[0], optimizer


def trained(rank: int, kind: str, settings: dict | None) -> list[list[float]]:
    """A step a row: its loss, and what an evaluation behind it sees of buffers and outputs."""
    make, loss_of = {"norms": (Normed, normed_loss), "bert": (bert, bert_loss)}[kind]
    model, entry, optimizer = prepared(make, settings)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for _ in range(3):
        loss = take_step(loss_of(entry, generator), optimizer)
        entry.eval()
        with torch.no_grad():
            evaluated = loss_of(entry, torch.Generator().manual_seed(7))
        entry.train()
        seen.append([loss, evaluated.item(), *(buffer.double().sum().item() for buffer in model.buffers())])
    return seen


@pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="DistributedDataParallel of torch 2.11 writes into buffers that its backward needs",
)
@pytest.mark.parametrize("kind", ["norms", "bert"])
@pytest.mark.short_cells("norms")
@on_ranks(2)
def test_two_forwards_before_a_backward_and_evaluations_behind_steps_are_ddps(rank, world_size, kind):
    expected = trained(rank, kind, None)
    for stage in STAGES:
        assert trained(rank, kind, {"stage": stage}) == expected, f"stage {stage}"


@on_ranks(2)
def test_buffers_that_no_forward_changes_are_not_edited_and_statistics_are_rank_0s_before_each_forward(
    rank, world_size
):
    model, *_ = prepared(Normed, {"stage": 2})
    generator = torch.Generator().manual_seed(rank)
    kept = [model.norm.running_mean, model.scale, model.mask, model.order]
    loss = normed_loss(model, generator)
    versions = [buffer._version for buffer in kept]
    # The next forward starts from rank 0's statistics, also here where the two before have had no backward.
    statistics = model.norm.running_mean.clone()
    torch.distributed.broadcast(statistics, 0)
    model.norm.register_forward_pre_hook(lambda norm, _: seen.append(norm.running_mean.clone()))
    seen = []
    third = model(torch.randn(5, 6, generator=generator))
    assert torch.equal(seen[0], statistics)
    assert [buffer._version for buffer in kept][1:] == versions[1:]
    (loss + third.mean()).backward()


class Tempered(nn.Module):
    """Buffers that no forward changes: saved ones, in the model and in a part of it, and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.entry, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("temperature", torch.ones(()))
        self.head.register_buffer("shift", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.where(self.mask, self.entry(inputs), 0.5)
        return (self.head(hidden) + self.head.shift.float()) * self.temperature


class Passing(nn.Module):
    """Only buffers that are not saved, as those of most language models."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 2)
        self.register_buffer("temperature", torch.ones(()), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(inputs) * self.temperature


def in_place(model: nn.Module, value: float) -> None:
    for buffer in model.buffers():
        buffer.fill_(value > 2.5)
    model.temperature.mul_(value)


def by_data(model: nn.Module, value: float) -> None:
    model.temperature.data.fill_(value)
    next(reversed(list(model.buffers()))).data.fill_(value < 2.5)


def by_assignment(model: nn.Module, value: float) -> None:
    model.temperature = torch.full((), value)
    if isinstance(model, Tempered):
        model.head.shift = torch.full((2,), value, dtype=torch.float64)
        model.mask = torch.arange(8) > value


def buffers_edited(rank: int, make: type, edit, writers: tuple[int, ...], settings: dict | None) -> list[list[float]]:
    """Losses and buffers behind each forward, where `writers` edit buffers before it, also between micro-batches."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    entry, engine = engine_or_ddp(model, optimizer, settings)
    generator = torch.Generator().manual_seed(rank)
    seen = []

    def forward(value: float, *, edits: bool = True) -> torch.Tensor:
        if edits and rank in writers:
            edit(model, value + rank)
        loss = entry(torch.randn(5, 6, generator=generator)).square().mean()
        seen.append([loss.item(), *(buffer.double().sum().item() for buffer in model.buffers())])
        return loss

    for step in range(3):
        with (entry if engine is None else engine).no_sync():
            forward(step + 1.0).backward()
            forward(step + 1.5).backward()
        # Two forwards of one backward, which needs what an edit in place would overwrite.
        (forward(step + 2.0) + forward(step + 2.5, edits=edit is not in_place)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.close()
    return seen


@pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="DistributedDataParallel of torch 2.11 writes into buffers that its backward needs",
)
@pytest.mark.parametrize(
    ("make", "edit", "writers"),
    [(Tempered, in_place, (0,)), (Tempered, by_assignment, (1,)), (Passing, by_data, (0, 1)), (Normed, None, ())],
)
@on_shared_ranks
def test_buffers_that_a_script_writes_on_any_rank_are_rank_0s_in_a_training_forward_as_under_ddp(
    rank, world_size, make, edit, writers
):
    expected = buffers_edited(rank, make, edit, writers, None)
    for stage in STAGES:
        settings = {"stage": stage, "grad_accumulation": "local"}
        assert buffers_edited(rank, make, edit, writers, settings) == expected, f"stage {stage}"


@on_ranks(2)
def test_an_evaluation_on_one_rank_sends_no_buffers(rank, world_size):
    model, _, optimizer = prepared(Tempered, {"stage": 2})
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    by_assignment(model, 3.0 + rank)
    model.eval()
    if rank == 1:
        with torch.no_grad():
            model(torch.ones(1, 6))
        assert model.temperature == 4.0
    model.train()
    model(torch.ones(1, 6))
    assert model.temperature == 3.0


def accumulated(rank: int, world_size: int, door: str, way: str) -> list[float]:
    """Losses of a loop that accumulates by the prepared model's own no_sync, or by accelerate's, which a backward breaks."""
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(rank)
    losses = []

    def loss() -> torch.Tensor:
        return model(torch.randn(5, 6, generator=generator)).square().mean()

    for _ in range(3):
        if way == "forwards":
            with accelerator.no_sync(model):
                first, second = loss(), loss()
            accelerator.backward(first)
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(second)
        elif way == "backwards":
            with accelerator.no_sync(model):
                first, second = loss(), loss()
                accelerator.backward(first)
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(second)
        else:
            with model.no_sync():
                first = loss()
                accelerator.backward(first)
            second = loss()
            accelerator.backward(second)
        losses += [first.item(), second.item()]
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory()
    return losses


def reset_states() -> None:
    """A fresh Accelerator in the same process group."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._shared_state.clear()


@pytest.mark.parametrize("stage", short_of(STAGES, [1, 3]))
@on_ranks(2)
def test_the_prepared_model_has_ddps_no_sync(rank, world_size, stage):
    for way in ("model", "forwards", "backwards"):
        expected = accumulated(rank, world_size, "ddp", way)
        reset_states()
        found = accumulated(rank, world_size, f"plugin {stage}", way)
        reset_states()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def local_sgd(rank: int, world_size: int) -> str:
    as_launched(rank, world_size)
    accelerator = make_accelerator("plugin 2", cpu=True)
    model = nn.Linear(6, 2)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=False):
        pass
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with other.no_sync():
            pass
    try:
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8):
            return ""
    except NotImplementedError as error:
        return str(error)


def test_local_sgd_is_refused_and_names_the_setting_that_does_the_like():
    for message in run_on_ranks(local_sgd):
        assert "local_sgd_steps=8" in message and "comm.sync_every: 8" in message


class Encoder(nn.Module):
    """Has ways in beside forward, as sentence encoders do, and a bias whose true gradient is zero."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.layer(nn.functional.embedding(ids, self.table.weight)))[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # As where answers start in question answering: a constant added to all positions changes no loss.
        logits = self.head(self.encode(ids)).squeeze(-1)
        return nn.functional.cross_entropy(logits, torch.zeros(len(ids), dtype=torch.long))


def read_in_cpp(parameter: torch.Tensor) -> torch.Tensor:
    """As an extension of a script's own does: torch is not asked whether this is a plain tensor."""
    read = [torch.empty(parameter.shape) for _ in range(2)]
    dist.group.WORLD.allgather([read], [parameter]).wait()
    return read[0]


def gradients_by_func(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model.head, parameters, (torch.ones(2, 16),)).square().sum()

    return grad(loss)(dict(model.head.named_parameters()))["weight"]


WAYS_IN = {
    "encode": lambda model, ids: model.encode(ids),
    "forward itself": lambda model, ids: model.forward(ids),
    "a part": lambda model, ids: model.rnn(torch.ones(1, 2, 16))[0],
    "a weight": lambda model, ids: model.get_submodule("head").weight * 2,
    "a parameter": lambda model, ids: next(iter(model.parameters())) * 2,
    "attention's fast path": lambda model, ids: model.get_submodule("layer").eval()(torch.ones(1, 2, 16)),
    "a state dict": lambda model, ids: torch.cat([value.flatten() for value in model.state_dict().values()]),
    "one vector": lambda model, ids: nn.utils.parameters_to_vector(model.parameters()),
    "a copy of a part": lambda model, ids: copy.deepcopy(model.get_submodule("head")).weight,
    "a functional call": lambda model, ids: functional_call(model, dict(model.named_parameters()), (ids,)),
    "gradients by torch.func": gradients_by_func,
    "a mapped function": lambda model, ids: vmap(torch.neg)(next(iter(model.parameters()))),
    "a weight in C++": lambda model, ids: read_in_cpp(model.get_submodule("head").weight),
    "a parameter in C++": lambda model, ids: read_in_cpp(next(iter(model.parameters()))),
}


class Arriving:
    """A gather that nothing has come of before somebody waits for it."""

    def __init__(self, finish):
        self.finish = finish


KEPT = {
    "arithmetic": lambda kept: kept[0] * 2,
    "an alias": lambda kept: kept[-1].detach(),
    "data": lambda kept: kept[0].data,
    "all at once": lambda kept: torch._foreach_mul(kept, 2.0)[-1],
    "a moving average": lambda kept: torch.zeros_like(kept[0]).lerp_(kept[0], 0.5),
    "a copy": lambda kept: copy.deepcopy(kept[0]),
    "a pickle": lambda kept: pickle.loads(pickle.dumps(kept[0])),
    "numbers": lambda kept: torch.tensor(kept[-1].tolist()),
    "an array": lambda kept: torch.from_numpy(kept[0].detach().numpy().copy()),
}
"""Ways to read a list of parameters that was taken before."""


def read_behind_steps(rank: int, settings: dict | None) -> list[list]:
    """What each way in gives on this rank, right behind a step."""
    ways = [lambda model, _kept, ids, way=way: way(model, ids) for way in WAYS_IN.values()]
    ways += [lambda _model, kept, _ids, way=way: way(kept) for way in KEPT.values()]
    seen = []
    for way in ways:
        model, entry, optimizer = prepared(Encoder, settings)
        kept = list(model.parameters())
        if settings is not None:
            gather = engine_attached_to(model)._parts.parameter_gather._gather
            start = gather.start
            gather.start = lambda bucket, start=start: Arriving(lambda: start(bucket).finish())
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            entry(torch.randint(50, (2, 6), generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(way(model, kept, torch.arange(12).view(2, 6)).flatten().tolist())
            # Ranks gather in the order of their reads, which is the same on all here; what is left comes in another.
            if settings is not None:
                engine_attached_to(model).finish_parameters()
    return seen


@pytest.mark.parametrize("stage", [slow(1), 2])
@on_ranks(2)
def test_reads_that_bypass_the_models_forward_or_the_model_wait_for_the_step_and_are_ddps(rank, world_size, stage):
    assert read_behind_steps(rank, {"stage": stage, "bucket_bytes": 256}) == read_behind_steps(rank, None)


@on_ranks(2)
def test_zero_grad_waits_for_no_parameter_and_each_layer_of_the_next_forward_for_its_own_bucket(rank, world_size):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ZeroEngine(model, [optimizer], {"stage": 2, "bucket_bytes": 256})
    model(torch.ones(2, 8)).sum().backward()
    arrived, gather = [], engine._parts.parameter_gather._gather
    start = gather.start

    def start_and_note(bucket):
        handle = start(bucket)
        return Arriving(lambda: (arrived.append(bucket), handle.finish()))

    gather.start = start_and_note
    optimizer.step()
    model.zero_grad()
    assert not arrived and len(engine.buckets) > 2
    hidden = torch.ones(2, 8)
    for layer in model:
        hidden = layer(hidden)
        here = {bucket for bucket in engine.buckets if not set(layer.parameters()).isdisjoint(bucket.parameters)}
        assert here <= set(arrived) and len(set(arrived)) == len(arrived) < len(engine.buckets) + (layer is model[-1])
        assert type(layer._parameters) is dict and all(type(each) is nn.Parameter for each in layer.parameters())
