"""What communication and a steady step cost: waits, spans of torch.profiler, and what the host is asked for."""

import json
import os
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate.utils import ProfileKwargs
from accelerate_job import make_accelerator
from cells import short_of
from hypothesis import given
from hypothesis import strategies as st
from shared_ranks import on_ranks, run_on_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile
from trainer_job import as_launched

from hf_zero.arithmetic.sums import PART_NUMEL, sum_of_squares, sums_of_squares
from hf_zero.buckets.flat_views import FlatViews
from hf_zero.buckets.sharded_parameter import ShardedParameter
from hf_zero.comm.control import Control
from hf_zero.comm.ledger import CommRow, Ledger
from hf_zero.comm.own_groups import receiving_threads
from hf_zero.comm.transport import Handle
from hf_zero.comm.waits import Label
from hf_zero.config import ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.layout.intervals import Interval
from hf_zero.queues import Moment, clock

pytestmark = pytest.mark.timeout(120)
GATHER, REDUCE = (
    Label(kind=kind, subject="bucket 0") for kind in ("all-gather of parameters", "reduce-scatter of gradients")
)


class Queue:
    """A device that does in its own time what the host has asked of it."""

    def __init__(self):
        self.asked_s = 0.0
        self.done_s = -1.0

    def ask(self, seconds: float) -> None:
        """Work, or a wait, that the device will be busy with for so long."""
        self.asked_s += seconds

    def catch_up(self) -> None:
        self.done_s = self.asked_s

    def now(self) -> "Operands":
        return Operands(self)


class Operands(Moment):
    """The end of what a queue has been asked for so far."""

    def __init__(self, queue: Queue):
        self._queue, self._seconds = queue, queue.asked_s

    @property
    def is_past(self) -> bool:
        return self._seconds <= self._queue.done_s

    def seconds_until(self, later: "Operands") -> float:
        assert self.is_past and later.is_past, "read before the device was there"
        return later._seconds - self._seconds


def row_of(ledger: Ledger, label: Label) -> CommRow:
    [row] = [row for row in ledger.rows() if row.kind == label.kind]
    return row


def test_a_wait_is_what_the_devices_queue_stood_still_and_is_known_once_it_has_passed_it():
    queue = Queue()
    ledger = Ledger(queue.now)
    ledger.count(GATHER, 6_000_000_000, 0)
    handle = Handle(GATHER, ledger, lambda: queue.ask(2.0))
    queue.ask(1.0)
    handle.finish()
    assert row_of(ledger, GATHER).wait_seconds == 0
    queue.catch_up()
    found = row_of(ledger, GATHER)
    assert (found.wait_seconds, found.under_way_seconds, found.gb_per_second) == (2.0, 3.0, 2.0)


@given(
    st.lists(
        st.tuples(st.sampled_from([GATHER, REDUCE]), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=12
    )
)
def test_waits_add_up_by_kind_whenever_the_device_gets_there(collectives):
    queue = Queue()
    ledger = Ledger(queue.now)
    waited = {GATHER.kind: 0.0, REDUCE.kind: 0.0}
    for label, works, waits, catches_up in collectives:
        ledger.count(label, 1, 0)
        handle = Handle(label, ledger, lambda waits=waits: queue.ask(waits))
        queue.ask(works)
        handle.finish()
        waited[label.kind] += waits
        if catches_up:
            queue.catch_up()
            assert sum(row.wait_seconds for row in ledger.rows()) == sum(waited.values())
    queue.catch_up()
    assert {row.kind: row.wait_seconds for row in ledger.rows()} == {
        k: waited[k] for k in {c[0].kind for c in collectives}
    }


def test_a_collective_made_of_others_waits_once_and_is_under_way_in_both():
    queue = Queue()
    ledger = Ledger(queue.now)
    ledger.count(GATHER, 1, 0)
    ledger.count(REDUCE, 1, 0)
    inner = Handle(GATHER, ledger, lambda: queue.ask(2.0))
    Handle(REDUCE, ledger, inner.finish).finish()
    queue.catch_up()
    assert row_of(ledger, REDUCE).wait_seconds == 2.0 and row_of(ledger, GATHER).wait_seconds == 0.0
    assert row_of(ledger, GATHER).under_way_seconds == row_of(ledger, REDUCE).under_way_seconds == 2.0


def test_times_begin_with_the_first_question_and_bytes_with_the_first_collective():
    queue, asked = Queue(), []

    def now() -> Operands:
        asked.append(queue.asked_s)
        return queue.now()

    ledger = Ledger(now, is_timed=False)

    def started(numbytes: int) -> Handle:
        ledger.count(GATHER, numbytes, 0)
        return Handle(GATHER, ledger, lambda: queue.ask(1.0))

    started(1_000_000_000).finish()
    earlier = started(1_000_000_000)
    assert not asked and ledger.timed_from is None
    ledger.watch.log.step = 7
    ledger.start_timing()
    # One more of a kind of which one is under way that nobody has timed.
    later = started(1_000_000_000)
    earlier.finish()
    later.finish()
    started(4_000_000_000).finish()
    queue.catch_up()
    found = row_of(ledger, GATHER)
    assert (found.calls, found.bytes_sent, ledger.timed_from) == (4, 7_000_000_000, 7)
    assert (found.wait_seconds, found.under_way_seconds, found.gb_per_second) == (3.0, 1.0, 4.0)
    # The end of a wait is the end of what was under way.
    assert len(asked) == 2 + 2 + 3


def test_on_the_host_a_wait_is_wall_time_and_known_at_once():
    ledger = Ledger(clock(torch.device("cpu")))
    ledger.count(GATHER, 1, 0)
    began_s = time.perf_counter()
    Handle(GATHER, ledger, lambda: time.sleep(0.05)).finish()
    assert 0.05 <= row_of(ledger, GATHER).wait_seconds <= time.perf_counter() - began_s


# ---- torch.profiler ----

EVERYTHING = {"record_shapes": True, "with_stack": True, "profile_memory": True}


def profiled_steps(
    rank: int, world_size: int, settings: dict, options: dict, profiles: int = 3
) -> tuple[list[str], list[float], list[float]]:
    """Names in profiles that end right behind a step, and losses under profiles and without."""
    losses = {}
    for profiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ZeroEngine(model, [optimizer], ZeroConfig.from_dict(settings))
        generator = torch.Generator().manual_seed(rank)
        losses[profiled] = []
        for _ in range(profiles):
            made = profile(activities=[ProfilerActivity.CPU], **options) if profiled else nullcontext()
            with made:
                for _ in range(3):
                    loss = model(torch.randn(4, 32, generator=generator)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses[profiled].append(loss.item())
            if profiled:
                names = sorted({event.key for event in made.key_averages()})
    return names, losses[True], losses[False]


def check_profiles(**arguments) -> None:
    for names, profiled, plain in run_on_ranks(profiled_steps, **arguments):
        assert profiled == plain
        ours = [name for name in names if name.startswith("hf_zero: ")]
        assert any("start" in name for name in ours) and any("wait for" in name for name in ours), ours


@pytest.mark.short_cells("2")
@pytest.mark.parametrize("stage", short_of([0, 1, 2, 3], [2, 3]))
def test_profiles_end_behind_a_step_without_a_crash_and_name_collectives(stage):
    check_profiles(settings={"stage": stage, "bucket_bytes": 8192}, options={"profile_memory": True})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_profiles_with_stacks_and_shapes_end_without_a_crash(stage):
    check_profiles(settings={"stage": stage, "bucket_bytes": 8192}, options=EVERYTHING, profiles=1)


@pytest.mark.parametrize("stage", short_of([1, 2], [2]))
@on_ranks(2)
def test_accelerator_profile_writes_its_traces(rank, world_size, stage, tmp_path):
    door = f"plugin {stage}"
    folder = str(tmp_path)
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(rank)
    window = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1, "skip_first": 0}
    for number, kwargs in enumerate(({"schedule_option": window}, {"profile_memory": True, "record_shapes": True})):
        traces = f"{folder}/{number}"
        with accelerator.profile(ProfileKwargs(output_trace_dir=traces, **kwargs)) as profiler:
            for _ in range(5):
                accelerator.backward(model(torch.randn(4, 32, generator=generator)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
    trace = json.loads(Path(folder, "0", f"profile_{rank}.json").read_text())
    accelerator.free_memory()
    names = sorted({event.get("name", "") for event in trace["traceEvents"]})
    assert any(name.startswith("hf_zero: start all-gather of parameters") for name in names)


# ---- what a steady step asks of the host ----


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Model(nn.Module):
    """Some layers, and a buffer."""

    def __init__(self):
        super().__init__()
        self.entry, self.layers = nn.Linear(8, 8), nn.ModuleList([Layer() for _ in range(3)])
        self.register_buffer("places", torch.arange(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(inputs + self.places)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def count_calls(counts: Counter, holder: type, name: str) -> None:
    """Has each call of a method counted, a classmethod's too."""
    own = holder.__dict__[name]
    function = own.__func__ if isinstance(own, classmethod) else own

    def counted(*args, **kwargs):
        counts[name] += 1
        return function(*args, **kwargs)

    setattr(holder, name, classmethod(counted) if isinstance(own, classmethod) else counted)


@pytest.mark.parametrize("stage", short_of([0, 1, 2, 3], [3]))
@on_ranks(2)
def test_a_steady_step_walks_over_no_modules_reads_no_sharded_parameter_and_agrees_on_little(rank, world_size, stage):
    steps = 4
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = ZeroEngine(model, [optimizer], {"stage": stage})
    generator, counts = torch.Generator().manual_seed(rank), Counter()

    def step() -> None:
        model(torch.randn(4, 8, generator=generator)).backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    watched = [(ShardedParameter, "__torch_function__"), (nn.Module, "named_modules"), (Control, "_start")]
    for holder, name in watched:
        count_calls(counts, holder, name)
    for _ in range(steps):
        step()
    counts = {name: counts[name] for _, name in watched}
    # On used parameters; where gradients are sharded, on their norm; where layers are gathered, on the ends of two passes.
    agreements = {0: 1, 1: 2, 2: 2, 3: 4}[stage]
    assert counts == {"__torch_function__": 0, "named_modules": 0, "_start": steps * agreements}


def policies_of_receiving_threads(rank: int, world_size: int) -> list[int]:
    """How the system schedules the threads in which gloo receives, those of the script's own group first."""
    scripts = receiving_threads()
    model = nn.Linear(4, 4)
    ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {"stage": 2})
    ours = receiving_threads() - scripts
    return [os.sched_getscheduler(thread) for thread in (*scripts, *ours)]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="threads are scheduled in batch on Linux only")
def test_the_threads_that_receive_for_an_engine_take_no_busy_core_and_the_scripts_own_are_left_alone():
    policies = run_on_ranks(policies_of_receiving_threads)
    if not any(policies):
        pytest.skip("this release of gloo does not name its threads")
    for script, *ours in policies:
        assert script == os.SCHED_OTHER
        assert ours and set(ours) == {os.SCHED_BATCH}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 4), min_size=1, max_size=3)), min_size=1, max_size=6),
    st.integers(0, 9),
)
def test_views_made_at_once_are_those_made_one_by_one(parts, tail):
    end, places = 0, []
    for gap, shape in parts:
        start = end + gap
        end = start + torch.Size(shape).numel()
        places.append((Interval(start, end), shape))
    flat = torch.arange(end + tail, dtype=torch.float32)
    views = FlatViews(places).of(flat)
    for view, (interval, shape) in zip(views, places, strict=True):
        one = flat[interval.start : interval.stop].view(shape)
        assert view.shape == one.shape and view.stride() == one.stride() and torch.equal(view, one)
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert view.numel() == 0 or view.data_ptr() == one.data_ptr()


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.lists(st.integers(0, 4), min_size=1, max_size=3)), min_size=1, max_size=6
    ),
    st.integers(0, 9),
)
def test_slots_filled_at_once_have_what_one_by_one_gives_them_and_zeros_between(parts, tail):
    end, places = 0, []
    for gap, shape in parts:
        start = end + gap
        end = start + torch.Size(shape).numel()
        places.append((Interval(start, end), shape))
    generator = torch.Generator().manual_seed(end)
    views, values = FlatViews(places), [torch.randn(shape, generator=generator) for _, shape in places]
    # As gradients of transposed weights are.
    values = [value.mT.contiguous().mT if value.ndim > 1 else value for value in values]
    for dtype in (torch.float32, torch.bfloat16):
        filled = torch.full((end + tail,), float("nan"), dtype=dtype)
        views.fill(filled, [value.to(dtype) for value in values], 1 / 3)
        one_by_one = torch.zeros(end + tail, dtype=dtype)
        for (interval, _), value in zip(places, values, strict=True):
            one_by_one[interval.start : interval.stop] = value.to(dtype).reshape(-1) * (1 / 3)
        assert torch.equal(filled, one_by_one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_squares_of_many_tensors_are_summed_to_the_same_bits(dtype):
    torch.manual_seed(0)
    sizes = [1, 7, 16, 31, 33, 96, 1000, 4096, 40_000, PART_NUMEL - 1, PART_NUMEL, PART_NUMEL + 5, 200_000]
    tensors = [torch.randn(size).mul_(3 * size).to(dtype) for size in sizes]
    tensors += [torch.zeros(0, dtype=dtype), torch.randn(32, 48).to(dtype), torch.randn(3, 5, 7).to(dtype)]
    for some in (tensors, tensors[:6], tensors[10:11], tensors[-2:]):
        one_by_one = torch.stack([sum_of_squares(tensor.reshape(-1)) for tensor in some])
        assert torch.equal(sums_of_squares(some), one_by_one)
