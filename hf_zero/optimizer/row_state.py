"""The state of an optimizer whose groups hold this rank's rows: cut from whole state, made whole again, and in its state dict."""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn

from ..buckets.bucket import Bucket, ParameterSlot, Row
from ..comm.groups import Groups
from ..hooks.weak import WeakHook
from .full_state import cut_to, full_state
from .nested_state import with_each
from .own_step import initial_state
from .state_by_parameter import StateByParameter
from .storage import OptimizerStorage
from .trial_step import with_dimensions

SHARD_MARK = "hf_zero_shard"

RowStates = dict[nn.Parameter, dict[str, Any]]
"""Maps a whole parameter to the state of this rank's row, with its values."""


class _ShardMark(str):
    """Describes the shard in a state dict, and refuses to be pickled. Copies in memory are allowed."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ValueError(
            f"hf_zero: optimizer.state_dict() returns only the state of {self}, which no other run can load. Use "
            "accelerator.save_state or Trainer's checkpoints, or save the result of get_optimizer_state_dict(model, optimizer) "
            "from torch.distributed.checkpoint.state_dict."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ShardMark":
        return self


class RowState:
    """The state of an optimizer's rows, and the state shown to a script. State from before the engine is cut to the rows.

    Args:
        rows: the rows of the optimizer, in order.
        cut_slots: the slots of its parameters of which this rank has a part or nothing.
        whole_groups: the parameters of each group and their names, as given by the script.
        identity: describes this shard ("rank 1 of 2, ...") in `state_dict()`.
        is_whole: whether all rows of the engine are whole parameters.
        storage: stores the rows' state.
        timeout_s: time limit for other ranks in `optimizer.state[parameter]`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rows: Sequence[Row],
        cut_slots: Mapping[nn.Parameter, ParameterSlot],
        whole_groups: Sequence[tuple[list[nn.Parameter], list[str] | None]],
        *,
        identity: str,
        is_whole: bool,
        storage: OptimizerStorage,
        timeout_s: float,
    ):
        self._optimizer = optimizer
        self._rows = rows
        self._cut_slots = cut_slots
        self._whole_groups = whole_groups
        self._identity = identity
        self._is_whole = is_whole
        self._is_whole_now = False
        self._storage = storage
        self._timeout_s = timeout_s
        for row in rows:
            # State from before the engine (of a loaded optimizer) belongs to whole parameters.
            self._cut_state(row)
        self._find_by_parameter()
        self._hooks = [
            optimizer.register_state_dict_post_hook(WeakHook(self, RowState._on_state_dict)),
            optimizer.register_load_state_dict_pre_hook(WeakHook(self, RowState._on_load_state_dict)),
            optimizer.register_load_state_dict_post_hook(WeakHook(self, RowState._on_loaded_state_dict)),
            optimizer.register_state_dict_pre_hook(WeakHook(self, RowState._before_state_dict)),
        ]

    def follow_edits(self) -> None:
        """Cuts a script's edits of whole state, looked up by parameter, to this rank's rows."""
        state = self._optimizer.state
        if isinstance(state, StateByParameter):
            state.follow_edits()

    @contextmanager
    def as_whole(self) -> Iterator[None]:
        """Inside, the optimizer has whole parameters and their whole state, as without an engine; afterwards rows again.

        Collective. State loaded inside is cut to the ranks' rows. Each rank stores the whole state inside the context.
        """
        if self._is_whole_now or not self._cut_slots:
            yield
            return
        self.follow_edits()
        optimizer, rows_state = self._optimizer, self._optimizer.state
        rows_groups = [(group["params"], group.get("param_names")) for group in optimizer.param_groups]
        whole_state = self._gather_state()
        self._is_whole_now = True
        try:
            optimizer.state = defaultdict(dict, whole_state)
            self._name_groups(self._whole_groups)
            yield
        finally:
            loaded, optimizer.state = optimizer.state, rows_state
            self._name_groups(rows_groups)
            self._is_whole_now = False
        # After an error, this is not reached, so the previous state stays.
        rows = [row for row in self._rows if row.slot.parameter in self._cut_slots]
        for row in rows:
            before = whole_state.get(row.slot.parameter)
            if loaded.get(row.slot.parameter) is not before:
                rows_state[row.tensor] = self._storage.put(row, self._cut(loaded[row.slot.parameter], row))

    def _gather_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Returns the whole state of each parameter. Before the first step, this is the state after a step without gradients."""
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for group, (whole, _) in zip(self._optimizer.param_groups, self._whole_groups):
            for parameter in whole:
                slot = self._cut_slots.get(parameter)
                if slot is None:
                    found = self._optimizer.state.get(parameter, {})
                else:
                    mine = {} if slot.row is None else self._optimizer.state.get(slot.row.tensor, {})
                    found = full_state(slot, mine, self._storage, self._timeout_s, "the optimizer's whole state")
                state[parameter] = found
            if not any(state[parameter] for parameter in whole):
                state.update(initial_state(self._optimizer, group, whole))
        return state

    def _name_groups(self, parameters: Sequence[tuple[list[Any], list[str] | None]]) -> None:
        for group, (params, names) in zip(self._optimizer.param_groups, parameters):
            group["params"] = list(params)
            if names is not None:
                group["param_names"] = list(names)

    def _find_by_parameter(self) -> None:
        if self._cut_slots:
            optimizer, slots = self._optimizer, self._cut_slots
            optimizer.state = StateByParameter(optimizer.state, slots, self._storage, self._cut, self._timeout_s)

    def by_parameter(self) -> RowStates:
        """Returns the rows' state with its values, by whole parameter."""
        self.follow_edits()
        register = self._optimizer.state
        return {r.slot.parameter: self._fetched(r, register[r.tensor]) for r in self._rows if r.tensor in register}

    def put(self, states: RowStates) -> None:
        """Replaces the state of the rows in `states`."""
        for row in self._rows:
            if row.slot.parameter in states:
                self._optimizer.state[row.tensor] = self._storage.put(row, states[row.slot.parameter])

    def release(self) -> None:
        """Leaves the optimizer a plain state, without the state of rows, whose shapes do not fit the whole parameters."""
        for hook in self._hooks:
            hook.remove()
        self._optimizer.state = defaultdict(dict, self._optimizer.state)
        if not self._is_whole:
            self._optimizer.state.clear()

    def _cut_state(self, row: Row) -> None:
        parameter = row.slot.parameter
        if row.is_parameter or parameter not in self._optimizer.state:
            return
        self._optimizer.state[row.tensor] = self._cut(self._optimizer.state.pop(parameter), row)

    def _cut(self, whole: dict[str, Any], row: Row) -> dict[str, Any]:
        settings = self._optimizer.param_groups[row.slot.bucket.key.group]
        return with_dimensions(with_each(whole, functools.partial(cut_to, row=row)), row, self._optimizer, settings)

    def _before_state_dict(self, _optimizer) -> None:
        self.follow_edits()

    def _on_loaded_state_dict(self, _optimizer) -> None:
        if not self._is_whole_now:
            self._find_by_parameter()

    def _on_state_dict(self, _optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self._is_whole_now:
            return state_dict
        row_of = {id(row.tensor): row for row in self._rows}
        tensors = [p for group in self._optimizer.param_groups for p in group["params"]]
        # Make new dicts, because torch's state dict contains the dicts of `optimizer.state`, which must keep placeholders.
        state = {
            index: values if id(tensors[index]) not in row_of else self._fetched(row_of[id(tensors[index])], values)
            for index, values in state_dict["state"].items()
        }
        state_dict = {**state_dict, "state": state}
        return state_dict if self._is_whole else {**state_dict, SHARD_MARK: _ShardMark(self._identity)}

    def _fetched(self, row: Row, state: dict[str, Any]) -> dict[str, Any]:
        return {name: self._storage.values(row, name, value) for name, value in state.items()}

    def _on_load_state_dict(self, _optimizer, state_dict: dict[str, Any]) -> None:
        if self._is_whole_now or (self._is_whole and SHARD_MARK not in state_dict):
            return
        if state_dict["state"] and state_dict.get(SHARD_MARK) != self._identity:
            raise ValueError(
                f"hf_zero: this state dict is from {state_dict.get(SHARD_MARK, 'a whole optimizer')}, but this optimizer is "
                f"{self._identity}. optimizer.state_dict() returns one rank's shard, and only that shard can load it; to move "
                "state between runs use accelerator.save_state/load_state or Trainer's checkpoints."
            )


def identity_of(groups: Groups, stage: int, buckets: Sequence[Bucket]) -> str:
    """Names the shard and the layout of an optimizer's state; equal for equal layouts."""
    numel = sum(bucket.layout.numel for bucket in buckets)
    return f"rank {groups.shard_rank} of {groups.shard_size}, stage {stage}, {len(buckets)} buckets of {numel} elements"
