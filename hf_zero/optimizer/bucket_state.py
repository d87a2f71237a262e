"""Where a bucket's master and optimizer state lie between steps, and when they are stepped."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ..buckets.bucket import Bucket, Row
from ..buckets.rows import PackedPart
from ..offload.files import StoredShard
from ..offload.shards import Region

# ---- How many buckets are stepped early, and how many by kernels ----


@dataclass(frozen=True, kw_only=True)
class EarlyReport:
    """Buckets that are stepped while backward goes on, of all of them.

    Attributes:
        kept, forgotten: early steps of a bucket so far that `optimizer.step()` took over, and that it took again.
        hindrance: why some buckets are not stepped early whatever memory there is; None where nothing stands in the way.
    """

    buckets: int
    all_buckets: int
    kept: int
    forgotten: int
    hindrance: str | None


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Buckets that kernels step, of all of them.

    Attributes:
        hindrances: why others are left to their optimizers' own steps, each reason once.
    """

    buckets: int
    all_buckets: int
    hindrances: tuple[str, ...]


# ---- Where one bucket's master and optimizer state are between steps, and how they come to memory for one ----

_HOST = torch.device("cpu")

States = Mapping[Row, dict[str, Any]]
"""The state of some of a bucket's rows by name: the optimizer's register of them, or a copy of it."""

Regions = Mapping[str, torch.Tensor]
"""What a file has, by name: flat tensors in a buffer with its contents. Empty for a bucket without a file."""


class Placeholders:
    """What an optimizer's register has of state that is elsewhere.

    Tensors of any shape without memory: they read as NaN, or 0 where the dtype has none, until the state is back.
    """

    def __init__(self):
        self._absent: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def of(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
        """One for a tensor like that."""
        key = (dtype, device)
        if key not in self._absent:
            self._absent[key] = torch.full(
                (), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device
            )
        return self._absent[key].expand(shape)

    def has(self, value: Any) -> bool:
        """Whether this is one of them."""
        absent = self._absent.get((value.dtype, value.device)) if torch.is_tensor(value) else None
        return absent is not None and value.data_ptr() == absent.data_ptr()


def is_elementwise(value: Any, row: Row) -> TypeGuard[torch.Tensor]:
    """Whether this is state with one value an element of the row."""
    return torch.is_tensor(value) and value.dim() > 0 and value.shape == row.tensor.shape


class MasterPlace:
    """Where a bucket's master is between steps: here in memory. The bucket has it, or the parameters themselves are it.

    A step may be taken aside, on a second master in the same place. It becomes the master if the step is taken over.

    Attributes:
        is_away: it comes to memory for a step alone.
    """

    is_away = False

    def __init__(self, bucket: Bucket):
        self._bucket = bucket
        self._spare: torch.Tensor | None = None

    def move_in(self) -> None:
        """Called when the bucket has been built: the master goes where it lives."""

    def bring(self, regions: Regions) -> None:
        """Has the master in memory, and whatever a script has edited in it."""

    def put_away(self) -> None:
        """Called behind a step: the parameters become what the master is, which goes where it lives.

        Those of a master in memory follow behind the whole step. Rows that have been stepped still have their gradients.
        """

    def at_hand(self) -> AbstractContextManager[None]:
        """A context in which the master may be read and written."""
        return nullcontext()

    @torch.no_grad()
    def put(self, row: Row, values: torch.Tensor) -> None:
        """Replaces a row's master."""
        row.tensor.copy_(values.view(row.tensor.shape))

    def view(self, row: Row, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """A row's master, live, without taking memory for it. `tensor`: what the row has."""
        return tensor

    @property
    def region(self) -> Region | None:
        """Where in a file the master lies, if its digits are the parameters' own; None elsewhere."""
        return None

    def begin_aside(self, regions: Regions) -> torch.Tensor:
        """The master's values, (shard_numel,), where a step may write without changing the master."""
        if self._spare is None:
            self._spare = self._bucket.tier.empty(self._bucket.layout.shard_numel, self._bucket.precision.master)
        # By `data`, which has a version of its own: rows once made as views of this memory count its edits as their own.
        return self._spare.data.copy_(self._bucket.master)

    def take_over_aside(self) -> None:
        """Makes what `begin_aside` has last returned the master."""
        stepped, self._spare = self._spare, self._bucket.master
        if stepped is not None:
            self._bucket.exchange_master(stepped.data)

    @property
    def aside_bytes(self) -> int:
        """Memory that the second master takes now."""
        return 0 if self._spare is None else self._spare.nbytes

    @property
    def most_aside_bytes(self) -> int:
        """Memory that it comes to take."""
        return self._bucket.layout.shard_numel * self._bucket.precision.master.itemsize


class StatePlace:
    """Where a bucket's optimizer state is between steps: here in the optimizer's register, where the optimizer made it.

    State elsewhere has placeholders in the register. What is no placeholder there (freshly loaded by the script, or made by the
    optimizer) is the state itself, and goes to its place with the next step of its bucket.

    A step may be taken aside, on second tensors in the same place. They become the state if the step is taken over.

    Attributes:
        is_away: it comes to memory for a step alone, or to full digits.
        lent_bytes: memory that it takes then, beside a buffer with a file's contents.
    """

    is_away = False
    lent_bytes = 0

    def __init__(self) -> None:
        self._spare: dict[tuple[Row, str], torch.Tensor] = {}

    def lend(self, states: States, regions: Regions) -> None:
        """Puts values into `states` in place of placeholders."""

    def take_back(self, states: States, regions: Regions) -> None:
        """Leaves placeholders in `states`, and the values where they live."""

    def values(self, row: Row, name: str, value: Any) -> Any:
        """What the register has under `name` for a row, with its values, which may be a copy."""
        return value

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """A row's state, live, without taking memory for it. `tensor`: what the register has."""
        return tensor

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        """Takes a row's state that came from elsewhere; returns what belongs in the register."""
        return state

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes that the state takes where it lives. `tensors`: what the register has of it."""
        return sum(tensor.nbytes for tensor in tensors)

    def begin_aside(self, states: States, regions: Regions) -> States:
        """The rows' state with its values, where a step may write without changing `states`, what the register has."""
        own = {row: dict(state) for row, state in states.items()}
        self.lend(own, regions)
        for row, state in own.items():
            shared = [(name, value) for name, value in state.items() if value is states[row].get(name)]
            state |= {name: self._apart(row, name, value) for name, value in shared}
        return own

    def end_aside(self, states: States, regions: Regions) -> None:
        """Leaves in `states`, as the step has left them, what the register is to have once they are taken over."""
        self.take_back(states, regions)

    def exchange_aside(self) -> None:
        """Called once, before the rows' state is taken over."""

    def take_over_aside(self, row: Row, old: dict[str, Any]) -> None:
        """Called for each row whose state is taken over. `old`: what the register had."""
        if not self.is_away:
            self._spare |= {(row, name): value for name, value in old.items() if is_elementwise(value, row)}

    @property
    def aside_bytes(self) -> int:
        """Memory that the second state takes now."""
        return sum(tensor.nbytes for tensor in self._spare.values())

    def most_aside_bytes(self, bucket: Bucket, dtypes: Iterable[torch.dtype]) -> int:
        """Memory that it comes to take. `dtypes`: of the state tensors with one value an element."""
        return bucket.layout.shard_numel * sum(dtype.itemsize for dtype in dtypes)

    def close(self) -> None:
        """Gives the memory back."""

    def _apart(self, row: Row, name: str, value: Any) -> Any:
        """A copy of what the register has, for a step to write to."""
        if self.is_away or not is_elementwise(value, row):
            return value.clone() if torch.is_tensor(value) else value
        spare = self._spare.get((row, name))
        if spare is None or spare.shape != value.shape or spare.dtype != value.dtype:
            spare = self._spare[row, name] = torch.empty_like(value)
        return spare.copy_(value)


class BucketState:
    """One bucket's master and optimizer state, each where it is.

    Args:
        optimizer: that steps the bucket; None where none does.
        shard: the file that has either; None where both are in memory.
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
        """Whether a step finds less than the values in memory."""
        return self.master.is_away or self.state.is_away

    def registered(self) -> States:
        """What the optimizer's register has of the bucket's rows."""
        if self.optimizer is None:
            return {}
        # Not by the register's own brackets: it makes an entry for whoever asks, and an empty one would look like a step taken.
        register = self.optimizer.state
        return {row: register[row.tensor] for row in self.bucket.rows if row.tensor in register}

    def lend(self, buffer: torch.Tensor | None) -> None:
        """Has everything in memory for a step. `buffer`: with the file's contents."""
        regions = self.regions_in(buffer)
        self.state.lend(self.registered(), regions)
        self.master.bring(regions)

    def take_back(self, buffer: torch.Tensor | None) -> None:
        """Puts everything where it lives, behind a step. `buffer` then has what is to be written."""
        self.master.put_away()
        self.state.take_back(self.registered(), self.regions_in(buffer))

    def regions_in(self, buffer: torch.Tensor | None) -> Regions:
        """What a buffer with the file's contents has."""
        return {} if self.shard is None or buffer is None else self.shard.views(buffer)
