"""A bucket's master and optimizer state: fetched for a step, and stored afterwards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ..buckets.bucket import Bucket, Row
from ..buckets.rows import PackedPart, PackedState
from ..offload.files import StoredShard
from ..offload.shards import Region


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Counts buckets with steps by kernels.

    Attributes:
        hindrances: the reasons why optimizers step the other buckets themselves, each once.
    """

    buckets: int
    all_buckets: int
    hindrances: tuple[str, ...]


_HOST = torch.device("cpu")


States = Mapping[Row, dict[str, Any]]
"""The state of some of a bucket's rows by name: entries of `optimizer.state`, or a copy."""


Regions = Mapping[str, torch.Tensor]
"""A file's contents by name: flat tensors in a buffer. Empty for a bucket without a file."""


class Placeholders:
    """Represent state that is stored elsewhere in `optimizer.state`.

    A placeholder is a tensor of any shape without memory, which reads as NaN, or as 0 if the dtype has no NaN.
    """

    def __init__(self):
        self._absent: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def of(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _HOST) -> torch.Tensor:
        key = (dtype, device)
        # Use one scalar per dtype and device, because `has` recognizes a placeholder by its address. A second scalar would look
        # like values, and its NaN would be stored as state.
        if key not in self._absent:
            self._absent[key] = torch.full(
                (), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device
            )
        return self._absent[key].expand(shape)

    def has(self, value: Any) -> bool:
        absent = self._absent.get((value.dtype, value.device)) if torch.is_tensor(value) else None
        return absent is not None and value.data_ptr() == absent.data_ptr()


def is_elementwise(value: Any, row: Row) -> TypeGuard[torch.Tensor]:
    """Whether a value is state with one value per element of the row."""
    return torch.is_tensor(value) and value.dim() > 0 and value.shape == row.tensor.shape


class MasterStorage:
    """Stores a bucket's master between steps. In this class, it stays in memory: the bucket's, or the parameters' own.

    Attributes:
        is_away: whether the master is only in memory during a step.
    """

    is_away = False

    def __init__(self, bucket: Bucket):
        self._bucket = bucket

    def move_in(self) -> None:
        """Stores the master of a newly built bucket."""

    def start_fetch(self) -> None:
        """Starts to copy a master in host memory to the device."""

    def fetch(self, regions: Regions) -> None:
        """Fetches the master, and copies a script's edits into the master."""

    def store(self) -> None:
        """Writes the parameters from the master after a step, and stores the master.

        If the master stays in memory, the parameters are written after the whole step. Stepped rows still have their gradients.
        """

    @contextmanager
    def fetched_master(self) -> Iterator[None]:
        """Opens a context in which the master may be read and written."""
        # Inside another of these contexts, the master is already in memory. A second fetch would drop its edits.
        with self._in_memory() if self._bucket.is_away else nullcontext():
            yield

    def _in_memory(self) -> AbstractContextManager[None]:
        """Opens a context with an offloaded master in memory, and stores the caller's edits at the end."""
        return nullcontext()

    @torch.no_grad()
    def put(self, row: Row, values: torch.Tensor) -> None:
        row.tensor.copy_(values.view(row.tensor.shape))

    def view(self, row: Row, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """Returns a row's live master without a copy. `tensor`: the row's tensor."""
        return tensor

    @property
    def region(self) -> Region | None:
        """Returns the master's region in a file if its dtype is the parameters' own; None otherwise."""
        return None


class MasterAway(MasterStorage):
    """A master that is in memory only during a step. Between steps, a placeholder represents it.

    Args:
        absent: the placeholder, a scalar.
    """

    is_away = True

    def __init__(self, bucket: Bucket, absent: torch.Tensor):
        super().__init__(bucket)
        self._absent = absent

    def move_in(self) -> None:
        self._leave()

    def fetch(self, regions: Regions) -> None:
        self._bucket.fetch(self._fetched(regions))
        # After the fetch and before the step, because the stepped master must include a script's edits of the parameter.
        self._bucket.follow_edits()

    def store(self) -> None:
        # Write the parameters before the master is stored, from the values in memory.
        self._bucket.write_back()
        self._leave()

    def _fetched(self, regions: Regions) -> torch.Tensor:
        """Returns the values of the master for a step, (shard_numel,), on the device of the step."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Stores the values of the bucket's master, and represents it by the placeholder. Here, there is nothing to store."""
        self._bucket.store(self._absent)


class StateStorage:
    """Stores a bucket's optimizer state between steps. In this class, it stays in `optimizer.state`, as the optimizer made it.

    State stored elsewhere has placeholders in `optimizer.state`. Other tensors there (just loaded by the script, or made by the
    optimizer) are the state itself, and are stored after the bucket's next step.

    Attributes:
        is_away: whether the state is only in memory, or only in full precision, during a step.
        bytes_in_step: memory of the state during a step, without a buffer for a file's contents.
    """

    is_away = False
    bytes_in_step = 0

    def blocks(self) -> Mapping[str, PackedState]:
        """Returns the moments in 8-bit blocks by name, with zeros before the first step; empty without such moments."""
        return {}

    def start_fetch(self) -> None:
        """Starts to copy state in host memory to the device."""

    def lend(self, states: States, regions: Regions) -> None:
        """Replaces placeholders in `states` by values."""

    def store(self, states: States, regions: Regions) -> None:
        """Stores the values of `states`, and replaces them by placeholders."""

    def values(self, row: Row, name: str, value: Any) -> Any:
        """Returns a row's `name` of `optimizer.state` with its values, possibly as a copy."""
        return value

    def view(self, row: Row, kind: str, tensor: torch.Tensor) -> torch.Tensor | PackedPart:
        """Returns a row's live state without a copy. `tensor`: the entry in `optimizer.state`."""
        return tensor

    def put(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        """Stores a row's loaded state; returns the entry for `optimizer.state`."""
        return state

    def nbytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Returns the bytes of the state. `tensors`: its entries in `optimizer.state`."""
        return sum(tensor.nbytes for tensor in tensors)

    def close(self, states: States) -> None:
        """Frees the memory. `states`: the last values, to be left with the optimizer."""


class BucketState:
    """One bucket's master and optimizer state.

    Args:
        optimizer: steps the bucket; None without one.
        shard: the file of master or state; None if both are in memory.
    """

    def __init__(
        self,
        bucket: Bucket,
        optimizer: torch.optim.Optimizer | None,
        master: MasterStorage,
        state: StateStorage,
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
        # Check for existence first: reading `optimizer.state` creates an entry, and an empty entry would look like a step.
        register = self.optimizer.state
        return {row: register[row.tensor] for row in self.bucket.rows if row.tensor in register}

    def start_fetch(self) -> None:
        """Starts to copy state and master in host memory to the device for the next `lend`."""
        self.state.start_fetch()
        self.master.start_fetch()

    def lend(self, buffer: torch.Tensor | None) -> None:
        """Fetches everything for a step. `buffer`: contains the file's contents."""
        regions = self.regions_in(buffer)
        self.state.lend(self.registered(), regions)
        self.master.fetch(regions)

    def store(self, buffer: torch.Tensor | None) -> None:
        """Stores everything after a step. `buffer` then contains the new contents of the file."""
        self.master.store()
        self.state.store(self.registered(), self.regions_in(buffer))

    def regions_in(self, buffer: torch.Tensor | None) -> Regions:
        """Returns views of a buffer with the file's contents."""
        return {} if self.shard is None or buffer is None else self.shard.views(buffer)
