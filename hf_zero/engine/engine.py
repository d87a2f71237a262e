"""`ZeroEngine`: shards a model and its optimizers, and trains them as DDP would."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from ..buckets.all_buckets import rows_with_gradient
from ..buckets.clipped_gradient import widen
from ..comm.waits import Label
from ..config import ConfigError, ConfigLike, ZeroConfig
from ..hooks.guards import look_only
from ..hooks.weak import attach, detach
from ..optimizer.full_state import full_gradient, full_master, full_state, slot_of
from ..presence.error_hook import ErrorHook
from ..stage3.gathered import IN_GATHERED, parameters_in, put_back
from ..step.backward import no_signal
from ..step.sharded_optimizer import whole_parameters
from ..step.training_step import TrainingStep
from .assemble import assemble
from .buffers import broadcast_buffers, ignored_parameters
from .dcp_helpers import support_dcp_helpers
from .freezing import FreezesInForward, frozen
from .loss_scale import agree_on_overflows
from .models import is_outside, joined
from .parts import Parts
from .rank_allocation import rank_allocations
from .report_tables import CommReport, MemoryReport
from .reports import DtypeReport, report_dtypes, report_memory
from .split_model import whole_tensors
from .state import EngineState
from .state_rows import on_host, resizing, state_of


class ZeroEngine:
    """Trains `model` in place, with its state sharded over the ranks of torch.distributed (or on one rank without it).

    After construction, train in an ordinary loop: forward, `loss.backward()`, `clip_grad_norm_`, `optimizer.step()`,
    `optimizer.zero_grad()`. Building an engine is collective: every rank gets rank 0's parameters and buffers.

    Args:
        model: any module with trainable floating-point parameters; at stage 3 all may be frozen. Several modules in a list
            are trained together.
        optimizers: one or several torch optimizers over the models' parameters. They stay the same objects. Parameters of no
            model (a loss's head) are trained with averaged gradients, too, and stay whole on each rank.
        config: any argument of `ZeroConfig.of`.
        entry: the module that the script calls, if it is not `model` itself (a compiled one). A list for several models.
        device: the training device; by default the device of the parameters. At stage 3 the parameters may be on a different
            device. Then each rank moves only its shard.
        on_progress: called with the bytes of parameters in buckets so far, and the bytes of all parameters.
        find_unused_parameters: as in DDP. It decides one case: autograd runs a parameter's hook, but the gradient is undefined on
            all ranks. False gives the parameter a gradient of zeros. True leaves the gradient None, so the parameter is not
            stepped.
        evaluates: the model is only evaluated, as if all parameters were frozen. `requires_grad` does not change, and no
            parameter gets a gradient.

    Raises:
        ValueError: the model or an optimizer cannot be trained this way, or the ranks differ. ConfigError for settings.

    Attributes:
        model: the first model.
        models: all models.
        module: a module with all parameters of the engine: the model itself or, for several models, one that is never called.
        entry: the module that the script calls for `model`.
        entries: maps each module that the script calls to its model.
        evaluates: the argument `evaluates`.
        compiled_layers: number of layers compiled instead of the whole model.
        bad_steps: number of steps skipped because of NaN or infinite gradients, and whether the last step was skipped.
        scopes: for each optimizer, the values on which the update of an element depends, and how this was found.

    ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        config: ConfigLike = None,
        *,
        entry: nn.Module | Sequence[nn.Module] | None = None,
        device: torch.device | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        find_unused_parameters: bool = False,
        evaluates: bool = False,
    ):
        ErrorHook.installed()
        optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
        # Check the class, not the truth value: the truth value of a compiled module calls its model's `__len__`.
        models = list(model) if isinstance(model, list | tuple) else [model]
        _refuse_classes(models, optimizers)
        agree_on_overflows()
        support_dcp_helpers()
        self.models = cast(tuple[nn.Module, ...], tuple(models))
        self.model = self.models[0]
        self.module = joined(self.models, optimizers)
        self._find_unused_parameters = find_unused_parameters
        self._stop_asked = no_signal
        entries = self.models if entry is None else entry if isinstance(entry, list | tuple) else [entry]
        self.entries = dict(zip(cast(Sequence[nn.Module], entries), self.models, strict=True))
        self.entry = next(iter(self.entries))
        self.evaluates = evaluates
        self._freezes = FreezesInForward()
        with self._as_it_is_used():
            self._start(assemble(self.module, optimizers, ZeroConfig.of(config), device, on_progress), optimizers)

    def _as_it_is_used(self) -> AbstractContextManager[None]:
        return frozen(self.module) if self.evaluates else nullcontext()

    def _start(self, parts: Parts, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        mesh = parts.mesh
        self._parts = parts
        self.config, self.device = parts.config, parts.device
        self.groups, self.transport = mesh.dp.all_groups, mesh.dp.all_transport
        self.world_groups, self.world = mesh.world_groups, mesh.world
        self.buckets, self.sharded, self.bad_steps = parts.buckets, parts.sharded, parts.nonfinite
        self.scopes = parts.scopes
        self.tier, self.parameter_tier, self.activations = parts.tier, parts.parameter_tier, parts.activations
        self._step = TrainingStep(
            self, self.module, parts, optimizers, find_unused_parameters=self._find_unused_parameters
        )
        # `resize_embeddings` calls this method again, and the new step must continue to ask for signals.
        self.stop_when(self._stop_asked)
        self.optimizers = self._step.optimizers
        self.state = EngineState(parts, self.optimizers, self._step.row_writes)
        self._handles = self._step.install(self.entries)
        if self.evaluates:
            self._handles += self._freezes.watch(self.entry)
        self.compiled_layers = 0
        for entry in self.entries:
            self.compile_layers(entry)
        if self.config.stage > 0 and self.groups.world_size > 1:
            self._step.allocations = rank_allocations(self.module, list(parts.slot_of))
            self._handles += self._step.allocations
        # A sharded model keeps its engine alive, because only the engine can gather its parameters. Parameters have weak
        # references: rows share their attributes, and Python's garbage collector does not see through tensors in autograd.
        attach(self, (*self.models, *self.entries), keeps=not self.sharded.is_empty)
        attach(self, self.module.parameters(), keeps=False)

    def compile_layers(self, called: nn.Module) -> None:
        """At stage 3, compiles each layer instead if the script has compiled `called` as a whole."""
        self.compiled_layers += self.sharded.compile_layers(called)

    # ---- a training step ----

    def no_sync(self) -> AbstractContextManager[None]:
        """Micro-batches inside only accumulate. With `grad_accumulation: sharded` they are reduced nevertheless."""
        return self._step.no_sync()

    def sync(self) -> AbstractContextManager[None]:
        """Reduces inside `no_sync`: a backward inside adds its gradients to the accumulated ones, and reduces the sum."""
        return self._step.sync()

    def inner_backwards(self) -> AbstractContextManager[None]:
        """Runs a backward whose hooks run mini-batches' backwards. These accumulate, and the sum is reduced at the end.

        With `grad_accumulation: sharded`, each mini-batch is reduced. Collective.
        """
        return self._step.inner_backwards()

    @property
    def is_accumulating(self) -> bool:
        """Whether the script is inside `no_sync`."""
        return self._step.is_accumulating

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None
    ) -> torch.Tensor:
        """Clips the gradients by their total norm over all ranks; returns the norm, a float32 scalar on the device. Collective.

        Args:
            max_norm: inf only measures.
            norm_type: p of the p-norm; inf for the largest magnitude.
            parameters: some of the model's parameters; None for all.
        """
        return self._step.clip_grad_norm_(max_norm, norm_type, parameters)

    @property
    def last_grad_norm(self) -> torch.Tensor | None:
        """Returns the norm of the last measurement, as `clip_grad_norm_` does; None before the first."""
        return self._step.last_norm

    @property
    def ended_backwards(self) -> int:
        """Number of finished backwards on this rank."""
        return self._step.gradients.ended

    def drop_failed(self, ended_before: int, *, failed: bool) -> bool:
        """Ends a micro-batch that may have failed on some rank; returns whether it has failed on any rank.

        In this case, drops the gradients of all micro-batches since the last step on all ranks. Collective.

        Args:
            ended_before: `ended_backwards` before the micro-batch.
            failed: whether the micro-batch raised an error on this rank.
        """
        return self._step.drop_failed(ended_before, failed=failed)

    # A type checker would accept any name of an attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in ("backward", "step"):
                text += (
                    ". Unlike DeepSpeed's engine, hf_zero's is not called: train with loss.backward(), optimizer.step() and "
                    "optimizer.zero_grad()."
                )
            raise AttributeError(text, name=name, obj=self)

    def stop_when(self, asked: Callable[[], int]) -> None:
        """Sends the other ranks, at the end of each backward, the signal that asks this rank to stop.

        Args:
            asked: returns the signal's number, 0 for none. Call this on all ranks or on none.
        """
        self._stop_asked = self._step.gradients.stop_asked = asked

    @property
    def stop_due(self) -> int:
        """The number of a signal for which all ranks are to save and stop after the last step; 0 for none."""
        return self._step.stop_due

    def drop_stop(self) -> None:
        """Resets `stop_due`, after the ranks have handled the signal and continue."""
        self._step.stop_due = 0

    @property
    def steps_taken(self) -> int:
        """Number of optimizer steps since the engine was built."""
        return self._step.log.step

    def clip_grad_value_(self, clip_value: float, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Clamps the gradients' elements to [-clip_value, clip_value]."""
        self._step.gradients.recover()
        row_of = self._parts.row_of
        wanted = row_of if parameters is None else parameters
        rows = rows_with_gradient([row_of[parameter] for parameter in wanted if parameter in row_of])
        widen(*[row.tensor for row in rows])
        trained = [row.tensor for row in rows if row.tensor.grad is not None]
        if trained:
            nn.utils.clip_grad_value_(trained, clip_value)

    def trains(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is in this engine's buckets of trained parameters."""
        return parameter in self._parts.slot_of

    def has_outside(self, model: nn.Module) -> bool:
        """Whether parameters of this model are trained as parameters outside of all models."""
        return any(p in self._parts.slot_of and is_outside(self._parts.slot_of[p].name) for p in model.parameters())

    def finish_parameters(self, parameter: nn.Parameter | None = None) -> None:
        """Waits for the all-gathers of parameters after the last step. Reads of parameters wait without this call.

        Args:
            parameter: wait only for the bucket of this parameter.
        """
        if parameter is None:
            self._parts.parameter_gather.finish_all()
        else:
            self._parts.parameter_gather.finish_of(parameter)

    def synchronize(self, purpose: str = "ZeroEngine.synchronize") -> None:
        """Makes the model equal on all ranks, as saves do. Collective.

        Sends writes to this rank's rows in `optimizer.param_groups` made outside of a step, and runs the outer step of
        `comm.sync_every` if local steps wait for it.

        Args:
            purpose: name of the call, for errors about missing ranks.
        """
        self.finish_parameters()
        self._step.row_writes.send(purpose)
        # Running gathers read the rows, which the outer step changes.
        self.finish_parameters()
        if self._parts.outer is None:
            return
        # Gathered layers have the values before the outer step.
        self.sharded.schedule.reshard_all()
        self._step.row_writes.renew_copies(self._parts.outer.finish())
        self.finish_parameters()
        # Until here, each group has had its own buffers, such as batch norm statistics.
        broadcast_buffers(self.module, self.transport, self.device)

    # ---- reads and edits ----

    @contextmanager
    def gathered(
        self,
        target: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None = None,
        *,
        writeback: bool = False,
        purpose: str = "hf_zero.gathered",
    ) -> Iterator[None]:
        """Makes parameters whole inside, to read or, with `writeback`, to edit them. Collective.

        Args:
            target: a module of the model, a parameter or several; None for all models.
            writeback: keep edits. Afterwards all ranks have rank 0's values. Each rank keeps its own edits of parameters that
                the script has excluded from DDP.
            purpose: name of the call, for errors about missing ranks.

        Raises:
            CommunicationError: some rank did not make the call within `comm.late_s`.
            MemoryError: the whole parameters do not fit.
            RuntimeError: a parameter was edited without `writeback`.
        """
        parts = self._parts
        self.sharded.gathered.meet(purpose)
        self.finish_parameters()
        # Send writes before the edit. Otherwise rank 0's values would overwrite unsent writes to this rank's rows.
        if writeback:
            self.synchronize(purpose)
        parameters = parameters_in(self.module if target is None else target)
        with (
            self.sharded.gathered.gathered(parameters, writeback=writeback),
            parts.exact.fetched_master(purpose),
        ):
            yield
            if writeback:
                ignored = ignored_parameters(self.module)
                slots = [parts.slot_of[p] for p in parameters if p in parts.slot_of and p not in self.sharded.unit_of]
                of_units = [slot for unit in self.sharded.gathered.units_of(parameters) for slot in unit.slots]
                put_back([*slots, *of_units], parts.mesh.world)
                # Parameters stored whole on each rank. Sharded ones are sent at the end of `sharded.gathered`.
                for parameter in (p for p in parameters if p not in self.sharded.unit_of and p not in ignored):
                    transport = parts.mesh.group_of(parameter).all_transport
                    transport.broadcast(parameter.data, Label(kind="broadcast of edits", subject="the model"))
                for bucket in {parts.slot_of[p].bucket for p in parameters if p in parts.slot_of}:
                    # Compare values, not versions: the broadcast leaves version counters alone on ranks that wrote nothing.
                    with parts.storage.fetched_master(bucket):
                        bucket.follow_values()
        # The masters of sharded parameters follow the edit when the context ends, so this must come afterwards.
        if writeback and parts.outer is not None:
            parts.outer.start_from_masters()

    def full_grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns a parameter's whole reduced gradient, in its shape and the master dtype; None without one. Collective."""
        self._step.gradients.recover()
        return full_gradient(slot_of(parameter, self._parts.slot_of), self.config.comm.meeting_timeout_s)

    def full_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor | object]:
        """Gathers the optimizer's state of a parameter: elementwise tensors in its shape, other values unchanged.

        Collective. Empty before the first step.
        """
        slot, timeout_s = slot_of(parameter, self._parts.slot_of), self.config.comm.meeting_timeout_s
        for sharded in self.optimizers:
            sharded.follow_state_edits()
        mine = {} if slot.row is None else state_of(self.optimizers, slot.row)
        return full_state(slot, mine, self._parts.storage, timeout_s)

    @contextmanager
    def whole_copies(
        self, purpose: str, *, wanted: bool, model: nn.Module | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """For savers: if `wanted`, makes parameters whole and exact, at stage 3 in host memory. Collective.

        See `ShardedModel.whole_copies`.

        Args:
            purpose: name of the call, for errors about missing ranks.
            wanted: False only joins the collectives.
            model: one of several models; None for the first.
        """
        self.synchronize(purpose)
        with (
            self.transport.watch.saving(),
            self._parts.exact.fetched_master(purpose, IN_GATHERED),
            self.sharded.whole_copies(self.model if model is None else model, purpose, wanted=wanted) as state,
        ):
            yield state

    def whole_state_dict(self, *, wanted: bool, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """Returns the model's state dict in host memory if `wanted`, otherwise {}. Collective; gathers one unit at a time.

        Args:
            wanted: False only joins the collectives.
            model: one of several models; None for the first.
        """
        split = self._parts.split
        if split.is_empty:
            with self.whole_copies("whole_state_dict", wanted=wanted, model=model) as state:
                return state
        copy = self._parts.mesh.model_parallel
        with self.whole_copies("whole_state_dict", wanted=any(copy.exchange(wanted))) as state:
            return whole_tensors(state, split.boxes(), copy, wanted=wanted)

    @property
    def saves_together(self) -> bool:
        """Whether a save must use `whole_state_dict`, and not the model's own tensors."""
        return not (
            self.sharded.is_empty
            and self._parts.exact.is_empty
            and self.groups.outer is None
            and self._parts.split.is_empty
        )

    @property
    def holds_whole_model(self) -> bool:
        """Whether each rank has all tensors of the model, up to the rounding of quantized gathers."""
        return self.sharded.is_empty and self._parts.split.is_empty

    def memory_report(self) -> MemoryReport:
        """Counts bytes of state on this rank by kind, next to DDP's bytes of the same kind."""
        held = self._step.store.held_bytes() | self._parts.wire.held_bytes()
        return report_memory(self.module, self._parts, self.optimizers, held)

    def dtype_report(self) -> DtypeReport:
        """Lists the dtypes of parameters, gradients, masters and moments."""
        return report_dtypes(self.buckets, self.config, [sharded.optimizer for sharded in self.optimizers])

    def comm_report(self) -> CommReport:
        """Returns calls, bytes sent within and between nodes, and waits, by kind of collective, since the engine was built.

        On an accelerator, waits are measured from the first call of this method on.
        """
        ledger = self.transport.ledger
        ledger.start_timing()
        return CommReport(
            rows=ledger.rows(),
            timed_from=ledger.timed_from,
            gradient_error=self._parts.wire.reduction.error,
            not_counted=self._parts.mesh.not_counted,
        )

    # ---- changes of the model and the optimizers, and the end of the engine ----

    def readopt(self) -> None:
        """Copies parameters that left their slots (`.to(dtype)`, `load_state_dict(assign=True)`) back into the slots.

        Raises:
            ValueError: a parameter now has a different number of elements; prepare the model again.
        """
        self.finish_parameters()
        self._parts.parameter_places.take_back()
        self.state.follow_edits()

    def resize_embeddings(self, num_tokens: int, **kwargs: Any) -> None:
        """Calls `model.resize_token_embeddings` during training, and keeps the state of other parameters and of old embeddings.

        Collective. New embeddings have rank 0's values, and no optimizer state. During the call, the whole model and its whole
        optimizer state are in host memory.

        Args:
            num_tokens: number of tokens of the new vocabulary.
            kwargs: passed to `resize_token_embeddings`.

        Raises:
            ValueError: the model has no such method, is split, or is one of several models.
        """
        if not self._parts.split.is_empty:
            raise ValueError(
                "hf_zero: the embeddings are split over ranks (tensor parallel) and cannot be resized during training. Resize "
                "the model and save it, then load it with tp_size."
            )
        if len(self.models) > 1:
            raise ValueError(
                f"hf_zero: the engine trains {len(self.models)} models, but resize_embeddings resizes only one. Resize before "
                "accelerator.prepare."
            )
        if not hasattr(self.model, "resize_token_embeddings"):
            raise ValueError(f"hf_zero: {type(self.model).__name__} has no resize_token_embeddings method.")
        self.sharded.gathered.meet("ZeroEngine.resize_embeddings")
        # Gather the whole state before `close` drops the shards.
        states = {slot.name: on_host(self.full_state(slot.parameter)) for slot in self._parts.slot_of.values()}
        optimizers, device = [sharded.optimizer for sharded in self.optimizers], self.device
        self.close()
        with resizing(self.module, optimizers, states):
            cast(Any, self.model).resize_token_embeddings(num_tokens, **kwargs)
        with self._as_it_is_used():
            self._start(assemble(self.module, optimizers, self.config, device), optimizers)

    def add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Calls `optimizer.add_param_group` during training, for example to unfreeze layers one after the other.

        Collective, between a step and the next forward. The other parameters keep their state. During the call, the model and
        its optimizers' state are whole on each rank, the state in host memory.

        Args:
            optimizer: one of the engine's optimizers.
            group: as in torch. Parameters of no model are trained like those that the optimizer had from the start.

        Raises:
            ConfigError: the model or its sequences are split over ranks.
            RuntimeError: gradients wait for a step.
            ValueError: the optimizer already has one of the parameters.
        """
        if SEQUENCE_ATTRIBUTE in self.model.__dict__ or self.state.is_split:
            raise ConfigError(
                "hf_zero: add_param_group during training needs sp_size and tp_size of 1. Add the group before "
                "accelerator.prepare."
            )
        if any(self.world.exchange(self._step.gradients.are_waiting, "add_param_group")):
            raise RuntimeError(
                "hf_zero: add_param_group was called while gradients wait for a step, and would discard them. Call it after "
                "optimizer.step() and optimizer.zero_grad()."
            )
        given = group["params"]
        added = set([given] if isinstance(given, torch.Tensor) else list(given))
        group = group | {"params": [given] if isinstance(given, torch.Tensor) else list(given)}
        if not added.isdisjoint(whole_parameters(optimizer)):
            raise ValueError("hf_zero: add_param_group received a parameter that the optimizer already has. Remove it.")
        slots, optimizers = list(self._parts.slot_of.values()), [sharded.optimizer for sharded in self.optimizers]
        states = {slot.parameter: on_host(self.full_state(slot.parameter)) for slot in slots}
        masters = {slot.parameter: full_master(slot, self._parts.storage) for slot in slots}
        # As under DDP, sums of parameters of no optimizer wait for the optimizer that gets the parameters.
        idle = [slot for slot in slots if slot.bucket.key.optimizer < 0]
        sums = {slot.parameter: full_gradient(slot, self.config.comm.meeting_timeout_s) for slot in idle}
        watch = self.transport.watch
        self.close()
        optimizer.add_param_group(group)
        for each in optimizers:
            # If rows are the parameters themselves, the optimizer has kept their state.
            each.state.update((p, states[p]) for p in whole_parameters(each) if states.get(p) and p not in each.state)
        self.module = joined(self.models, optimizers, in_training=True)
        self._start(assemble(self.module, optimizers, self.config, self.device), optimizers)
        now = self.transport.watch
        now.log.step, now.is_left_by_others = watch.log.step, watch.is_left_by_others
        for parameter, row in self._parts.row_of.items():
            master = masters.get(parameter)
            if master is not None:
                interval = row.layout.in_parameter
                self._parts.storage.put_master(row, master.reshape(-1)[interval.start : interval.stop])
        self._step.row_writes.follow(self.buckets)
        with look_only():
            # The next backward adds to these sums. They are equal on all ranks, so their mean is the sum itself.
            for parameter, gradient in sums.items():
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

    def close(self, *, rank0_only: bool = False) -> None:
        """Makes the model and optimizers plain again: no hooks, parameters in separate memory, whole parameters in the groups.

        Sharded optimizer state, which exists only in rows, is dropped. Collective.

        Args:
            rank0_only: at stage 3, only rank 0 gets whole parameters. On the other ranks they are on the meta device.
        """
        if not self.sharded.is_empty:
            self.sharded.gathered.meet("ZeroEngine.close")
        self.synchronize("ZeroEngine.close")
        with self._parts.exact.fetched_master("ZeroEngine.close"):
            self._parts.parameter_places.own_memory(spared=self.sharded.unit_of)
        # Before the hooks are removed, so that a later backward of the script finds no stand-ins.
        self._step.gradients.drop()
        for handle in self._handles:
            handle.remove()
        # The first copy of experts may be on more ranks than the first copy of the remaining model.
        is_first = self._parts.mesh.expert_dp.all_groups.rank == 0
        self.sharded.hand_back(wanted=is_first or not rank0_only)
        # Close the storage after the parameters: masters in files are read when parameters get separate memory.
        self._parts.storage.close()
        self.parameter_tier.close()
        for optimizer in self.optimizers:
            optimizer.release()
        detach((*self.models, *self.entries, *self.module.parameters()))
        # Restore the DTensors last, because they get the present values of the plain parameters.
        self._parts.split.restore()


def _refuse_classes(models: Sequence[object], optimizers: object) -> None:
    """Raises TypeError if a model or optimizer is a class or has the wrong type."""
    held = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    for given, kind in [*((each, nn.Module) for each in models), *((each, torch.optim.Optimizer) for each in held)]:
        if isinstance(given, type):
            raise TypeError(
                f"hf_zero: ZeroEngine got the class {given.__name__}. Pass an object: {given.__name__}(...)."
            )
        if not isinstance(given, kind):
            raise TypeError(
                f"hf_zero: ZeroEngine got {type(given).__name__}. It takes a model and its optimizers: ZeroEngine(model, "
                "[optimizer], 2)."
            )


SEQUENCE_ATTRIBUTE = "_hf_zero_sequence"
"""Attribute of a model whose sequences are split over ranks. An extra that uses this file sets the attribute."""
