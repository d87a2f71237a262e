"""Steps offloaded buckets on copies of their state while backward goes on."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ..buckets.bucket import Bucket, Row
from ..buckets.rows import MASTER
from ..device import Arrival, allocate, enter_thread
from ..offload.files import ReadRegion
from ..offload.host_memory import HostCores
from ..offload.tiers import StateFiles, Tier
from ..optimizer.bucket_state import (
    Arguments,
    BucketState,
    EarlyReport,
    Placeholders,
    Trial,
    arguments_of,
    double_of,
    group_with,
    note_arguments,
    own_step,
    settings_of,
    try_step,
)
from ..optimizer.holder import StepTiming

# ---- The inputs of a step, and the step itself on the caller's tensors ----


@dataclass(frozen=True, eq=False)
class Seen:
    """The inputs of a bucket's step at one moment.

    Attributes:
        rows: those with a gradient, in their group's order, each with its gradient and its state.
        settings: of the group.
        arguments: of the script to the step.
        marks: (object, version) of every tensor and dict that the step reads. The objects are kept, so that none of their
            addresses is given to another.
    """

    rows: tuple[tuple[Row, torch.Tensor, dict[str, Any]], ...]
    settings: dict[str, Any]
    arguments: Arguments
    marks: tuple[tuple[Any, Any], ...]

    def equals(self, other: "Seen") -> bool:
        """Whether a step would read the same: the same objects, none of them written to since, and equal settings."""
        return (
            len(self.marks) == len(other.marks)
            and all(a is b and old == new for (a, old), (b, new) in zip(self.marks, other.marks))
            and _are_equal(self.settings, other.settings)
            and _are_equal(self.arguments, other.arguments)
        )

    def with_marks(self, *marks: tuple[Any, Any]) -> "Seen":
        """Adds further inputs of the step."""
        return replace(self, marks=self.marks + marks)


def seen_now(bucket: Bucket, optimizer: torch.optim.Optimizer) -> Seen:
    """Collects the present inputs of the bucket's step. Reads no tensor's values, but those of tensors in the settings."""
    group = optimizer.param_groups[bucket.key.group]
    has = {id(row.tensor): (row, gradient) for row in bucket.rows if (gradient := row.tensor.grad) is not None}
    group = group_with(group, lambda tensor: id(tensor) in has)
    rows = [has[id(tensor)] for tensor in group["params"]]
    # By `get`: `optimizer.state` makes an entry when asked, and an empty one would look like a step taken.
    found = tuple((row, gradient, optimizer.state.get(row.tensor, {})) for row, gradient in rows)
    return Seen(found, settings_of(group), arguments_of(optimizer), _marks(bucket, optimizer, found))


def _marks(
    bucket: Bucket,
    optimizer: torch.optim.Optimizer,
    rows: tuple[tuple[Row, torch.Tensor, dict[str, Any]], ...],
) -> tuple[tuple[Any, Any], ...]:
    # A gradient scaler hands these to a fused step at the last moment.
    of_scaler = ((getattr(optimizer, name, None), name) for name in ("grad_scale", "found_inf"))
    return ((bucket.master, bucket.master._version), *of_scaler, *_marks_of(rows))


def _marks_of(rows: tuple[tuple[Row, torch.Tensor, dict[str, Any]], ...]) -> Iterator[tuple[Any, Any]]:
    for row, gradient, state in rows:
        yield row.tensor, row.tensor._version
        yield gradient, gradient._version
        for name, value in state.items():
            yield name, None
            yield (value, value._version) if torch.is_tensor(value) else (None, value)


def _are_equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) or torch.is_tensor(other):
        return torch.is_tensor(one) and torch.is_tensor(other) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return type(one) is type(other) and one == other


def step_on(
    optimizer: torch.optim.Optimizer,
    seen: Seen,
    master: torch.Tensor,
    states: Mapping[Row, dict[str, Any]],
    scratch: torch.Tensor,
) -> dict[Row, dict[str, Any]]:
    """Takes the step that `seen` describes on `master`, (shard_numel,), and on `states`, both the caller's; returns the rows'
    state after it.

    Args:
        scratch: (shard_numel,) of the master dtype, for the gradients.
    """
    doubles: dict[Row, nn.Parameter] = {}
    for row, gradient, _ in seen.rows:
        double = doubles[row] = nn.Parameter(row.of(master))
        double.grad = row.of(scratch).copy_(gradient)
        # A step may read attributes of parameters.
        double.__dict__ = row.tensor.__dict__
    group = settings_of(seen.settings) | {"params": list(doubles.values())}
    # An empty entry would look like a step taken.
    register: dict[torch.Tensor, dict[str, Any]] = {doubles[row]: state for row, state in states.items() if state}
    twin = double_of(optimizer, group, register)
    note_arguments(twin, seen.arguments)
    own_step(twin)
    return {row: dict(twin.state[double]) for row, double in doubles.items()}


# ---- The next step of one bucket, taken on copies, to be used or dropped ----

Stepped = dict[Row, dict[str, Any]]
"""Of each stepped row, the new entries for `optimizer.state`."""


class Double:
    """Copies of a bucket's master and state for its next step, while training still reads the old ones.

    [Note: two copies of the state]
    An optimizer's step writes in place. An early step writes to copies, so that a look at the state, a save and a late clip find
    the old values. If the script's step would read the same inputs (`Seen.equals`), the copies become the state and the old
    tensors the next copies. Else the copies are dropped, and the step is taken again. Both ways give the same bits.

    State in a file is copied to the file's other side; see [Note: two sides of a file].

    Edits that torch does not count (through `.data` or numpy, of rows or their gradients) are not noticed.
    """

    def __init__(self, state: BucketState, optimizer: torch.optim.Optimizer):
        self.state = state
        self.optimizer = optimizer
        if state.shard is not None:
            state.shard.add_side()

    @property
    def may_begin(self) -> bool:
        """Whether the stored master is the one that a step at its time would read."""
        # A parameter that a script has edited has another master than the file.
        return self.state.shard is None or not self.state.bucket.edited_rows

    def seen(self) -> Seen:
        """Collects the present inputs of a step."""
        return seen_now(self.state.bucket, self.optimizer).with_marks(*self._marks())

    @torch.no_grad()
    def step(self, seen: Seen, scratch: torch.Tensor, buffer: torch.Tensor | None) -> Stepped:
        """Takes the step that `seen` describes on copies. Runs in a thread of its own; calls follow each other.

        Args:
            scratch: (at least shard_numel,) of the master dtype: some optimizers write into their gradients.
            buffer: with the contents of the bucket's file; afterwards those of its other side.
        """
        regions = self.state.regions_in(buffer)
        master = self.state.master.begin_aside(regions)
        begun = self.state.state.begin_aside({row: state for row, _, state in seen.rows}, regions)
        stepped = step_on(self.optimizer, seen, master, begun, scratch)
        self.state.state.end_aside(stepped, regions)
        return stepped

    def commit(self, stepped: Stepped) -> None:
        """Makes the copies the state, and the state the next copies."""
        if self.state.shard is not None:
            self.state.shard.exchange()
        self.state.master.commit_aside()
        self.state.state.exchange_aside()
        for row, state in stepped.items():
            register = self.optimizer.state[row.tensor]
            self.state.state.commit_aside(row, register)
            register.clear()
            register.update(state)

    @property
    def nbytes(self) -> int:
        """Counts bytes of the copies in memory, while they wait for the next step."""
        return self.state.master.aside_bytes + self.state.state.aside_bytes

    def _marks(self) -> tuple[tuple[Any, Any], ...]:
        shard = self.state.shard
        if shard is None:
            return ()
        parameters = ((row.slot.parameter, row.slot.parameter._version) for row in self.state.bucket.rows)
        return ((shard, shard.edition), *parameters)


# ---- The thread on which steps run beside training ----

_HOST = torch.device("cpu")
_Result = TypeVar("_Result")


class StepThread:
    """A thread in which steps follow each other, with its own number of CPU threads for torch's operations.

    Args:
        cores: for those operations.
        device: of the gradients.
    """

    def __init__(self, cores: HostCores, device: torch.device):
        enter = partial(enter_thread, device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_zero-step", initializer=enter)
        self._scratch: torch.Tensor | None = None
        before = torch.get_num_threads()
        self._thread.submit(cores.enter).result()
        # torch gives the last number that any thread has set to threads that start later.
        torch.set_num_threads(before)

    def submit(self, call: Callable[..., _Result], *arguments) -> Future[_Result]:
        return self._thread.submit(call, *arguments)

    def scratch(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 for the call that runs: some optimizers write into their gradients."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = allocate(nbytes, torch.uint8, _HOST)
        return self._scratch[:nbytes]

    @property
    def scratch_bytes(self) -> int:
        return 0 if self._scratch is None else self._scratch.nbytes

    def close(self) -> None:
        self._thread.shutdown()


# ---- Steps on copies of the state, taken beside training ----


class StepsBeside:
    """The doubles of buckets, and the threads that step them.

    One thread computes, so that steps follow each other. The threads and buffers of the usual walk over files read and write.

    Args:
        tier: whose cores a step runs on.
        files: of state; None without files.

    Attributes:
        doubles: of the buckets that are stepped early.
    """

    def __init__(self, tier: Tier, files: StateFiles | None, placeholders: Placeholders):
        self._files = files
        self._placeholders = placeholders
        self._thread = StepThread(cast(HostCores, tier.cores), tier.device)
        self._buffers = self._no_buffers()
        self._running: dict[Bucket, Future[Stepped]] = {}
        self.doubles: dict[Bucket, Double] = {}
        self._most_copy_bytes = 0

    def add(self, optimizer: torch.optim.Optimizer, state: BucketState, memory_bytes: int) -> None:
        """Registers a bucket for early steps, whose copies take up to `memory_bytes` in memory."""
        self.doubles[state.bucket] = Double(state, optimizer)
        self._most_copy_bytes += memory_bytes

    def of(self, optimizer: torch.optim.Optimizer) -> list[Bucket]:
        """Returns the optimizer's buckets that are stepped here."""
        return [bucket for bucket, double in self.doubles.items() if double.optimizer is optimizer]

    def start(self, bucket: Bucket, seen: Seen, arrival: Arrival) -> Future[Stepped]:
        """Begins the step that `seen` describes, once the gradient has arrived."""
        double = self.doubles[bucket]
        if self._files is None or double.state.shard is None:
            self._running[bucket] = self._thread.submit(self._step_in_memory, double, seen, arrival)
        else:
            before = [self._running[bucket]] if bucket in self._running else []
            self._running[bucket] = self._files.window.submit(self._step_by_file, double, seen, arrival, before)
        return self._running[bucket]

    def end(self) -> None:
        """Waits for all running steps. A failure is raised to the taker of its result."""
        wait(self._running.values())
        self._running.clear()

    def forget_buffers(self) -> None:
        """Forgets the buffers, which running steps still use."""
        self._buffers = self._no_buffers()

    def commit(self, stepped: dict[Bucket, Stepped]) -> None:
        """Makes these steps the buckets' state, and has parameters follow masters in files.

        Raises:
            OffloadError: a file failed.
        """
        for bucket, states in stepped.items():
            self.doubles[bucket].commit(states)
        shards = {bucket: self.doubles[bucket].state.shard for bucket in stepped if bucket.is_away}
        followed = {ReadRegion(shard, MASTER): b for b, shard in shards.items() if shard and b.has_second_copy}
        if self._files is None or not followed:
            return
        with closing(self._files.window.walk(list(followed))) as walk:
            for region, buffer in walk:
                bucket = followed[region]
                bucket.fetch(region.values(buffer))
                bucket.write_back()
                bucket.store(self._placeholders.of((), bucket.precision.master))

    def copy_bytes(self) -> int:
        """Bytes of copies of state in memory."""
        return sum(double.nbytes for double in self.doubles.values())

    def file_copy_bytes(self) -> int:
        """Bytes of copies of state in files."""
        shards = (double.state.shard for double in self.doubles.values())
        return sum(shard.nbytes for shard in shards if shard is not None)

    @property
    def scratch_bytes(self) -> int:
        """Counts bytes of the gradients of the running step."""
        return self._thread.scratch_bytes

    @property
    def most_bytes(self) -> int:
        """Counts bytes of all copies and `scratch_bytes` at most."""
        return self._most_copy_bytes + max((bucket.gradient_bytes for bucket in self.doubles), default=0)

    def close(self) -> None:
        wait(self._running.values())
        self._thread.close()

    def _step_in_memory(self, double: Double, seen: Seen, arrival: Arrival) -> Stepped:
        arrival.wait()
        return self._step(double, seen, None)

    def _step_by_file(self, double: Double, seen: Seen, arrival: Arrival, before: Iterable[Future[Stepped]]) -> Stepped:
        """Takes a step into the other side of the bucket's file. `before`: a dropped step of the same bucket."""
        # The dropped step may still write to the file's other side.
        wait(before)
        buffers, shard = self._buffers, double.state.shard
        buffer = buffers.get()
        if self._files is None or shard is None:
            raise AssertionError(
                "hf_zero: bug: a bucket without a file was to be stepped in one. Open an issue with this traceback."
            )
        if buffer is None:
            buffer = self._files.window.make_buffer(self._largest)
        try:
            shard.read(buffer)
            # Behind the read, which needs no gradient: the disk works while the gradient is copied.
            arrival.wait()
            stepped = self._thread.submit(self._step, double, seen, buffer).result()
            shard.write_aside(buffer)
            return stepped
        finally:
            buffers.put(buffer)

    def _step(self, double: Double, seen: Seen, buffer: torch.Tensor | None) -> Stepped:
        bucket = double.state.bucket
        scratch = self._thread.scratch(bucket.gradient_bytes).view(bucket.precision.master)
        return double.step(seen, scratch, buffer)

    @property
    def _largest(self) -> int:
        shards = (double.state.shard for double in self.doubles.values())
        return max(shard.nbytes for shard in shards if shard is not None)

    def _no_buffers(self) -> SimpleQueue[torch.Tensor | None]:
        """Makes a queue with one entry for each buffer, each allocated at its first use."""
        buffers: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        for _ in range(0 if self._files is None else self._files.window.size + 1):
            buffers.put(None)
        return buffers


def try_aside(optimizer: torch.optim.Optimizer, state: BucketState) -> tuple[Trial | None, str | None]:
    """Returns the findings of a trial step of the bucket's group, and the reason against early steps.

    Without a reason there are findings.
    """
    bucket, name = state.bucket, type(optimizer).__name__
    trial = try_step(optimizer, optimizer.param_groups[bucket.key.group], bucket.precision.master)
    if trial is not None and trial.hindrance is not None:
        return trial, trial.hindrance
    if bucket.layout.intact:
        # It may look at more than one of them, too: LAMB in some forms takes a norm over all.
        return trial, f"{name} looks at whole parameters"
    if trial is None:
        return None, f"{name} cannot be tried beforehand"
    if state.shard is not None and not state.master.is_away:
        # A layer that backward has yet to gather comes from there.
        return trial, "masters are the parameters themselves, in host memory"
    return trial, None


def memory_bytes(state: BucketState, trial: Trial) -> int:
    """Counts bytes of a bucket's copies in memory."""
    of_state = state.state.most_aside_bytes(state.bucket, [dtype for _, dtype in trial.kinds])
    return state.master.most_aside_bytes + of_state


# ---- Which steps are begun, and which of them hold when the script asks for the step ----

# Which next steps have been begun while backward goes on, and which of them hold when the script asks for the step.

_STEPS = 20
_MOST_IN_VAIN = 1


class EarlySteps:
    """Begins a bucket's step as soon as its gradient has landed, on copies that `optimizer.step()` uses or drops.

    Hooks, clipping and the script come between, as ever.

    Args:
        seen: what a bucket's step would depend on now.
        start: begins such a step, once the gradient has arrived.

    Attributes:
        trust: whether steps are begun at present.
        kept, forgotten: begun steps so far that were taken over, and that were not.
    """

    def __init__(self, seen: Callable[[Bucket], Seen], start: Callable[[Bucket, Seen, Arrival], Future[Stepped]]):
        self._seen = seen
        self._start = start
        self._begun: dict[Bucket, tuple[Seen, Future[Stepped] | None]] = {}
        self._is_in_vain = False
        self.kept = self.forgotten = 0
        self.trust = Trust()

    def landed(self, bucket: Bucket, arrival: Arrival, *, may_begin: bool) -> None:
        """Takes note of a bucket's gradient. `may_begin`: the bucket may be stepped early."""
        if bucket in self._begun:
            # Another backward adds to it, or has come in place of a step.
            del self._begun[bucket]
            self._is_in_vain = True
        if not may_begin:
            return
        seen = self._seen(bucket)
        self._begun[bucket] = (seen, self._start(bucket, seen, arrival) if self.trust.holds else None)

    def take(self, is_due: Callable[[Bucket], bool]) -> dict[Bucket, Stepped]:
        """Ends the begun steps of the buckets that are due; returns those that hold. The others are forgotten."""
        mine = [bucket for bucket in self._begun if is_due(bucket)]
        begun = {bucket: self._begun.pop(bucket) for bucket in mine}
        # All of them, and first: a step that failed in its thread ends this one before anything has changed.
        stepped = {bucket: future.result() for bucket, (_, future) in begun.items() if future is not None}
        current = {bucket for bucket, (seen, _) in begun.items() if seen.equals(self._seen(bucket))}
        held = {bucket: step for bucket, step in stepped.items() if bucket in current}
        self.kept += len(held)
        self.forgotten += len(stepped) - len(held)
        if mine or self._is_in_vain:
            self.trust.record(in_vain=self._is_in_vain or len(current) < len(mine))
        self._is_in_vain = False
        return held

    def clear(self) -> None:
        """Forgets all of them."""
        self._begun.clear()


class Trust:
    """Whether early steps have paid lately: at most one of the last 20 would have been, or was, begun in vain.

    One step is watched first. Steps are recorded whether or not anything was begun, so that trust comes back when a run stops
    clipping.
    """

    def __init__(self):
        self._in_vain: deque[bool] = deque(maxlen=_STEPS)

    @property
    def holds(self) -> bool:
        return bool(self._in_vain) and sum(self._in_vain) <= _MOST_IN_VAIN

    def record(self, *, in_vain: bool) -> None:
        self._in_vain.append(in_vain)


# ---- Steps that are taken while backward goes on ----


class Early(StepTiming):
    """Steps a bucket on copies as soon as its gradient has landed; `optimizer.step()` uses the steps that still hold.

    Args:
        tier, files, placeholders: see `StepsBeside`.
        most_bytes: that copies may take. Buckets beyond it, in the order in which gradients arrive, wait for the step.

    Attributes:
        steps: which have been begun.
    """

    steps_early = True

    def __init__(self, tier: Tier, files: StateFiles | None, placeholders: Placeholders, *, most_bytes: int):
        self._beside = StepsBeside(tier, files, placeholders)
        self._left_bytes = most_bytes
        self._bucket_count = 0
        self._hindrance: str | None = None
        self.steps = EarlySteps(self._seen, self._beside.start)

    def admit(self, optimizer: torch.optim.Optimizer, state: BucketState) -> None:
        self._bucket_count += 1
        if not state.bucket.tier.is_apart:
            return
        trial, hindrance = try_aside(optimizer, state)
        if trial is None or hindrance is not None:
            self._hindrance = hindrance
            return
        in_memory = memory_bytes(state, trial)
        self._left_bytes -= in_memory + (0 if state.shard is None else state.shard.nbytes)
        if self._left_bytes >= 0:
            self._beside.add(optimizer, state, in_memory)

    def takes(self, bucket: Bucket) -> bool:
        return bucket in self._beside.doubles

    def landed(self, bucket: Bucket, arrival: Arrival, *, all_used: bool) -> None:
        double = self._beside.doubles.get(bucket)
        # A parameter that this rank did not use keeps its gradient, or gets none, when all ranks have been heard.
        self.steps.landed(bucket, arrival, may_begin=all_used and double is not None and double.may_begin)

    def commit(self, optimizer: torch.optim.Optimizer) -> Collection[Bucket]:
        mine = set(self._beside.of(optimizer))
        held = self.steps.take(mine.__contains__)
        self._beside.end()
        self._beside.forget_buffers()
        self._beside.commit(held)
        return held.keys()

    def report(self) -> EarlyReport:
        return EarlyReport(
            buckets=len(self._beside.doubles),
            all_buckets=self._bucket_count,
            kept=self.steps.kept,
            forgotten=self.steps.forgotten,
            hindrance=self._hindrance,
        )

    def copy_bytes(self) -> int:
        return self._beside.copy_bytes()

    def file_copy_bytes(self) -> int:
        return self._beside.file_copy_bytes()

    def gradient_bytes(self) -> int:
        return self._beside.scratch_bytes

    def most_beside_bytes(self) -> int:
        return self._beside.most_bytes

    def close(self) -> None:
        self.steps.clear()
        self._beside.close()

    def _seen(self, bucket: Bucket) -> Seen:
        return self._beside.doubles[bucket].seen()
