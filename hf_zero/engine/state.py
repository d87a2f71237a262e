"""Reads and writes the state of an engine: weights, optimizer state and residuals."""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..buckets.rows import KindsOf, Read, StateRow
from ..comm.transport import DataParallelGroup
from ..layout.boxes import Box
from ..layout.intervals import Interval
from ..optimizer.trial_step import state_itemsizes
from ..step.row_writes import RowWrites
from ..step.sharded_optimizer import ShardedOptimizer
from .models import is_outside
from .parts import Parts
from .split_model import read_part
from .state_rows import fill_rows, state_rows, state_scalars

# ---- This rank's part of the model's weights for sharded checkpoints, with each element on exactly one rank ----


@dataclass(frozen=True, kw_only=True)
class OwnWeights:
    """The elements `interval` of one parameter, row-major, with their values: 1-D, a view of live memory unless cast."""

    parameter: nn.Parameter
    interval: Interval
    values: torch.Tensor


# ---- This rank's part of a checkpoint: masters, optimizer state, weights ----


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """This rank's masters and optimizer state for a checkpoint; empty until filled.

    Attributes:
        rows: masters and elementwise state.
        scalars: maps parameter names to state with one value for the whole parameter (`step`).
        groups: each optimizer, with the names of the trained parameters in each of its groups.
    """

    rows: list[StateRow] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[tuple[torch.optim.Optimizer, list[list[str]]]] = field(default_factory=list)


class EngineState:
    """`ZeroEngine.state`: reads and replaces this rank's state for checkpoints."""

    def __init__(
        self,
        parts: Parts,
        optimizers: Sequence[ShardedOptimizer],
        row_writes: RowWrites,
    ):
        self._parts = parts
        self._optimizers = optimizers
        self._row_writes = row_writes

    @cached_property
    def _first_with(self) -> frozenset[str]:
        """Names of trained parameters for which this rank is the first with its part of the state."""
        return frozenset(slot.name for slot in self._parts.slot_of.values() if slot.bucket.group.is_first)

    def _is_first_with(self, name: str) -> bool:
        """Whether this rank is the first of its copy of the model with its part of a parameter."""
        return self._parts.copies is None or self._parts.copies.is_first_with(name)

    @property
    def _replica(self) -> int:
        """Index of this rank's model, if outer steps average several models."""
        return 0 if self._parts.outer is None else self._parts.outer.replica

    # ---- masters and optimizer state ----

    def rows(self) -> Iterator[StateRow]:
        """Yields this rank's masters and optimizer state, row by row."""
        parts = self._parts
        self._follow_state_edits()
        yield from state_rows(self._optimizers, list(parts.row_of.values()), parts.storage, self._replica)
        if parts.outer is not None:
            yield from parts.outer.rows()

    def _follow_state_edits(self) -> None:
        for sharded in self._optimizers:
            sharded.follow_state_edits()

    def residual_rows(self) -> Iterator[StateRow]:
        """Copies this rank's quantization residuals as rows of whole parameters."""
        return self._parts.wire.reduction.rows()

    def rows_to_save(self) -> Iterator[StateRow]:
        """Yields the rows written only by this rank.

        Ranks of a replicate group have the same rows, written by the first rank, unless outer steps give each rank different
        optimizer state. Residuals depend on the batch, so each rank writes its own, unless ranks compute a batch together.
        """
        each_has_its_own = self._parts.outer is not None
        own: Iterator[StateRow] = iter(())
        if self._first_with or each_has_its_own:
            own = (row for row in self.rows() if each_has_its_own or row.name in self._first_with)
        yield from (row for row in chain(own, self.residual_rows()) if self._is_first_with(row.name))

    def to_save(self) -> SavedState:
        """Returns this rank's part of a checkpoint except the model's weights."""
        scalars = {name: held for name, held in self.scalars().items() if name in self._first_with}
        return SavedState(rows=list(self.rows_to_save()), scalars=scalars, groups=self.groups())

    def scalars(self) -> dict[str, dict[str, Any]]:
        """Returns optimizer state with one value per parameter (`step`) of this rank's rows, by parameter name."""
        self._follow_state_edits()
        return state_scalars(self._optimizers, list(self._parts.row_of.values()))

    def fill(self, read: Read, kinds_of: KindsOf, scalars_of: Callable[[str], dict[str, Any]]) -> None:
        """Replaces masters, optimizer state and residuals, after parameters are loaded; arguments: see `fill_rows`."""
        parts = self._parts
        self.follow_edits()
        # The loaded state replaces edits of the present one.
        self._follow_state_edits()
        parts.wire.reduction.fill(parts.buckets, read, kinds_of)
        rows = list(parts.row_of.values())
        fill_rows(self._optimizers, rows, read, kinds_of, scalars_of, parts.storage, self._replica)
        if parts.outer is not None:
            parts.outer.fill(read, kinds_of)
        # Count the writes to rows as known. Otherwise the next forward would refuse them as unsent writes by the script.
        self._row_writes.follow(parts.buckets)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns name → whole shape of every trained parameter, on any rank."""
        return {slot.name: self.box_of(slot.parameter).shape for slot in self._parts.slot_of.values()}

    def master_dtypes(self) -> dict[str, torch.dtype]:
        """Maps the name of every trained parameter to its master dtype."""
        return {slot.name: slot.bucket.precision.master for slot in self._parts.slot_of.values()}

    def box_of(self, parameter: torch.Tensor) -> Box:
        """Returns this rank's part of a parameter: all, unless tensor or expert parallelism splits it."""
        return self._parts.split.box_of(parameter)

    def as_whole(self, parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        """Gathers a whole parameter, or a tensor of its shape, from a copy's parts. Collective over the copy."""
        split = self._parts.split.parts.get(parameter)
        return part if split is None else split.as_dtensor(part).full_tensor()

    def boxes(self) -> dict[str, Box]:
        """Maps names to this rank's parts of split parameters."""
        split = self._parts.split
        return {} if split.is_empty else {name: box for name, box in split.boxes().items() if not box.is_whole}

    @property
    def is_split(self) -> bool:
        """Whether tensor or expert parallelism has split the model over ranks."""
        return not self._parts.split.is_empty

    @property
    def split_sizes(self) -> tuple[int, int]:
        """Numbers of ranks that compute a batch together, and that together have a copy of the model."""
        split = self._parts.split
        return len(split.ranks), len(split.copy_ranks)

    def group_of(self, tensor: torch.Tensor) -> DataParallelGroup:
        """Returns the ranks with the same part of a parameter; of a buffer, those with all of it."""
        return self._parts.mesh.group_of(tensor)

    def writes(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether this rank writes a parameter stored whole on several ranks."""
        return self.group_of(parameter).all_groups.rank == 0 and self._is_first_with(name)

    def groups(self) -> list[tuple[torch.optim.Optimizer, list[list[str]]]]:
        """Returns each optimizer with the names of the trained parameters in each of its groups, in the user's order."""
        slot_of = self._parts.slot_of
        return [(sharded.optimizer, sharded.group_names(slot_of)) for sharded in self._optimizers]

    def itemsizes(self, optimizer: int, group: int, dtype: torch.dtype) -> tuple[int, ...] | None:
        """Bytes per element of each kind of optimizer state for parameters of `dtype`; None if a trial step cannot determine it.

        Args:
            optimizer: index of the optimizer; -1 for none, which has no state.
            group: index of the group.
            dtype: dtype of the parameters.
        """
        if optimizer < 0:
            return ()
        tried = self._optimizers[optimizer].optimizer
        return state_itemsizes(tried, tried.param_groups[group], dtype)

    # ---- weights ----

    def bucketed_parameters(self) -> list[nn.Parameter]:
        """Returns all parameters of which `own_weights` yields parts on some rank."""
        return [slot.parameter for bucket in self._parts.all_buckets for slot in bucket.slots]

    def own_weights(self) -> Iterator[OwnWeights]:
        """Yields this rank's part of the model's present parameters in buckets. Each element is yielded on one rank."""
        # Ranks of a replicate group have the same part.
        for bucket in (bucket for bucket in self._parts.all_buckets if bucket.group.is_first):
            if bucket.precision.weights is not None:
                # Quantized gathers have rounded the parameters, so use the masters.
                for row in (row for row in bucket.rows if self._is_first_with(row.slot.name)):
                    master = self._parts.storage.master_view(row).detach().reshape(-1)
                    yield OwnWeights(
                        parameter=row.slot.parameter,
                        interval=row.layout.in_parameter,
                        values=master.to(bucket.precision.kept),
                    )
                continue
            for slot, part in bucket.own_parts.items():
                if self._is_first_with(slot.name):
                    values = bucket.memory.own_part(part.in_shard)
                    yield OwnWeights(parameter=slot.parameter, interval=part.in_parameter, values=values)

    def load_weights(
        self, read: Callable[[nn.Parameter, Interval], torch.Tensor], left_out: Container[nn.Parameter] = ()
    ) -> None:
        """Replaces this rank's part of the model, except parameters in `left_out`. Call `share_weights` afterwards.

        Args:
            read: (parameter, interval of the whole parameter) → the values, a 1-D host tensor.
            left_out: parameters that are not replaced.
        """
        self.load_own_weights(
            lambda parameter, interval: read_part(self.box_of(parameter), interval, partial(read, parameter)), left_out
        )

    def load_own_weights(
        self, read: Callable[[nn.Parameter, Interval], torch.Tensor], left_out: Container[nn.Parameter] = ()
    ) -> None:
        """Like `load_weights`, but the intervals of `read` refer to this rank's part of a parameter (`box_of`).

        Args:
            read: (parameter, interval of this rank's part) → the values, a 1-D host tensor.
            left_out: parameters that are not replaced.
        """
        # Running gathers of the last step would overwrite the loaded values.
        self._parts.parameter_gather.finish_all()
        for bucket in self._parts.all_buckets:
            fetched = self._parts.storage.fetched_master(bucket) if bucket.trained else nullcontext()
            with fetched, torch.no_grad():
                for slot, part in bucket.own_parts.items():
                    if slot.parameter not in left_out:
                        values = read(slot.parameter, part.in_parameter)
                        bucket.memory.write_own_part(part.in_shard, values)
                        # Write the master, too. Otherwise the next step would start from the weights before the load.
                        if bucket.precision.has_master:
                            bucket.master[part.in_shard.start : part.in_shard.stop].copy_(values)

    def share_weights(self) -> None:
        """Sends the loaded parts to ranks with whole parameters. Collective."""
        parts = self._parts
        if parts.outer is not None:
            parts.outer.start_from_masters()
        parts.send(parts.buckets)
        self._row_writes.follow(parts.buckets)
        parts.parameter_gather.finish_all()

    def share_outside(self) -> None:
        """Sends parameters outside of all models to all ranks after a `fill`. Collective."""
        loaded = [bucket for bucket in self._parts.buckets if is_outside(bucket.slots[0].name)]
        for bucket in loaded:
            with self._parts.storage.fetched_master(bucket):
                bucket.write_back()
        self._parts.send(loaded)
        self._row_writes.follow(loaded)
        if loaded:
            self._parts.parameter_gather.finish_all()

    def follow_edits(self) -> None:
        """Copies a script's edits of parameters into the masters."""
        # Only edited buckets, because a master in a file would be read and written for nothing.
        for bucket in (bucket for bucket in self._parts.buckets if bucket.edited_rows):
            with self._parts.storage.fetched_master(bucket):
                bucket.follow_edits()
        self._parts.exact.put_back()
