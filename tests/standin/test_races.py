"""Whether anything orders what streams, communicators and threads do with memory, in traces of training: see race_clock.py."""

import inspect
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import sleep

import pytest
import standin_device
import torch
import torch.distributed as dist
from cells import marks_of
from race_clock import Entry, Races, traced
from shared_ranks import SharedRanks
from standin_runs import FILES, HOST, SMALL, engine_of, own_device
from torch import nn
from training import Answer, bert, bert_batch, checkpoint_activations, fused_adamw, gpt2, gpt2_batch
from transformers import T5Config, T5ForConditionalGeneration

import hf_zero
from hf_zero.checkpoint.background import Background
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.live_pieces import LivePieces
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.state_io import plan_state
from hf_zero.offload.copies import RoundedHostToDevice
from hf_zero.pinned_memory import pinned
from hf_zero.queues import SideQueue, queue_end, side_queue
from hf_zero.step.gathers import Gather

pytestmark = [pytest.mark.timeout(400), standin_device.needs_compiler]

STEPS, LIMIT_S = 3, 30.0
ROWS = 3
"""Of a micro-batch: the hidden states of one are large enough to be moved (`SMALL_BYTES`)."""
BOTH = {"params": "cpu", "optimizer": "cpu"}
INT8 = {"weights": "int8", "gradients": "int8"}
BF16 = {"param_dtype": "bfloat16"}
GROUPS = {"shard_group_size": 2}
NODES = {"secondary_shard": "node", "node_size": 2}
SETTINGS = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "reduced in bf16": {"stage": 0, "reduce_dtype": "bfloat16"},
    "no prefetch": {"stage": 3, "prefetch_units": 0},
    "far prefetch": {"stage": 3, "prefetch_units": 3},
    "kept gathered": {"stage": 3, "reshard_after_forward": False},
    "local accumulation": {"stage": 2, "grad_accumulation": "local"},
    "int8 at stage 2": {"stage": 2, "comm": INT8},
    "int8": {"stage": 3, "comm": INT8, "prefetch_units": 2},
    "bf16 at stage 2": {"stage": 2, **BF16},
    "bf16": {"stage": 3, **BF16},
    "gathered in bf16": {"stage": 3, "gather_dtype": "bfloat16"},
    "8-bit moments": {"stage": 2, "moments": "8bit"},
    "bad steps skipped": {"stage": 3, "nonfinite": "skip"},
    "state in host memory": {"stage": 2, "offload": HOST},
    "state in host memory, on a small device": {"stage": 2, "offload": HOST, SMALL: True},
    "half of it": {"stage": 2, "offload": HOST | {"ratio": 0.5}},
    "half of it, on a small device": {"stage": 2, "offload": HOST | {"ratio": 0.5}, SMALL: True},
    "state in host memory at stage 3": {"stage": 3, "offload": HOST},
    **{
        f"bf16, state in host memory at stage {stage}": {
            "stage": stage,
            **BF16,
            "offload": HOST,
        }
        for stage in (1, 2, 3)
    },
    "bf16, state in host memory on a small device": {"stage": 2, **BF16, "offload": HOST, SMALL: True},
    "bf16, state in host memory at stage 3, on a small device": {"stage": 3, **BF16, "offload": HOST, SMALL: True},
    "bf16 in host memory": {"stage": 3, **BF16, "offload": BOTH},
    "gathered in bf16 from host memory": {"stage": 3, "gather_dtype": "bfloat16", "offload": BOTH},
    "int8 from host memory": {"stage": 3, "comm": INT8, "offload": BOTH},
    "8-bit moments in host memory": {"stage": 2, "moments": "8bit", "offload": HOST},
    "state in files": {"stage": 2, "offload": FILES},
    "state in files, on a small device": {"stage": 2, "offload": FILES, SMALL: True},
    "8-bit moments in files": {"stage": 2, "moments": "8bit", "offload": FILES},
    "bf16, state in files": {"stage": 2, **BF16, "offload": FILES},
    "state in files at stage 3": {"stage": 3, "offload": FILES},
    **{
        f"parameters in {params}, state in {state}": {"stage": 3, "offload": {"params": params, "optimizer": state}}
        for params in ("cpu", "nvme")
        for state in ("none", "cpu", "nvme")
    },
    "bf16 in files": {"stage": 3, **BF16, "offload": {"params": "nvme", "optimizer": "nvme"}},
    "activations in host memory": {"stage": 3, "offload": {"activations": "cpu"}},
    "activations and state in host memory": {"stage": 2, "offload": HOST | {"activations": "cpu"}},
    "outer steps": {"stage": 2, "comm": {"sync_every": 2, "shard_group_size": 1}},
    "outer steps in host memory": {"stage": 2, "comm": {"sync_every": 2, "shard_group_size": 1}, "offload": HOST},
    "groups": {"stage": 3, "comm": GROUPS},
    "groups, state in host memory": {"stage": 2, "comm": GROUPS, "offload": HOST},
    **{f"int8 between groups at stage {stage}": {"stage": stage, "comm": GROUPS | INT8} for stage in (2, 3)},
    "secondary shards": {"stage": 3, "comm": NODES},
    "int8, secondary shards": {"stage": 3, "comm": NODES | INT8},
    "secondary shards beside host memory": {"stage": 3, "comm": NODES, "offload": BOTH},
}
LEAST_RANKS = {"outer": 2, "groups": 4, "secondary": 4}
"""By a word of settings' names."""


def t5() -> nn.Module:
    sizes = {"vocab_size": 211, "d_model": 24, "d_kv": 6, "d_ff": 52, "num_heads": 4, "num_layers": 2}
    config = T5Config(**sizes, num_decoder_layers=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return T5ForConditionalGeneration(config)


def with_adapters() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    return peft.get_peft_model(gpt2(), config)


class SometimesIdle(nn.Module):
    """A part of it is for the first batch. Its gradients are zero behind that, and its parameters move all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.idle, self.calls = gpt2(), nn.Linear(24, 400), 0

    def forward(self, **batch: torch.Tensor) -> Answer:
        self.calls += 1
        loss = self.inner(**batch).loss
        return Answer(loss + self.idle.weight.square().mean() if self.calls == 1 else loss)


def in_halves() -> nn.Module:
    """The first half has no gradient, and what it has saved for one is there until the next forward."""
    model = gpt2()
    model.kept = []

    def cut(_module: nn.Module, _arguments: tuple, hidden: torch.Tensor) -> torch.Tensor:
        model.kept[:] = [hidden]
        return hidden.detach()

    model.transformer.h[0].register_forward_hook(cut)
    return model


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a script does.

    Attributes:
        micro_batches: of a step.
        drops: what has been accumulated, before the last micro-batch.
        max_norm: that gradients are clipped to.
        zeroes: gradients, in place of dropping them.
        evaluates: between backward and step.
        edits: whole parameters behind each step, and looks at a gradient before it.
        saves: behind training.
        recomputes: activations.
        optimizers: that parameters are dealt to.
    """

    make_model: Callable[[], nn.Module] = gpt2
    make_batch: Callable[[torch.Generator, int], dict[str, torch.Tensor]] = gpt2_batch
    micro_batches: int = 1
    drops: bool = False
    max_norm: float | None = None
    zeroes: bool = False
    evaluates: bool = False
    edits: bool = False
    saves: bool = False
    recomputes: bool = False
    optimizers: int = 1


WAYS = {
    "gpt2": Way(),
    "bert": Way(make_model=bert, make_batch=bert_batch),
    "t5": Way(make_model=t5),
    "adapters": Way(make_model=with_adapters),
    "recomputed": Way(recomputes=True),
    "clipped": Way(max_norm=0.1),
    "accumulated": Way(micro_batches=3),
    "dropped": Way(micro_batches=3, drops=True),
    "idle": Way(make_model=SometimesIdle, zeroes=True),
    "in halves": Way(make_model=in_halves),
    # Not fused: those have the number of their steps on the device, and a save waits for it.
    "saved": Way(saves=True, optimizers=2),
    "evaluated": Way(evaluates=True),
    "edited": Way(edits=True),
    "two optimizers": Way(optimizers=2),
}


SPARSE = {
    **dict.fromkeys(["bert", "t5", "adapters"], 7),
    **dict.fromkeys(["recomputed", "clipped", "in halves", "evaluated", "edited", "two optimizers"], 4),
    **dict.fromkeys(["accumulated", "dropped", "idle", "saved"], 3),
}
"""Ways that meet every third, fourth or seventh setting. Only the models of the last differ from the first way's."""


def optimizers_of(model: nn.Module, way: Way) -> list[torch.optim.Optimizer]:
    if way.optimizers == 1:
        return [fused_adamw(model)]
    parameters = list(model.parameters())
    return [torch.optim.AdamW(parameters[turn :: way.optimizers], lr=1e-3) for turn in range(way.optimizers)]


def train(settings: dict, way: Way, folder: Path) -> None:
    """A few steps, in which the script waits for nothing."""
    torch.manual_seed(0)
    model = way.make_model().to(own_device()).train()
    if way.recomputes:
        checkpoint_activations(model, {"use_reentrant": False})
    optimizers = optimizers_of(model, way)
    engine = engine_of(model, optimizers, settings)
    background = Background(engine.device)
    for step in range(STEPS):
        for micro in range(way.micro_batches):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            batch = {name: values.to(own_device()) for name, values in way.make_batch(generator, ROWS).items()}
            with nullcontext() if micro == way.micro_batches - 1 else engine.no_sync():
                model(**batch).loss.backward()
            if way.drops and micro == way.micro_batches - 2:
                optimizers[0].zero_grad()
        if way.evaluates:
            with torch.no_grad():
                model(**batch)
        if way.edits:
            engine.full_grad(next(model.parameters())).add_(1)
        if way.max_norm is not None:
            engine.clip_grad_norm_(way.max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not way.zeroes)
        if way.edits:
            with torch.no_grad(), engine.gathered(writeback=True):
                for parameter in model.parameters():
                    parameter.mul_(0.999)
        background.finish()
        if way.saves:
            save(engine, optimizers, background, folder / f"step-{step}", is_dropped=step == STEPS - 1)
    background.finish()
    engine.close()


def save(engine: ZeroEngine, optimizers: list, background: Background, folder: Path, *, is_dropped: bool) -> None:
    """Begins a save of which most is not written when the next step wants to change it, or when it is dropped."""
    _, found = plan_state(engine, folder)
    if is_dropped and len(found) < 2:
        # A rank that has nothing of its own to save.
        return
    live, has_begun, is_wanted = LivePieces(found, 1 << 20, refuse_edits=lambda: None), Event(), Event()

    def written(_nbytes: int) -> None:
        has_begun.set()
        is_wanted.wait(LIMIT_S)

    def secure(*_: object) -> None:
        is_wanted.set()
        live.secure()

    live.on_written = written
    background.start(live.write)
    if is_dropped:
        has_begun.wait(LIMIT_S)
        live.drop()
        is_wanted.set()
        with pytest.raises(CheckpointError, match="interrupted"):
            background.finish()
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(secure)


def races(
    rank: int, world_size: int, library: Path, folder: str, cells: list[tuple[str, str]]
) -> dict[str, dict[str, int]]:
    """What nothing orders in each of the cells, (settings, way), in which something is not ordered."""
    compiled = standin_device.register(library)
    found = {}
    with standin_device.process_group(rank, world_size, folder):
        for name, way in cells:
            own_folder = Path(folder, f"{name}, {way}")
            own_folder.mkdir(exist_ok=True)
            with traced(compiled, f"{Path(hf_zero.__file__).parent}/") as trace:
                train(placed(SETTINGS[name], str(own_folder)), WAYS[way], own_folder)
            of_cell = Races(iter(trace))
            assert of_cell.counts["do"] > 300
            if of_cell.found:
                found[f"{name}, {way}"] = of_cell.found
    assert compiled.hazards() == compiled.crossings() == []
    return found


def placed(settings: dict, folder: str) -> dict:
    offload = settings.get("offload", {})
    files = {"nvme_path": folder} if "nvme" in offload.values() else {}
    # The look at gradients waits for the device in each step; who leaves it out has one order fewer.
    looks = {} if "nonfinite" in settings else {"nonfinite": "ignore"}
    return {"bucket_bytes": "20KiB", **looks, **settings, "offload": offload | files}


RANKS = {world_size: SharedRanks(world_size, call_limit_s=900) for world_size in (1, 2, 4)}


@pytest.fixture(scope="module", autouse=True)
def no_ranks_outlive_the_module():
    yield
    for ranks in RANKS.values():
        ranks.end()


def races_by_rank(world_size: int, cells: list[tuple[str, str]], library: Path, folder: Path) -> dict[int, dict]:
    """By rank and cell, what nothing orders and how often; ranks that have found nothing are left out."""
    arguments = {"library": library, "folder": str(folder), "cells": cells}
    return {rank: found for rank, found in enumerate(RANKS[world_size].run(races, **arguments)) if found}


SHORT = [
    ("reduced in bf16", "gpt2", 2),
    ("stage 1", "idle", 2),
    ("stage 3", "saved", 2),
    ("bf16", "clipped", 2),
    ("bad steps skipped", "gpt2", 2),
    ("int8 at stage 2", "edited", 2),
    ("state in host memory", "accumulated", 2),
    ("state in host memory, on a small device", "accumulated", 2),
    ("state in host memory", "idle", 2),
    ("state in host memory, on a small device", "idle", 2),
    ("bf16, state in host memory at stage 2", "dropped", 2),
    ("bf16, state in host memory at stage 2", "saved", 2),
    ("bf16, state in host memory on a small device", "dropped", 2),
    ("8-bit moments in host memory", "saved", 1),
    ("bf16, state in host memory at stage 3", "idle", 2),
    ("bf16, state in host memory at stage 3, on a small device", "idle", 2),
    ("state in host memory at stage 3", "gpt2", 2),
    ("state in files at stage 3", "gpt2", 2),
    ("bf16, state in files", "saved", 2),
    ("state in files, on a small device", "accumulated", 2),
    ("parameters in cpu, state in cpu", "evaluated", 2),
    ("parameters in nvme, state in none", "gpt2", 1),
    ("activations in host memory", "in halves", 2),
    ("outer steps", "gpt2", 2),
    ("groups", "gpt2", 4),
    ("int8 between groups at stage 2", "gpt2", 4),
    ("secondary shards", "gpt2", 4),
]


@pytest.mark.parametrize(
    ("name", "way", "world_size"), [pytest.param(*cell, marks=marks_of(cell[0])) for cell in SHORT]
)
def test_everything_is_ordered(name, way, world_size, library, tmp_path):
    assert races_by_rank(world_size, [(name, way)], library, tmp_path) == {}


def world_sizes_of(name: str, way: str, turn: int) -> set[int]:
    """Ranks on which a setting meets a way: one or two in turns, now and then four. Settings of four meet every fourth way."""
    if turn % SPARSE.get(way, 1):
        return set()
    least = max([1, *(ranks for word, ranks in LEAST_RANKS.items() if word in name)])
    if least == 4:
        return {4} if turn % 4 == 0 else set()
    return {max(least, 1 + turn // 2 % 2), *([4] if turn % 12 == 0 else [])}


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_everything_is_ordered_in_every_setting(way, world_size, library, tmp_path):
    turn = list(WAYS).index(way)
    cells = [(name, way) for at, name in enumerate(SETTINGS, turn) if world_size in world_sizes_of(name, way, at)]
    assert races_by_rank(world_size, cells, library, tmp_path) == {}


def ways_up(rank: int, world_size: int, library: Path, folder: str, name: str) -> tuple[str, list[tuple[str, str]]]:
    """The stream that computes; and in their order, each copy of a master and each start of a gather, with its stream."""
    compiled = standin_device.register(library)
    with standin_device.process_group(rank, world_size, folder):
        with traced(compiled, f"{Path(hf_zero.__file__).parent}/") as trace:
            train(placed(SETTINGS[name], folder), WAYS["gpt2"], Path(folder))
    entries = [entry for entry in map(Entry._make, trace) if entry.actor.startswith("stream")]
    [computes] = {entry.actor for entry in entries if entry.name == "aten::addmm"}

    def places(kind: type) -> set[str]:
        """As an entry tells them."""
        lines, first = inspect.getsourcelines(kind)
        return {f"{Path(inspect.getfile(kind)).name}:{number}" for number in range(first, first + len(lines))}

    def is_in(places: set[str], each: Entry) -> bool:
        return not places.isdisjoint(re.findall(r"\w+\.py:\d+", each.where))

    copies, gathers = places(RoundedHostToDevice), places(Gather)
    found = []
    for each in entries:
        if each.kind == "do" and is_in(copies, each):
            found.append(("a copy", each.actor))
        elif each.kind == "give" and is_in(gathers, each):
            found.append(("a gather", each.actor))
    return computes, found


def test_a_master_goes_up_beside_what_the_device_computes_and_is_sent_at_once(library, tmp_path):
    arguments = {"library": library, "folder": str(tmp_path), "name": "bf16, state in host memory on a small device"}
    for computes, found in RANKS[2].run(ways_up, **arguments):
        assert [file for file, _ in found] == ["a copy", "a gather"] * (len(found) // 2)
        assert found and computes not in [actor for _, actor in found]


def written_aside(queue: SideQueue, *, is_ordered: bool) -> None:
    """A stream writes what another has read."""
    values = torch.ones(8, device=own_device())
    with queue.in_parallel():
        values.zero_()
    if is_ordered:
        queue.mark().hold_up_device()
    values.add_(1)
    queue.mark().hold_up_device()


def freed(queue: SideQueue, *, is_ordered: bool) -> None:
    """Memory goes back under a stream's use."""
    values = torch.ones(8, device=own_device())
    with queue.in_parallel():
        values.add_(1)
        if is_ordered:
            values.record_stream(torch.accelerator.current_stream(own_device()))
    del values
    torch.ones(8, device=own_device())


def read_by_the_host(queue: SideQueue, *, is_ordered: bool) -> None:
    """The host reads what is on its way there, and gives it back."""
    here = pinned(32, own_device()).view(torch.float32)
    here.copy_(torch.ones(8, device=own_device()), non_blocking=True)
    if is_ordered:
        queue_end(own_device()).wait()
    here.sum()


def unpinned(queue: SideQueue, *, is_ordered: bool) -> None:
    here = pinned(32, own_device()).view(torch.float32)
    torch.ones(8, device=own_device()).copy_(here, non_blocking=True)
    if is_ordered:
        queue_end(own_device()).wait()


def summed(queue: SideQueue, *, is_ordered: bool) -> None:
    values = torch.ones(8, device=own_device())
    work = dist.all_reduce(values, async_op=True)
    if is_ordered:
        work.wait()
    values.add_(1)
    work.wait()


def written_by_a_thread(queue: SideQueue, *, is_ordered: bool) -> None:
    """The script writes where a thread has."""
    here = pinned(32, own_device()).view(torch.float32)
    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(here.fill_, 1)
        while not written.done():
            sleep(0.001)
        if is_ordered:
            written.result()
        here.add_(1)


FAULTS = (written_aside, freed, read_by_the_host, unpinned, summed, written_by_a_thread)


def seen(rank: int, world_size: int, library: Path, folder: str) -> dict[str, list[int]]:
    """How many pairs are unordered in each of the faults, and without it."""
    compiled = standin_device.register(library)
    found: dict[str, list[int]] = {}
    with standin_device.process_group(rank, world_size, folder):
        queue = side_queue(own_device())
        for fault in FAULTS:
            for is_ordered in (False, True):
                with traced(compiled, f"{Path(hf_zero.__file__).parent}/") as trace:
                    fault(queue, is_ordered=is_ordered)
                found.setdefault(fault.__name__, []).append(len(Races(iter(trace)).found))
    return found


def test_what_nothing_orders_is_found(library, tmp_path):
    for found in RANKS[2].run(seen, library=library, folder=str(tmp_path)):
        assert all(faulty > 0 and whole == 0 for faulty, whole in found.values()), found
