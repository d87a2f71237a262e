"""The memory of a bucket's master and optimizer state between steps."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ..buckets.bucket import Bucket, Row
from ..buckets.rows import PackedPart
from ..offload.files import StoredShard
from ..offload.shards import Region

# ---- Counts for reports: early steps, and steps by kernels ----


@dataclass(frozen=True, kw_only=True)
class EarlyReport:
    """Counts buckets that are stepped while backward goes on.

    Attributes:
        kept, forgotten: early steps so far that `optimizer.step()` used, and that it dropped and took again.
        hindrance: the reason why some buckets cannot be stepped early with any amount of memory; None without one.
    """

    buckets: int
    all_buckets: int
    kept: int
    forgotten: int
    hindrance: str | None


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Counts buckets that kernels step.

    Attributes:
        hindrances: the reasons why optimizers step the others themselves, each once.
    """

    buckets: int
    all_buckets: int
    hindrances: tuple[str, ...]


# ---- One bucket's master and optimizer state: fetched for a step, stored behind it ----

_HOST = torch.device("cpu")

States = Mapping[Row, dict[str, Any]]
"""The state of some of a bucket's rows by name: `optimizer.state` of them, or a copy."""

Regions = Mapping[str, torch.Tensor]
"""A file's contents by name: flat tensors in a buffer. Empty for a bucket without a file."""


class Placeholders:
    """Stand in `optimizer.state` for state that is elsewhere.

    Tensors of any shape without memory, which read as NaN, or 0 if the dtype has none.
    """

    def __init__(self):
        self._absent: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def of(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
        key = (dtype, device)
        # One scalar for each dtype and device: `has` knows a placeholder by its address. A
        # second scalar would pass for values, and its NaN would be stored as state.
        if key not in self._absent:
            self._absent[key] = torch.full(
                (), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device
            )
        return self._absent[key].expand(shape)

    def has(self, value: Any) -> bool:
        absent = self._absent.get((value.dtype, value.device)) if torch.is_tensor(value) else None
        return absent is not None and value.data_ptr() == absent.data_ptr()


def is_elementwise(value: Any, row: Row) -> TypeGuard[torch.Tensor]:
    """Whether a value is state with one value an element of the row."""
    return torch.is_tensor(value) and value.dim() > 0 and value.shape == row.tensor.shape


class MasterPlace:
    """Holds a bucket's master between steps: here in memory, of the bucket or as the parameters themselves.

    An early step writes to a second master in the same memory, which becomes the master if the step is used.

    Attributes:
        is_away: the master is in memory during a step only.
    """

    is_away = False

    def __init__(self, bucket: Bucket):
        self._bucket = bucket
        self._spare: torch.Tensor | None = None

    def move_in(self) -> None:
        """Stores the master of a bucket that has just been built."""

    def fetch(self, regions: Regions) -> None:
        """Fetches the master, and copies a script's edits into it."""

    def store(self) -> None:
        """Writes the parameters from the master, and stores the master, behind a step.

        Parameters of a master in memory follow behind the whole step. Stepped rows still have their gradients.
        """

    def fetched_master(self) -> AbstractContextManager[None]:
        """Opens a context in which the master may be read and written."""
        return nullcontext()

    @torch.no_grad()
    def put(self, row: Row, values: torch.Tensor) -> None:
        row.tensor.copy_(values.view(row.tensor.shape))

    def view(self, row: Row, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """Returns a row's master, live and without a copy. `tensor`: the row's."""
        return tensor

    @property
    def region(self) -> Region | None:
        """Returns the master's place in a file, if its digits are the parameters' own; None elsewhere."""
        return None

    def begin_aside(self, regions: Regions) -> torch.Tensor:
        """Returns a copy of the master, (shard_numel,), for an early step to write to."""
        if self._spare is None:
            self._spare = self._bucket.tier.empty(self._bucket.layout.shard_numel, self._bucket.precision.master)
        # By `data`, which has a version of its own: rows once made as views of this memory count its edits as their own.
        return self._spare.data.copy_(self._bucket.master)

    def commit_aside(self) -> None:
        """Makes the last copy of `begin_aside` the master."""
        stepped, self._spare = self._spare, self._bucket.master
        if stepped is not None:
            self._bucket.exchange_master(stepped.data)

    @property
    def aside_bytes(self) -> int:
        """Counts bytes of the second master now."""
        return 0 if self._spare is None else self._spare.nbytes

    @property
    def most_aside_bytes(self) -> int:
        """Counts bytes of the second master at most."""
        return self._bucket.layout.shard_numel * self._bucket.precision.master.itemsize


class StatePlace:
    """Holds a bucket's optimizer state between steps: here in `optimizer.state`, as the optimizer made it.

    State elsewhere has placeholders in `optimizer.state`. Other tensors there (just loaded by the script, or made by the
    optimizer) are the state itself, and are stored behind the bucket's next step.

    An early step writes to second tensors in the same memory, which become the state if the step is used.

    Attributes:
        is_away: the state is in memory, or in full digits, during a step only.
        lent_bytes: memory of the lent state, a buffer with a file's contents aside.
    """

    is_away = False
    lent_bytes = 0

    def __init__(self) -> None:
        self._spare: dict[tuple[Row, str], torch.Tensor] = {}

    def lend(self, states: States, regions: Regions) -> None:
        """Puts values into `states` in place of placeholders."""

    def store(self, states: States, regions: Regions) -> None:
        """Stores the values of `states`, and leaves placeholders there."""

    def values(self, row: Row, name: str, value: Any) -> Any:
        """Returns a row's `name` of `optimizer.state` with its values, perhaps as a copy."""
        return value

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """Returns a row's state, live and without a copy. `tensor`: the entry in `optimizer.state`."""
        return tensor

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        """Stores a row's state that was loaded; returns the entry for `optimizer.state`."""
        return state

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Counts bytes of the state. `tensors`: its entries in `optimizer.state`."""
        return sum(tensor.nbytes for tensor in tensors)

    def begin_aside(self, states: States, regions: Regions) -> States:
        """Returns copies of the rows' state for an early step. `states`, the entries, stay as they are."""
        own = {row: dict(state) for row, state in states.items()}
        self.lend(own, regions)
        for row, state in own.items():
            # `lend` has put the step's own tensors into `own`. The rest is still
            # the live state, which an in-place step would overwrite.
            shared = [(name, value) for name, value in state.items() if value is states[row].get(name)]
            state |= {name: self._apart(row, name, value) for name, value in shared}
        return own

    def end_aside(self, states: States, regions: Regions) -> None:
        """Stores the stepped copies in `states`, and leaves the entries for `optimizer.state` there."""
        self.store(states, regions)

    def exchange_aside(self) -> None:
        """Swaps stored state and copy, once, before the rows' entries follow."""

    def commit_aside(self, row: Row, old: dict[str, Any]) -> None:
        """Keeps the old tensors of a row for the next copy. `old`: the row's former entries."""
        # State that is away has its second copy in other blocks or on the file's other side; `_apart` clones the rest.
        if not self.is_away:
            self._spare |= {(row, name): value for name, value in old.items() if is_elementwise(value, row)}

    @property
    def aside_bytes(self) -> int:
        """Counts bytes of the second state now."""
        return sum(tensor.nbytes for tensor in self._spare.values())

    def most_aside_bytes(self, bucket: Bucket, dtypes: Iterable[torch.dtype]) -> int:
        """Counts bytes of the second state at most. `dtypes`: of the state tensors with one value an element."""
        return bucket.layout.shard_numel * sum(dtype.itemsize for dtype in dtypes)

    def close(self) -> None:
        """Frees the memory."""

    def _apart(self, row: Row, name: str, value: Any) -> Any:
        """Copies an entry, for a step to write to."""
        if self.is_away or not is_elementwise(value, row):
            # Scalars too: torch's optimizers raise `step` in place, and a dropped early step would count in the live state.
            return value.clone() if torch.is_tensor(value) else value
        spare = self._spare.get((row, name))
        if spare is None or spare.shape != value.shape or spare.dtype != value.dtype:
            spare = self._spare[row, name] = torch.empty_like(value)
        return spare.copy_(value)


class BucketState:
    """One bucket's master and optimizer state.

    Args:
        optimizer: steps the bucket; None without one.
        shard: the file of either; None if both are in memory.
    """

    def __init__(
        self,
        bucket: Bucket,
        optimizer: torch.optim.Optimizer | None,
        master: MasterPlace,
        state: StatePlace,
        shard: StoredShard | None = None,
    ):
        self.bucket = bucket
        self.optimizer = optimizer
        self.master = master
        self.state = state
        self.shard = shard

    @property
    def is_away(self) -> bool:
        """Whether some values are not in memory between steps."""
        return self.master.is_away or self.state.is_away

    def registered(self) -> States:
        """Returns the entries of the bucket's rows in `optimizer.state`."""
        if self.optimizer is None:
            return {}
        # Not by brackets alone: `optimizer.state` makes an entry when asked, and an empty one would look like a step taken.
        register = self.optimizer.state
        return {row: register[row.tensor] for row in self.bucket.rows if row.tensor in register}

    def lend(self, buffer: torch.Tensor | None) -> None:
        """Fetches everything for a step. `buffer`: with the file's contents."""
        regions = self.regions_in(buffer)
        self.state.lend(self.registered(), regions)
        self.master.fetch(regions)

    def store(self, buffer: torch.Tensor | None) -> None:
        """Stores everything behind a step. `buffer` then has the new contents of the file."""
        self.master.store()
        self.state.store(self.registered(), self.regions_in(buffer))

    def regions_in(self, buffer: torch.Tensor | None) -> Regions:
        """Returns the views of a buffer with the file's contents."""
        return {} if self.shard is None or buffer is None else self.shard.views(buffer)
