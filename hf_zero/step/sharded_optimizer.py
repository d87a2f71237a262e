"""Gives the user's optimizer this rank's rows, and sends a script's writes to all ranks."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain, compress, repeat
from operator import is_
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from ..buckets.all_buckets import await_gradients
from ..buckets.bucket import BUCKET_OF, ParameterSlot, Row
from ..buckets.gradients import GRADIENT_OF
from ..buckets.sharded_gradient import ShardedGradient
from ..hooks.guards import look_only
from ..hooks.tensors import set_all
from ..hooks.weak import WeakHook, caller_of_hook, engine_attached_to
from ..layout.intervals import Interval
from ..optimizer.own_step import (
    NO_ARGUMENTS,
    group_with,
    is_of_torch,
    note_arguments,
)
from ..optimizer.parameter_lookups import look_up_rows, look_up_whole, stand_in, take_out
from ..optimizer.row_state import RowState
from ..optimizer.scope import is_of_bitsandbytes, kept_by_parameter
from ..optimizer.state_by_parameter import StateByParameter
from ..optimizer.storage import OptimizerStorage
from .row_writes import RowWrites
from .step_context import StepContext

_SCALES_ITSELF = "_step_supports_amp_scaling"
"""torch's attribute of optimizers that unscale gradients and skip steps themselves, such as fused ones."""


def _with_argument(args: tuple, kwargs: dict, old: Any, new: Any) -> tuple[tuple, dict]:
    """Returns the arguments of a call with `new` in place of `old`."""
    return (
        tuple(new if value is old else value for value in args),
        {name: new if value is old else value for name, value in kwargs.items()},
    )


class ShardedOptimizer:
    """Replaces the parameters in an optimizer's groups by rows, and calls the engine around each step.

    The object, its groups and their order do not change, so schedulers, per-group settings and later edits of them keep working.
    A parameter without elements on this rank is removed from its group; a group may be empty.

    Args:
        optimizer: any `torch.optim.Optimizer` whose update scope suits the rows; its state is cut to the rows.
        rows: this rank's row of each parameter with elements on this rank.
        slots: the slots of all parameters in buckets.
        identity: describes this shard ("rank 1 of 2, …") in `state_dict()`.
        step: called before and after each step, and in place of `add_param_group`.
        index: the index of the optimizer in the engine.
        storage: stores the rows' state.
        row_writes: sends rows edited by a script's hooks at the end of the step.
        timeout_s: time limit for other ranks in `optimizer.state[parameter]`.

    Attributes:
        rows: the rows of this optimizer, in order.
        row_state: the rows' state.
        whole_groups: the parameters of each group, as given by the script.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        rows: Mapping[nn.Parameter, Row],
        slots: Mapping[nn.Parameter, ParameterSlot],
        identity: str,
        step: StepContext,
        index: int,
        storage: OptimizerStorage,
        row_writes: "RowWrites",
        timeout_s: float,
    ):
        self.optimizer = optimizer
        self._storage = storage
        self._step = step
        self._index = index
        self._skipped_groups: list[dict[str, Any]] | None = None
        self._has_arguments = False
        self.whole_groups = [list(group["params"]) for group in optimizer.param_groups]
        self._whole_names = [group.get("param_names") for group in optimizer.param_groups]
        self.rows = [rows[p] for group in self.whole_groups for p in group if p in rows]
        # Before the rows replace the parameters in the groups, because these dicts and sets are found through the parameters.
        kept = kept_by_parameter(optimizer)
        for group in optimizer.param_groups:
            group.update(group_with(group, lambda p: p in rows or p not in slots))
            group["params"] = [rows[p].tensor if p in rows else p for p in group["params"]]
        for row in self.rows:
            if not row.is_parameter:
                # Share the dict, so a step that reads attributes of parameters (`lr_scale`) also sees later changes.
                row.tensor.__dict__ = row.slot.parameter.__dict__
        self._stand_ins = [(held, stand_in(held, [row for row in self.rows if not row.is_parameter])) for held in kept]
        if is_of_bitsandbytes(optimizer):
            look_up_whole(optimizer, self.whole_groups, rows)
        self._known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        whole = [p for group in self.whole_groups for p in group if p in slots]
        self.row_state = RowState(
            optimizer,
            self.rows,
            {p: slots[p] for p in whole if p not in rows or not rows[p].is_parameter},
            [*zip(self.whole_groups, self._whole_names)],
            identity=identity,
            is_whole=all(row.is_parameter for row in rows.values()),
            storage=storage,
            timeout_s=timeout_s,
        )
        self._step_frame: FrameType | None = None
        self._inner_steps = 0
        self._row_writes = row_writes
        self._has_earlier_hooks = bool(optimizer._optimizer_step_post_hooks)
        self._hooks = [
            optimizer.register_step_pre_hook(WeakHook(self, ShardedOptimizer._on_step)),
            optimizer.register_step_post_hook(WeakHook(self, ShardedOptimizer._on_stepped)),
            optimizer.register_step_post_hook(WeakHook(self, ShardedOptimizer._on_hooks_ended)),
        ]
        # Run before the script's own post hooks. Their reads (an average, a projection) must see stepped parameters on all ranks,
        # and their edits must not be overwritten.
        cast(OrderedDict, optimizer._optimizer_step_post_hooks).move_to_end(self._hooks[1].id, last=False)
        # Fused optimizers would unscale and skip themselves, based on this rank's overflows, and after a step has begun.
        self._scales_itself = optimizer.__dict__.get(_SCALES_ITSELF)
        optimizer.__dict__[_SCALES_ITSELF] = False
        self._stock_zero_grad = optimizer.zero_grad
        changed: Any = optimizer
        changed.zero_grad = self._make_zero_grad()
        changed.add_param_group = lambda group: step.add_param_group(index, group)
        # The optimizer keeps this object alive. The hooks above, which are copied with the optimizer, do not.
        changed._hf_zero_keeps = self

    def group_names(self, slot_of: Mapping[nn.Parameter, ParameterSlot]) -> list[list[str]]:
        """Returns the names of the trained parameters in each group, in the user's order."""
        return [[slot_of[p].name for p in whole if p in slot_of] for whole in self.whole_groups]

    def refuse_strangers(self) -> None:
        """Raises `ValueError` for parameters added to the optimizer's groups after the engine was built."""
        for group in self.optimizer.param_groups:
            if self._known.issuperset(map(id, group["params"])):
                continue
            strangers = [p for p in group["params"] if id(p) not in self._known]
            raise ValueError(
                f"hf_zero: {len(strangers)} parameters were added to the optimizer after it was prepared (first: shape "
                f"{tuple(strangers[0].shape)}). Add them with optimizer.add_param_group, before accelerator.prepare or between "
                "two steps."
            )

    @property
    def keeps_stepped_rows(self) -> bool:
        """Whether nothing writes to a row between its bucket's step and `after_step`.

        Classes from outside of torch, and hooks before the step, may write to any row. Hooks after the step run later.
        """
        return self._storage.comes_last(self.optimizer) and is_of_torch(self.optimizer)

    @property
    def is_in_files(self) -> bool:
        """Whether the state of rows is in files, which are removed with the engine."""
        return self._storage.is_in_files

    def intervals(self) -> dict[nn.Parameter, Interval]:
        """Returns the elements of each whole parameter in this rank's row."""
        return {row.slot.parameter: row.layout.in_parameter for row in self.rows}

    def follow_state_edits(self) -> None:
        """Cuts a script's edits of whole state, looked up by parameter, to this rank's rows."""
        state = self.optimizer.state
        if isinstance(state, StateByParameter) and state.looked_up:
            state.follow_edits()

    def release(self) -> None:
        """Restores the optimizer's whole parameters. Its state, which only exists in rows, is dropped."""
        for hook in self._hooks:
            hook.remove()
        self.row_state.release()
        # A script may have added groups and parameters (`refuse_strangers`), which stay with the optimizer.
        for group, whole, names in zip(self.optimizer.param_groups, self.whole_groups, self._whole_names):
            group["params"] = whole + [p for p in group["params"] if id(p) not in self._known]
            if names is not None:
                group["param_names"] = names
        for held, added in self._stand_ins:
            take_out(held, added)
        if is_of_bitsandbytes(self.optimizer):
            look_up_rows(self.optimizer)
        del self.optimizer.__dict__[_SCALES_ITSELF]
        if self._scales_itself is not None:
            self.optimizer.__dict__[_SCALES_ITSELF] = self._scales_itself
        changed: Any = self.optimizer
        del changed.zero_grad
        del changed.add_param_group
        del changed._hf_zero_keeps

    def _make_zero_grad(self) -> Callable[..., None]:
        """Makes a zero_grad with the optimizer's own zero_grad for the rows, and the same for the whole parameters.

        Rows have reduced gradients. Later micro-batches have accumulated in `p.grad` of the whole parameters, including
        parameters without a row on this rank. A script that drops a batch drops these gradients as well.
        """

        @functools.wraps(self._stock_zero_grad)
        def zero_grad(*args, **kwargs) -> None:
            set_to_none = kwargs.get("set_to_none", args[0] if args else True)
            if not set_to_none:
                # A running copy would overwrite the zeros with the old gradient.
                await_gradients(set(map(BUCKET_OF, self.rows)))
            self._stock_zero_grad(*args, **kwargs)
            # At stage 3 parameters may be guarded. Without this context, torch would call the guard at each access to `grad`.
            with look_only():
                whole = list(chain.from_iterable(self.whole_groups))
                gradients = list(map(GRADIENT_OF, whole))
                if not set_to_none:
                    for gradient in gradients:
                        if gradient is not None:
                            gradient.zero_()
                    return
                stand_ins = compress(gradients, map(is_, map(type, gradients), repeat(ShardedGradient)))
                # The slot keeps the stand-in, and a pending sum would keep the memory of a whole gradient.
                set_all(stand_ins, "pending", repeat(None))
                set_all(whole, "grad", repeat(None))

        return zero_grad

    def _on_step(self, _optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._is_inside_step():
            self._inner_steps += 1
            return None
        called = None
        # args[0] is the optimizer itself.
        closure = next((v for v in (*args[1:], *kwargs.values()) if callable(v) and not torch.is_tensor(v)), None)
        if closure is not None:
            loss = self._loss_of(closure)
            called = _with_argument(args, kwargs, closure, lambda: loss)
            args, kwargs = _with_argument(args, kwargs, closure, None)
        is_given = any(value is not None for value in (*args[1:], *kwargs.values()))
        if is_given or self._has_arguments:
            note_arguments(self.optimizer, (args[1:], kwargs) if is_given else NO_ARGUMENTS)
            self._has_arguments = is_given
        # A skipped step with an exception has called no post hook, and its empty groups would make this step do nothing.
        self._end_skip()
        # Check before anything changes: parameters added later have no row, and each rank would step them independently.
        self.refuse_strangers()
        self.follow_state_edits()
        if not self._step.before_step(self._index):
            self._begin_skip()
        return called

    def _loss_of(self, closure: Any) -> Any:
        """Runs a closure before the step, as the steps of torch's optimizers do; the step is then handed the result."""
        if not is_of_torch(self.optimizer):
            raise ValueError(
                f"hf_zero: {type(self.optimizer).__name__}.step(closure) is not supported: an optimizer that is not torch's "
                "may run the closure, and its backward, in the middle of the step. Call backward first, then optimizer.step()."
            )
        if not self._storage.hooks_are_last:
            # The closure's forward would change the order of the hooks, which torch is calling now.
            raise ValueError(
                f"hf_zero: {type(self.optimizer).__name__} has a step pre-hook that was registered after accelerator.prepare, "
                "and its first step has a closure. Register the hook before accelerator.prepare, or run a forward first."
            )
        with torch.enable_grad():
            return closure()

    def _is_inside_step(self) -> bool:
        """Whether the step of a class calls its parent's step, around which torch runs the hooks again.

        The engine's step ends with the outer step, because the class may use gradients after its parent's step.
        """
        # Compare with the caller of the hooks. A step with an exception leaves its frame here, but not on the stack.
        caller = caller_of_hook()
        frame: FrameType | None = caller if self._step_frame is not None else None
        while frame is not None:
            if frame is self._step_frame:
                return True
            frame = frame.f_back
        self._step_frame, self._inner_steps = caller, 0
        return False

    def _on_stepped(self, _optimizer, _args: tuple, _kwargs: dict) -> None:
        if self._inner_steps:
            self._inner_steps -= 1
            return
        self._step_frame = None
        if self._has_arguments:
            note_arguments(self.optimizer, NO_ARGUMENTS)
            self._has_arguments = False
        is_taken = self._skipped_groups is None
        self._end_skip()
        self._step.after_step(self._index, is_taken=is_taken)
        if self._has_earlier_hooks:
            self._row_writes.begin_hooks()

    def _on_hooks_ended(self, _optimizer, _args: tuple, _kwargs: dict) -> None:
        self._row_writes.end_hooks()

    def _begin_skip(self) -> None:
        """Lets the running step run over groups without parameters. Its counts in the groups vanish with these copies."""
        self._skipped_groups = self.optimizer.param_groups
        self.optimizer.param_groups = [group_with(group, lambda _: False) for group in self._skipped_groups]

    def _end_skip(self) -> None:
        if self._skipped_groups is not None:
            self.optimizer.param_groups, self._skipped_groups = self._skipped_groups, None


def sharded_of(optimizer: torch.optim.Optimizer) -> ShardedOptimizer | None:
    """Returns the engine's side of an optimizer, or of the inner optimizer of a wrapper; None without an engine."""
    sharded, inner = (vars(optimizer).get(name) for name in ("_hf_zero_keeps", "optimizer"))
    return sharded_of(inner) if sharded is None and isinstance(inner, torch.optim.Optimizer) else sharded


def engine_stepped_by(optimizer: torch.optim.Optimizer) -> Any:
    """Returns the live ZeroEngine of an optimizer's parameters; None without one."""
    sharded = sharded_of(optimizer)
    parameters = () if sharded is None else (p for group in sharded.whole_groups for p in group)
    return next((engine for engine in map(engine_attached_to, parameters) if engine is not None), None)


def whole_parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Returns a script's parameters of an optimizer, even if an engine has replaced them by rows."""
    sharded = sharded_of(optimizer)
    groups = [group["params"] for group in optimizer.param_groups] if sharded is None else sharded.whole_groups
    return [parameter for group in groups for parameter in group]
