"""What a step makes the host wait for, and what it asks of the device besides, counted on the stand-in device."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import standin_device
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_on_ranks
from standin_calls import SCRIPT, Asked, count, differing, own, traced
from standin_calls import counted as asked_for
from standin_runs import FILES, HOST, MAX_NORM, own_device, prepared
from torch import nn
from training import fused_adamw, gpt2, gpt2_batch

from hf_zero.comm.ledger import Ledger
from hf_zero.comm.transport import Handle
from hf_zero.comm.waits import Label
from hf_zero.engine.engine import ZeroEngine
from hf_zero.extras import is_installed
from hf_zero.queues import clock

pytestmark = pytest.mark.timeout(200)
SETTINGS = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "stage 1, bfloat16": {"stage": 1, "param_dtype": "bfloat16"},
    **({"stage 2, int8 gradients": {"stage": 2, "comm": {"gradients": "int8"}}} if is_installed("wire") else {}),
}


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Of one step on one rank.

    Attributes:
        waits: what the host has waited for, and how often.
        events: recorded to be timed.
        collectives: started.
        timed_from: that of the engine's report, if it was asked for one before this step; else None.
        asked: by the engine's functions, of the device, if the step was traced.
        differing: operations that are not those of the step before, if both were traced.
        buckets: of the engine.
        loss: of the step.
    """

    waits: Counter[str]
    events: int
    collectives: int
    timed_from: int | None
    asked: Counter[Asked] | None
    differing: Counter[str] | None
    buckets: int
    loss: float


def count_events(module: ModuleType) -> Counter[str]:
    """Counts from now on the device's events that are recorded to be timed, as `recorded`, and those that are made, as `made`."""
    counted: Counter[str] = Counter()

    class Counted(module.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False):
            counted["made"] += enable_timing
            event = super().__new__(cls, enable_timing=enable_timing, blocking=blocking)
            event.is_timed = enable_timing
            return event

        def record(self, stream: torch.Stream | None = None) -> None:
            counted["recorded"] += self.is_timed
            super().record(stream)

    module.Event = Counted
    return counted


def counted_steps(
    rank: int, world_size: int, library: Path, folder: str, settings: dict[str, dict], n_steps: int, n_asked: int
) -> dict[str, list[StepCounts]]:
    """Under each settings, by name, the counts of each step of a clipped loop; the last ones are traced.

    Args:
        n_asked: how many steps at the end come behind a call of `comm_report`.
    """
    compiled = standin_device.register(library)
    compiled.keep_to(rank + 1)
    events = count_events(torch.get_device_module(standin_device.NAME))
    with standin_device.process_group(rank, world_size, folder), standin_device.keeping_freed(compiled):
        found = {name: _counted(compiled, events, each, n_steps, n_asked) for name, each in settings.items()}
    assert compiled.hazards() == compiled.crossings() == []
    return found


def _counted(
    compiled: ModuleType, events: Counter[str], settings: dict, n_steps: int, n_asked: int
) -> list[StepCounts]:
    torch.manual_seed(0)
    model = gpt2(layers=3).to(own_device())
    optimizer = fused_adamw(model)
    engine = ZeroEngine(model, [optimizer], {"bucket_bytes": "20KiB", **settings})
    generators = (torch.Generator().manual_seed(100 * seed + dist.get_rank()) for seed in range(n_steps))
    batches = [
        {name: values.to(own_device()) for name, values in gpt2_batch(generator, 2).items()} for generator in generators
    ]
    found = []
    timed_from, entries = None, None
    # A loss that lives on after its step would move what the next steps ask for.
    losses = torch.empty(n_steps, device=own_device())

    def train(batch: dict) -> None:
        loss = model(**batch).loss
        loss.backward()
        engine.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses[len(found)].copy_(loss.detach())

    for step, batch in enumerate(batches):
        if step >= n_steps - n_asked:
            timed_from = engine.comm_report().timed_from
        waited, recorded, started = len(compiled.waits()), events["recorded"], _collectives(engine)
        before = entries
        entries = traced(compiled, partial(train, batch)) if step >= n_steps - n_asked - 1 else train(batch)
        waits = Counter(what for _, what in compiled.waits()[waited:])
        counts = {"events": events["recorded"] - recorded, "collectives": _collectives(engine) - started}
        counts |= {"asked": entries and asked_for(entries), "buckets": len(engine.buckets)}
        counts["differing"] = differing(before, entries) if before and entries else None
        found.append({"waits": waits, "timed_from": timed_from, **counts})
    engine.finish_parameters()
    return [StepCounts(**counts, loss=loss.item()) for counts, loss in zip(found, losses.unbind(), strict=True)]


def _collectives(engine: ZeroEngine) -> int:
    """By the watch, which is asked without the ledger noticing."""
    return sum(engine.transport.watch.begun.values())


# Steps whose parameters are looked at for edits that nothing counts.
FIRST_STEPS = 4
PER_ROW = ("aten::linalg_vector_norm", "aten::mul")
LOOPS = ("arithmetic/sums.py sums_of_squares", "optimizer/storage.py scale_gradients")


Count = Callable[[dict[str, dict]], list[dict[str, list[StepCounts]]]]


@pytest.fixture(scope="module")
def count_steps(library, tmp_path_factory) -> Count:
    """Counts the steps of each rank, by settings."""

    def count_of(settings: dict[str, dict]) -> list[dict[str, list[StepCounts]]]:
        folder = str(tmp_path_factory.mktemp("counted"))
        job = {"settings": settings, "n_steps": FIRST_STEPS + 3, "n_asked": 1}
        return run_on_ranks(counted_steps, library=library, folder=folder, **job)

    return count_of


@pytest.fixture(scope="module")
def counted(count_steps) -> list[dict[str, list[StepCounts]]]:
    return count_steps(SETTINGS)


@pytest.mark.extra("wire")
@standin_device.needs_compiler
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_stops_the_host_once_and_one_of_the_first_steps_twice(name, counted):
    for found in counted:
        waits = [step.waits.total() for step in found[name]]
        # For the norm of the step before, to see whether it was finite.
        assert max(waits[:FIRST_STEPS]) <= 2, found[name]
        assert max(waits[FIRST_STEPS:]) <= 1, found[name]


@pytest.mark.extra("wire")
@standin_device.needs_compiler
@pytest.mark.parametrize("name", SETTINGS)
def test_no_event_is_timed_before_somebody_asks(name, counted):
    for found in counted:
        *steps, asked = found[name]
        assert sum(step.events for step in steps) == 0
        # A wait's begin and end, and the first start of those of a kind that are under way.
        assert 0 < asked.events < 2.5 * asked.collectives, found[name]
        assert {step.timed_from for step in steps} == {None} and asked.timed_from == len(steps)


@standin_device.needs_compiler
@pytest.mark.parametrize("stage", range(4))
def test_a_step_asks_as_little_of_the_device_as_the_stage_needs(stage, counted):
    for found in counted:
        *_, traced, _asked = found[f"stage {stage}"]
        asked, buckets = traced.asked, traced.buckets
        collectives, kinds = own(asked, "collective"), Counter(each.kind for each in asked.elements())
        # Stage 3 gathers layers for forward and again for backward, the last one once. The norm is a sum from stage 1 on.
        assert collectives <= (buckets, 2 * buckets + 1, 2 * buckets + 1, 3 * buckets + 1)[stage]
        # Each records its end, and the look for a bad norm its own.
        assert kinds["event"] == collectives + 1
        # The norm goes to the host, and its digits become others; the agreement's sum is a copy.
        # At stage 3, one loop restores the mark of each bucket's absent values.
        assert own(asked, "copy") <= 4 + (buckets if stage == 3 else 0)
        # Here torch's loops over tensors are a launch for each; on an accelerator they are few for all.
        # The norm's loop has a value for each row; the clip's has one for each run of rows that lie next to each other.
        norms, clips = (
            sum(n for each, n in asked.items() if each.name in PER_ROW and each.where.startswith(loop))
            for loop in LOOPS
        )
        assert 0 < clips <= norms
        # Gradients are joined and divided, and zeros written between and after them.
        rest = own(asked, "launch") - norms - clips
        assert rest <= 3 * buckets + 8
        # A shard or a buffer for each bucket, three buffers of the pool, and those that stage 3 gathers into.
        allocations = own(asked, "allocation") - norms
        assert allocations <= (3 if stage == 3 else 1) * buckets + 16


@standin_device.needs_compiler
@pytest.mark.parametrize("stage", range(4))
def test_a_step_asks_for_what_the_step_before_has_asked_for_except_for_its_look_at_the_norm(
    stage, counted, count_steps
):
    name = f"stage {stage}"

    def differing_by_rank() -> list[dict[str, int]]:
        # The model reads another batch.
        differing = (each[name][-1].differing for each in counted)
        return [{where: n for where, n in each.items() if not where.startswith(SCRIPT)} for each in differing]

    for _ in range(3):
        if all(sum(mine.values()) <= 4 for mine in differing_by_rank()):
            break
        # On a busy machine, a thread of gloo may free memory late, so the next request gets other memory.
        counted = count_steps({name: SETTINGS[name]})
    for mine in differing_by_rank():
        assert 0 < sum(mine.values()) <= 4
        assert all("step/nonfinite.py look" in where or where.endswith("unpin") for where in mine)


@pytest.mark.slow
@standin_device.needs_compiler
@pytest.mark.parametrize("stage", range(4))
def test_a_graph_could_hold_a_step_that_takes_any_gradient(stage, library, tmp_path):
    job = {"stages": [stage], "bucket_bytes": 20_480, "captures": True}
    for found in run_on_ranks(count, library=library, folder=str(tmp_path), **job):
        stops, ignores = found[stage, "stop"], found[stage, "ignore"]
        assert not ignores.differing and (ignores.waits, ignores.left, ignores.allocated) == (0, 0, 0)
        # The host reads only the norm of the previous step, from pinned memory that each step allocates.
        assert stops.waits == 1 and sum(stops.differing.values()) <= 4 and stops.left == stops.allocated == 0
        assert all("step/nonfinite.py look" in where or where.endswith("unpin") for where in stops.differing)


def capturable_losses(
    rank: int, world_size: int, library: Path, folder: str, name: str, stages: list[int | None]
) -> list[list[float]]:
    """Losses of a `capturable` optimizer whose learning rate is a tensor of the device; stage None is a plain loop."""
    standin_device.register(library)
    found = []
    with standin_device.process_group(rank, world_size, folder):
        for stage in stages:
            torch.manual_seed(0)
            model = gpt2(layers=2).to(own_device())
            rate = torch.tensor(1e-2, device=own_device())
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=rate, capturable=True)
            engine = None if stage is None else ZeroEngine(model, [optimizer], {"stage": stage, "nonfinite": "ignore"})
            losses = []
            for step in range(4):
                batch = gpt2_batch(torch.Generator().manual_seed(10 * step + rank), 2)
                loss = model(**{name: values.to(own_device()) for name, values in batch.items()}).loss
                loss.backward()
                if engine is None:
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad.div_(world_size))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                # As a schedule that a captured step reads.
                rate.mul_(0.5)
            if engine is not None:
                engine.close()
            found.append(losses)
    return found


# All of torch's that have the setting.
CAPTURABLE = [
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and "capturable" in inspect.signature(kind).parameters
]


@pytest.mark.slow
@standin_device.needs_compiler
@pytest.mark.parametrize("name", CAPTURABLE)
def test_a_capturable_optimizer_follows_a_plain_loop_and_a_rate_in_a_tensor(name, library, tmp_path):
    stages = [None, 0, 1, 2, 3]
    job = {"library": library, "folder": str(tmp_path), "name": name, "stages": stages}
    for plain, *losses in run_on_ranks(capturable_losses, **job):
        assert losses == [plain] * 4


@standin_device.needs_compiler
@on_ranks(1)
def test_events_are_used_again_when_their_times_have_been_read(rank, world_size, library):
    standin_device.register(library)
    events = count_events(torch.get_device_module(standin_device.NAME))
    ledger = Ledger(clock(torch.device(standin_device.NAME)))
    label = Label(kind="all-gather of parameters", subject="bucket 0")
    for _ in range(20):
        ledger.count(label, 1, 0)
        Handle(label, ledger, lambda: None).finish()
    assert events == {"recorded": 60, "made": 3}


class Halving(nn.Linear):
    """Edits its weight in each forward, where autograd does not see it."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(hidden)


@standin_device.needs_compiler
@on_ranks(2)
def test_an_edit_that_nothing_counts_is_refused_before_the_step_or_at_the_next_evaluation(
    rank, world_size, library, tmp_path
):
    folder = str(tmp_path)
    standin_device.register(library)
    with standin_device.process_group(rank, world_size, folder):
        for trains in (True, False):
            model = nn.Sequential(nn.Linear(16, 16), Halving(16, 2)).to(own_device())
            optimizer = torch.optim.AdamW(model.parameters())
            ZeroEngine(model, [optimizer], {"stage": 3, "unit_bytes": 0})
            batch = torch.ones(2, 16, device=own_device())
            with torch.set_grad_enabled(trains):
                loss = model(batch).sum()
            if trains:
                loss.backward()
            with (
                pytest.raises(RuntimeError, match=r"a forward has edited '1\.weight' through `\.data`"),
                torch.no_grad(),
            ):
                optimizer.step() if trains else model(batch)


# ---- sums over micro-batches in host memory ----

MICRO_BATCHES = 3
PLAIN = {"stage": 2, "grad_accumulation": "sharded"}
OFFLOADED = {
    "stage 2": {"stage": 2, "offload": HOST},
    "stage 2, half": {"stage": 2, "offload": HOST | {"ratio": 0.5}},
    "stage 3": {"stage": 3, "offload": HOST},
    "stage 3, in files": {"stage": 3, "offload": FILES},
}


class Waits:
    """What the host waits for while backward runs, on other threads than those of sums and steps."""

    def __init__(self, compiled) -> None:
        self._compiled = compiled
        self.found: list[str] = []

    def of(self, backward) -> None:
        before = len(self._compiled.waits())
        backward()
        beside = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("hf_zero")}
        self.found += [what for thread, what in self._compiled.waits()[before:] if thread not in beside]


def trained(compiled, settings: dict, *, looks: bool = False) -> tuple[list[torch.Tensor], list[str]]:
    """Losses, norms and weights of a few steps of several micro-batches; and what all backwards but a step's last waited for."""
    model, optimizer, engine = prepared({"bucket_bytes": "20KiB", "grad_accumulation": "sharded", **settings})
    found, waits = [], Waits(compiled)
    for step in range(2):
        for micro in range(MICRO_BATCHES):
            batch = gpt2_batch(torch.Generator().manual_seed(100 * step + micro), 2)
            batch = {name: values.to(own_device()) for name, values in batch.items()}
            if micro < MICRO_BATCHES - 1:
                with engine.no_sync():
                    loss = model(**batch).loss
                    waits.of(loss.backward)
            else:
                loss = model(**batch).loss
                loss.backward()
            if looks and micro == 0:
                found += [engine.full_grad(parameter).cpu() for parameter in model.parameters()]
                (optimizer if step else model).zero_grad(set_to_none=False)
            found.append(loss.detach().cpu())
        found.append(engine.clip_grad_norm_(1.0).cpu())
        optimizer.step()
        optimizer.zero_grad()
    # One more shard a bucket at most.
    assert engine.tier.d2h.sum_bytes <= sum(4 * bucket.layout.shard_numel for bucket in engine.buckets)
    with engine.gathered():
        found += [parameter.detach().cpu() for parameter in model.parameters()]
    return found, waits.found


CELLS = [
    pytest.param(1, ["stage 2", "stage 3, in files"], True, id="1"),
    pytest.param(2, ["stage 2"], False, id="2"),
    *(pytest.param(ranks, list(OFFLOADED), True, id=f"{ranks}-all", marks=pytest.mark.slow) for ranks in (1, 2)),
]


@standin_device.needs_compiler
@pytest.mark.short_cells("2")
@pytest.mark.parametrize(("world_size", "names", "looks"), CELLS)
@on_ranks()
def test_backward_waits_for_no_copy_of_a_micro_batch_and_the_sums_are_those_of_the_device(
    rank, world_size, names, looks, library, tmp_path
):
    folder = str(tmp_path)
    compiled = standin_device.register(library)
    compiled.keep_to(rank + 1)
    with standin_device.process_group(rank, world_size, folder):
        plain, _ = trained(compiled, PLAIN)
        for name in names:
            settings = OFFLOADED[name]
            files = {"nvme_path": folder} if "nvme" in settings["offload"].values() else {}
            found, waits = trained(compiled, settings | {"offload": settings["offload"] | files})
            assert all(map(torch.equal, found, plain)), name
            if world_size == 1:
                assert waits == [], (name, set(waits))
        if looks:
            looked, _ = trained(compiled, PLAIN, looks=True)
            found, _ = trained(compiled, OFFLOADED["stage 2"], looks=True)
            assert all(map(torch.equal, found, looked))
    assert compiled.hazards() == []
    assert compiled.contexts() == {rank + 1}
