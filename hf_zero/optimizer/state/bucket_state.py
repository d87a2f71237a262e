"""Where one bucket's master and optimizer state are between steps, and how they come to memory for one."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ...buckets.bucket import Bucket, Row
from ...buckets.packed_state import PackedPart, PackedState
from ...offload.parameter_shards import Region
from ...offload.stored import StoredShard
from .placeholders import States

Regions = Mapping[str, torch.Tensor]
"""What a file has, by name: flat tensors in a buffer with its contents. Empty for a bucket without a file."""


class MasterCopy(Protocol):
    """A second master, on which a step is taken aside."""

    def begin(self, regions: Regions) -> torch.Tensor:
        """The master's values, (shard_numel,), where a step may write without changing the master."""
        ...

    def take_over(self) -> None:
        """Makes what `begin` has last returned the master."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that it takes now."""
        ...


class StateCopy(Protocol):
    """A second optimizer state, on which a step is taken aside."""

    def begin(self, states: States, regions: Regions) -> dict[Row, dict[str, Any]]:
        """The rows' state with its values, where a step may write without changing `states`, what the register has."""
        ...

    def end(self, states: dict[Row, dict[str, Any]], regions: Regions) -> None:
        """Leaves in `states`, as the step has left them, what the register is to have once they are taken over."""
        ...

    def take_over(self, row: Row, old: dict[str, Any]) -> None:
        """Called for each row whose state is taken over. `old`: what the register had."""
        ...

    def exchange(self) -> None:
        """Called once, before the rows' state is taken over."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that it takes now."""
        ...


class Blocks(Protocol):
    """Moments in 8-bit blocks that a kernel may step as they lie."""

    def blocks(self) -> dict[str, PackedState]:
        """The moments by name; zeros at first."""
        ...

    def make_ready(self, row: Row, name: str, state: dict[str, Any]) -> bool:
        """Has the row's moment in blocks, as `RowStates.make_ready` has it."""
        ...


class MasterPlace(ABC):
    """Where a bucket's master is between steps.

    Attributes:
        is_away: it comes to memory for a step alone.
    """

    is_away: bool

    @abstractmethod
    def move_in(self) -> None:
        """Called when the bucket has been built: the master goes where it lives."""

    @abstractmethod
    def bring(self, regions: Regions) -> None:
        """Has the master in memory, and whatever a script has edited in it."""

    @abstractmethod
    def put_away(self) -> None:
        """Called behind a step: the parameters become what the master is, which goes where it lives.

        Rows that have been stepped still have their gradients.
        """

    @abstractmethod
    def at_hand(self) -> AbstractContextManager[None]:
        """A context in which the master may be read and written."""

    @abstractmethod
    def put(self, row: Row, values: torch.Tensor) -> None:
        """Replaces a row's master."""

    @abstractmethod
    def view(self, row: Row, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """A row's master, live, without taking memory for it. `tensor`: what the row has."""

    @property
    @abstractmethod
    def region(self) -> Region | None:
        """Where in a file the master lies, if its digits are the parameters' own; None elsewhere."""

    @abstractmethod
    def copy(self) -> MasterCopy:
        """A second one, for steps that are taken aside."""

    @property
    @abstractmethod
    def copy_bytes(self) -> int:
        """Memory that `copy` comes to take."""


class StatePlace(ABC):
    """Where a bucket's optimizer state is between steps. What is not in the optimizer's register has a placeholder there.

    What is no placeholder in the register (freshly loaded by the script, or made by the optimizer) is the state itself, and goes
    to its place with the next step of its bucket.

    Attributes:
        is_away: it comes to memory for a step alone, or to full digits.
        lent_bytes: memory that it takes then, beside a buffer with a file's contents.
    """

    is_away: bool
    lent_bytes: int

    @property
    def in_blocks(self) -> Blocks | None:
        """The moments, where a kernel can step them as they lie; else None."""
        return None

    @abstractmethod
    def lend(self, states: States, regions: Regions) -> None:
        """Puts values into `states` in place of placeholders."""

    @abstractmethod
    def take_back(self, states: States, regions: Regions) -> None:
        """Leaves placeholders in `states`, and the values where they live."""

    @abstractmethod
    def values(self, row: Row, name: str, value: Any) -> Any:
        """What the register has under `name` for a row, with its values, which may be a copy."""

    @abstractmethod
    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """A row's state, live, without taking memory for it. `tensor`: what the register has."""

    @abstractmethod
    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        """Takes a row's state that came from elsewhere; returns what belongs in the register."""

    @abstractmethod
    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes that the state takes where it lives. `tensors`: what the register has of it."""

    @abstractmethod
    def copy(self) -> StateCopy:
        """A second one, for steps that are taken aside."""

    @abstractmethod
    def copy_bytes(self, bucket: Bucket, dtypes: Iterable[torch.dtype]) -> int:
        """Memory that `copy` comes to take. `dtypes`: of the state tensors with one value an element."""

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back."""


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
