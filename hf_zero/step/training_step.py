"""The order of a training step: forward, backward, clip, step, gather of parameters."""

import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import chain, filterfalse
from operator import is_
from typing import Any, cast

import torch
from torch import nn

from ..buckets.all_buckets import (
    allow_norms_of,
    begin_step_of,
    end_step_of,
    refuse_norms_of,
    rows_with_gradient,
    unsharded,
)
from ..buckets.bucket import BUCKET_OF, Bucket, Row
from ..buckets.memory import UnshardedMemory
from ..buckets.sharded_gradient import ShardedGradient
from ..comm.waits import Label
from ..config import AUTO, ConfigError
from ..device import in_units
from ..engine.agreed_start import refuse_disagreement
from ..engine.buffers import ModelBuffers
from ..engine.compiled import compiled_frames, is_compiled
from ..engine.models import models_in
from ..engine.parts import Parts
from ..engine.rank_allocation import RankAllocation
from ..hooks.tensors import is_in_backward
from ..hooks.weak import WeakHook, WeakMethod
from ..layout import gradient_buffers
from ..optimizer.full_state import gathered_gradient
from ..optimizer.row_state import identity_of
from ..optimizer.shared_settings import SharedSettings
from .backward import Gradients, no_signal
from .gradient_store import GradientStore, GradientTarget
from .row_writes import RowWrites
from .sharded_gradients import choose_store
from .sharded_optimizer import ShardedOptimizer
from .step_context import StepContext
from .step_replicas import StepReplicas
from .uncounted_edits import UncountedEdits

# [Note: the order of a step]
# - Reductions start during backward and are awaited at its end. They overlap with autograd's kernels, and after backward, a
#   clip or a script that reads gradients finds all of them reduced.
# - Gathers of the last step end before the next step begins, because they send from the shards that the optimizer writes.
# - Masters follow edits of parameters before gradients are checked, so even a skipped step keeps the edits.
# - Gradients are checked before any row is stepped, because a step cannot be undone.
# - Masters are written back, and outer steps run, before parameters are gathered. So ranks send the values for the next forward.
# - Checksums of owned parts are recorded before the gather. The gather may overwrite a copy that a flipped bit has changed, and
#   then nobody could find out whose copy was wrong.
# - After the gathers' start, all earlier writes to rows count as known. A later write is an edit by the script.

_FAILED = Label(kind="agreement on a failed backward", subject="this micro-batch")
_STOP = Label(kind="agreement on a stop", subject="the step")


class TrainingState(Enum):
    """This rank's phase of a training step. The values appear in logs of collectives and in reports of late ranks."""

    BETWEEN = "between steps"
    FORWARD = "forward"
    EVALUATE = "evaluate"
    BACKWARD = "backward"
    CLIP = "clip"
    STEP = "optimizer step"


class TrainingStep(StepContext):
    """Hooks on a model and its optimizers, which run a training step. See [Note: the order of a step].

    Args:
        engine: kept alive by this object, and so by the optimizers, whose hooks keep this object.
        find_unused_parameters: see `ZeroEngine`.

    Attributes:
        log: this rank's log of collectives, which also counts the steps.
        optimizers: the user's optimizers, each over this rank's rows.
        row_writes: detects a script's writes to these rows between steps.
        store: keeps gradients between backward and the step.
        settings: settings of the step, which must be equal on all ranks.
        gradients: receives gradients from autograd.
        last_norm: the last measured gradient norm, a scalar that the host has not read; None before the first.
        has_rescue: whether a caller handles passes that run out of memory.
        stop_due: the number of the signal for which all ranks stop after the last step; 0 for none.
    """

    def __init__(
        self,
        engine: object,
        model: nn.Module,
        parts: Parts,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        find_unused_parameters: bool,
    ):
        self._engine = engine
        self._process = os.getpid()
        self._model = model
        self._parts = parts
        self._config = parts.config
        # Stage 3 gathers and drops parameters layer by layer.
        self._gathers_layers = not parts.sharded.is_empty
        self._schedule = parts.sharded.schedule
        self._no_sync_depth = 0
        self._has_inner_backwards = False
        self._has_told_of_mini_batches = False
        self._entries: dict[nn.Module, nn.Module] = {}
        self.has_rescue = False
        self.stop_due = 0
        self.last_norm: torch.Tensor | None = None
        step_transport, world_size = parts.mesh.dp.transport, parts.groups.world_size
        self.log = step_transport.watch.log
        self.store = self._make_store()
        self.settings = SharedSettings(optimizers)
        self.gradients = Gradients(
            parts.buckets,
            self.store,
            step_transport,
            world_size,
            self.settings,
            self,
            find_unused_parameters=find_unused_parameters,
        )
        if self._gathers_layers and world_size > 1:
            self._schedule.count_starts(self.gradients.starts, step_transport)
            self.store.steps = parts.wire.steps
            self.gradients.starts.has_steps = parts.wire.steps is not None
        # The parameters of the last clip, and the cached result of `_rows_of`.
        self._asked: list[nn.Parameter] = []
        self._found: tuple[list[Row], bool] = [], not parts.slot_of
        self._uncounted_edits = UncountedEdits(parts.buckets, parts.storage)
        # During a step: buckets written back, buckets still to be sent, and whether each bucket is sent as soon as it is stepped.
        self._written: set[Bucket] = set()
        self._to_send: deque[Bucket] = deque()
        self._sends_early = self._waits_for_outer_step = False
        self.row_writes = RowWrites(parts, step_transport)
        self._buckets_of_optimizers = [
            [bucket for bucket in parts.buckets if bucket.key.optimizer == index] for index in range(len(optimizers))
        ]
        self.optimizers = [self._bind(optimizer, index) for index, optimizer in enumerate(optimizers)]
        self.allocations: list[RankAllocation] = []
        self._replicas: StepReplicas | None = None
        # The number of backwards that had ended at the last read of a gradient.
        self._read_after = 0
        for slot in parts.slot_of.values():
            slot.sharded_gradient.gather_whole = WeakMethod(self, TrainingStep.gather_gradient)

    def _make_store(self) -> GradientStore:
        parts = self._parts
        # Copies to host memory start as reductions end: if they waited for all reductions, no kernels of backward would hide
        # them. On the CPU, gradients are not copied.
        copies = parts.tier.is_offloaded and parts.tier.device.type != "cpu"
        most = gradient_buffers.GRAD_BUFFERS if copies else None
        landing = GradientTarget(
            d2h=parts.tier.d2h,
            most_under_way=most,
            step=self,
        )
        return choose_store(parts.buckets, self._config, parts.wire.reduction, landing)

    def _bind(self, optimizer: torch.optim.Optimizer, index: int) -> ShardedOptimizer:
        parts, mine = self._parts, self._buckets_of_optimizers[index]
        sharded = ShardedOptimizer(
            optimizer,
            rows=parts.row_of,
            slots=parts.slot_of,
            identity=identity_of(parts.groups, self._config.stage, parts.buckets),
            step=self,
            index=index,
            storage=parts.storage,
            row_writes=self.row_writes,
            timeout_s=self._config.comm.meeting_timeout_s,
        )
        parts.storage.step_with(optimizer, mine, stepped=self._bucket_stepped, sends_early=lambda: self._sends_early)
        return sharded

    def install(self, entries: Mapping[nn.Module, nn.Module]) -> list:
        """Registers hooks on the models' parameters and on the modules that the script calls; returns objects with a `remove`.

        Args:
            entries: maps each module that the script calls to the model inside.
        """
        self._entries = dict(entries)
        parts, optimizers = self._parts, [sharded.optimizer for sharded in self.optimizers]
        if parts.replicas is not None:
            stepped = [*zip(optimizers, self._buckets_of_optimizers)]
            units = self._schedule.units if self._gathers_layers else ()
            self._replicas = StepReplicas(parts.replicas, stepped, parts.parameter_gather, units, self.log)
        self._waits_at_the_root, self._compiled_frames = any(map(is_compiled, entries)), compiled_frames()
        self._begins = WeakHook(self, TrainingStep._before_forward)
        # A compiled model waits once before its forward, because its layers may have no calls.
        window = None if self._waits_at_the_root else parts.tier.window
        buckets = {parameter: slot.bucket for parameter, slot in parts.slot_of.items()}
        return [
            *self.gradients.install(),
            *chain.from_iterable(self._watch(model, entry) for entry, model in entries.items()),
            *self.row_writes.watch(models_in(self._model), optimizers, self._config),
            *(window.watch(self._model, buckets) if window is not None else ()),
        ]

    def _watch(self, model: nn.Module, entry: nn.Module) -> list:
        copies = self._parts.copies
        return [
            entry.register_forward_pre_hook(self._begins),
            # Also after an exception. Otherwise the hooks of `offload.activations` would stay, and the root would seem to run.
            entry.register_forward_hook(WeakHook(self, TrainingStep._after_forward), always_call=True),
            *(copies.watch(entry) if copies is not None else ()),
            *self._parts.parameter_places.watch(model, entry),
        ]

    def _enter(self, state: TrainingState) -> None:
        self.log.site = state.value

    @property
    def is_accumulating(self) -> bool:
        """Whether the script is inside `no_sync`, or has set DDP's `no_sync` flag on the model."""
        flags = (entry.__dict__.get("require_backward_grad_sync", True) for entry in self._entries)
        return self._no_sync_depth > 0 or not all(flags)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Makes passes inside only accumulate; see `ZeroEngine.no_sync`."""
        self._no_sync_depth += 1
        self._choose_reducing()
        try:
            yield
        finally:
            self._no_sync_depth -= 1
            self._choose_reducing()

    def _choose_reducing(self) -> None:
        accumulates = self.is_accumulating or self._has_inner_backwards
        self.gradients.reducing = not (accumulates and self._config.accumulates_locally)

    @contextmanager
    def inner_backwards(self) -> Iterator[None]:
        """Runs a backward whose hooks run more backwards; see `ZeroEngine.inner_backwards`."""
        ended = self.gradients.ended
        self._has_inner_backwards = True
        self._choose_reducing()
        try:
            yield
        finally:
            self._has_inner_backwards = False
            reduced = self.gradients.reducing
            self._choose_reducing()
        # If no backward of this engine has ended inside, the loss was another engine's, and there is nothing to reduce.
        if not reduced and self.gradients.reducing and self.gradients.ended > ended:
            self.gradients.reduce_accumulated()
        elif reduced and self.gradients.ended > ended + 1:
            self._tell_of_mini_batches(self.gradients.ended - ended)

    def _tell_of_mini_batches(self, count: int) -> None:
        """Warns once, on rank 0, that each mini-batch of a loss is reduced, unless the settings ask for that."""
        groups = self._parts.groups
        if self._has_told_of_mini_batches or self._config.grad_accumulation != AUTO or groups.world_size == 1:
            return
        self._has_told_of_mini_batches = True
        if groups.rank == 0:
            whole = sum(bucket.layout.numel * bucket.precision.reduce.itemsize for bucket in self._parts.buckets)
            warnings.warn(
                f"hf_zero: the loss runs a backward for each of its {count} mini-batches, and each backward reduces the "
                f"gradients: a step sends them {count} times, DDP only once. Set `grad_accumulation: local` (`--zero "
                f"stage={self._config.stage},grad_accumulation=local`) to reduce them once per step; each rank then keeps "
                f"whole gradients ({in_units(whole)}) until the step. Set `grad_accumulation: sharded` to keep the current "
                "behavior without this warning.",
                stacklevel=3,
            )

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Makes passes inside reduce, even inside `no_sync`; see `ZeroEngine.sync`."""
        depth, reducing = self._no_sync_depth, self.gradients.reducing
        self._no_sync_depth, self.gradients.reducing = 0, True
        try:
            yield
        finally:
            self._no_sync_depth, self.gradients.reducing = depth, reducing

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None
    ) -> torch.Tensor:
        """See `ZeroEngine.clip_grad_norm_`."""
        nonfinite = self._parts.nonfinite
        self.gradients.recover()
        self._enter(TrainingState.CLIP)
        tier = self._parts.tier
        if tier.device.type != "cpu":
            # A launcher gives the script one thread, and the norm and the coefficient pass over all gradients in host memory. The
            # step releases the cores, or the next forward. On the CPU, the number of threads may change bits of a sum.
            tier.take_cores()
        asked, is_of_all = self._rows_of(parameters)
        rows = rows_with_gradient(asked)
        allow_norms_of(set(map(BUCKET_OF, rows)))
        # Free the last norm first, so each step's norm gets the same memory.
        self.last_norm = None
        # The norm is over all ranks, so each rank scales by the same coefficient.
        measured = self._parts.norm.measure(rows, norm_type=norm_type, max_norm=max_norm)
        self.last_norm = measured.norm
        # To read a tensor on an accelerator, the host would have to wait.
        self.settings.clip = None if isinstance(max_norm, torch.Tensor) else (float(max_norm), float(norm_type))
        bad = nonfinite.look(measured, at_all=is_of_all)
        if bad is not None:
            if self._replicas is not None:
                self._replicas.compare_now()
            nonfinite.found(bad, rows)
        replicas = self._parts.replicas
        if replicas is not None:
            replicas.compare_gradients(self.log.step, self._parts.buckets)
        self._parts.storage.choice.scale_gradients(rows, measured.coefficient)
        if replicas is not None:
            replicas.note_gradients(self._parts.buckets)
        return measured.norm

    def _rows_of(self, parameters: Iterable[nn.Parameter] | None) -> tuple[Iterable[Row], bool]:
        """Returns this rank's rows of some parameters, and whether they are all parameters of the engine."""
        row_of, slot_of = self._parts.row_of, self._parts.slot_of
        if parameters is None:
            return row_of.values(), True
        asked = list(parameters)
        # Most scripts pass the same parameters in each step. Each lookup would cost two Python calls, for the parameter's hash.
        if len(asked) != len(self._asked) or not all(map(is_, asked, self._asked)):
            wanted = dict.fromkeys(parameter for parameter in asked if parameter in slot_of)
            rows = [row_of[parameter] for parameter in wanted if parameter in row_of]
            # Compare parameters, not rows: all ranks must get the same answer.
            self._asked, self._found = asked, (rows, len(wanted) == len(slot_of))
        return self._found

    def gather_gradient(self, stand_in: ShardedGradient) -> torch.Tensor | None:
        """Gathers a gradient for a script's read of `p.grad`. Collective."""
        if self._parts.groups.rank == 0:
            # Python shows it once.
            warnings.warn(
                f"hf_zero: the script reads `p.grad`. At stage {self._config.stage} each read gathers the gradient from all "
                "ranks, so all ranks must read it. To clip or to log a norm, use `accelerator.clip_grad_norm_` or "
                "`engine.clip_grad_norm_`: they send one number.",
                stacklevel=2,
            )
        self.gradients.recover()
        slot = next((each for each in self._parts.slot_of.values() if each.sharded_gradient is stand_in), None)
        if slot is None:
            return None
        if self._read_after != self.gradients.ended:
            # A rank that reads alone gets an error with the line. Further reads after the same backward save the time.
            slot.bucket.group.transport.barrier("reads of p.grad", self._config.comm.meeting_timeout_s)
            self._read_after = self.gradients.ended
        return gathered_gradient(slot)

    # ---- failed passes ----

    def drop_failed(self, ended_before: int, *, failed: bool) -> bool:
        """See `ZeroEngine.drop_failed`."""
        self.has_rescue = True
        # In the order of the other ranks' collectives: buffers before their forward, reductions in their backward.
        for buffers in self._parts.model_buffers.values():
            buffers.after_pass(failed=failed)
        if failed and self.gradients.ended == ended_before:
            self.gradients.join_remaining()
        mine = torch.tensor([failed], dtype=torch.uint8)
        mesh = self._parts.mesh
        among = mesh.dp.transport if mesh.split.is_empty else mesh.world
        # Agree before the drop. If only one rank repeated a micro-batch, the others would hang in a collective.
        if not among.agree_max(mine, _FAILED).item():
            return False
        self.gradients.discard()
        self._parts.nonfinite.forget_batches()
        return True

    # ---- forward ----

    def _before_forward(self, module: nn.Module, _args: tuple) -> None:
        parts = self._parts
        if is_in_backward() or parts.sharded.gathered.uses_copies:
            # Activation checkpointing runs the forward again inside backward, and a saver runs a forward on one rank.
            return
        if torch.is_grad_enabled():
            self._refuse_in_fork()
        self._enter(TrainingState.FORWARD if torch.is_grad_enabled() else TrainingState.EVALUATE)
        self.row_writes.refuse_unsent("a forward starts")
        self.gradients.recover()
        parts.tier.release_cores()
        parts.storage.before_forward()
        for sharded in self.optimizers:
            sharded.follow_state_edits()
        if self._gathers_layers:
            parts.sharded.before_forward()
        window = parts.tier.window
        if self._is_compiled:
            parts.parameter_gather.finish_all()
            if window is not None:
                window.before_unknown_layers()
        buffers = self._buffers_of(module)
        if buffers is not None:
            buffers.before_forward()
        if parts.activations is not None and torch.is_grad_enabled():
            flats = (bucket.flat for bucket in parts.all_buckets)
            parts.activations.begin(chain(self._model.buffers(), parts.slot_of, parts.parameter_places.frozen, flats))

    def _buffers_of(self, entry: nn.Module) -> ModelBuffers | None:
        of_models = self._parts.model_buffers
        if not of_models:
            return None
        model = self._entries.get(entry)
        if model is None:
            # With regional compilation, accelerate calls a copy of the module with the same parameters.
            first = next(entry.parameters())
            model = next(each for each in self._entries.values() if any(p is first for p in each.parameters()))
        return of_models.get(model)

    @property
    def _is_compiled(self) -> bool:
        """Whether parts of the model may be compiled. Then all parameters must arrive first, so no guard of theirs is traced."""
        compiled = compiled_frames()
        if not self._waits_at_the_root and compiled != self._compiled_frames:
            self._compiled_frames = compiled
            self._waits_at_the_root = self._begins.was_compiled or any(map(is_compiled, self._entries))
        return self._waits_at_the_root

    def _refuse_in_fork(self) -> None:
        """Raises RuntimeError in a process forked from the engine's process, because the process group was created before.

        With a launcher that forks each rank, as `notebook_launcher` does, every rank would train a separate model.
        """
        here = os.getpid()
        if here != self._process:
            raise RuntimeError(
                f"hf_zero: this engine was built in process {self._process}, before a launcher forked process {here}. Build the "
                "Accelerator, Trainer or ZeroEngine in the function that the launcher calls."
            )

    def _after_forward(self, module: nn.Module, _args: tuple, outputs: object) -> None:
        parts = self._parts
        if parts.activations is not None:
            parts.activations.end()
        window = parts.tier.window
        if window is not None:
            window.after_forward()
        if self._gathers_layers:
            parts.sharded.after_forward(outputs)
        # A saver's forward on one rank has no backward.
        if torch.is_grad_enabled() and not parts.sharded.gathered.uses_copies:
            self._enter(TrainingState.BACKWARD)
            # As in DDP, the flags at the time of the forward decide about the backward after it.
            self._choose_reducing()
            self.gradients.watch(outputs)
            # Checkpointing ends a recomputed forward by an exception, without outputs. If such a forward counted, the numbers of
            # later micro-batches would be wrong.
            if outputs is not None:
                parts.nonfinite.note_batch(outputs)
            buffers = self._buffers_of(module)
            if buffers is not None:
                buffers.after_forward(under_no_sync=self.is_accumulating)

    # ---- backward ----

    def start_passed_over(self, bucket: Bucket) -> bool:
        return self.gradients.start_passed_over(bucket)

    def start_up_to(self, number: int) -> None:
        self.gradients.start_up_to(number)

    def agree_on_starts(self) -> None:
        if self._gathers_layers:
            self._schedule.agree_on_starts()

    def end_gathers(self) -> None:
        if self._gathers_layers:
            self.settings.edits = self._parts.sharded.edits
            self._schedule.end_gathers()

    def end_backward(self) -> None:
        if self._gathers_layers:
            self._schedule.end_backward()
        self._parts.nonfinite.forget()
        if self._parts.replicas is not None and not self.is_accumulating:
            self._parts.replicas.note_gradients(self._parts.buckets)
        if self._parts.groups.shard_size > 1:
            refuse_norms_of(self._parts.buckets)

    # ---- the optimizer's step ----

    def add_param_group(self, index: int, group: dict[str, Any]) -> None:
        cast(Any, self._engine).add_param_group(self.optimizers[index].optimizer, group)

    def before_step(self, index: int) -> bool:
        _refuse_inside_backward()
        sharded, buckets = self.optimizers[index], self._buckets_of_optimizers[index]
        # The first optimizer counts the steps.
        is_first = index == 0
        optimizer, self._sends_early = sharded.optimizer, False
        # The optimizer's own step may compute norms of its rows; scripts may not between backward and step.
        allow_norms_of(buckets)
        nonfinite = self._parts.nonfinite
        self._enter(TrainingState.STEP)
        # Before the step changes parameters, because the end of a failed pass still gathers their old values.
        self.gradients.recover()
        # Before any write of the step, because gathers still read the shards.
        self._parts.end_reads()
        # An accumulated, unreduced gradient differs between ranks, so a step would make their parameters differ.
        self.gradients.refuse_unreduced()
        if self.gradients.settings_differ:
            self.gradients.settings_differ = False
            refuse_disagreement(self.settings.facts(), self.gradients.transport.exchange)
        self._parts.parameter_places.before_step()
        if self._replicas is not None:
            # Compare in each of the first steps. Otherwise `_uncounted_edits` would report a flipped bit as a script's edit.
            self._replicas.before_update(index, always_compares=bool(self._uncounted_edits.watched))
        if is_first:
            for allocation in self.allocations:
                allocation.before_step()
        if nonfinite.has_skipped:
            return False
        self._refuse_without_rescue()
        if self._uncounted_edits.watched:
            self._uncounted_edits.refuse(buckets, self.gradients.transport.exchange)
        begin_step_of(buckets)
        nonfinite.refuse_unscaled(optimizer, buckets)
        if nonfinite.is_due(optimizer):
            self.clip_grad_norm_(float("inf"))
        nonfinite.end(optimizer)
        if nonfinite.skips:
            self.gradients.drop()
            nonfinite.skip()
            return False
        # Reversed, because gradients fill buckets from the last layer on, and the next forward reads the first layer first.
        self._written, self._to_send = set(), deque(reversed(buckets))
        # If nothing is sent, all masters are written back together.
        is_sent = self._parts.tier.is_offloaded or bool(unsharded(buckets))
        self._sends_early = is_sent and self._may_send_early and sharded.keeps_stepped_rows
        self._parts.tier.take_cores()
        # A clip above has set its own state.
        self._enter(TrainingState.STEP)
        return True

    def _refuse_without_rescue(self) -> None:
        if self._config.out_of_memory == "halve" and not self.has_rescue:
            raise ConfigError(
                "hf_zero config: `out_of_memory: halve` repeats forwards and backwards, but this training loop runs them "
                "itself. Train with Trainer, run each micro-batch through `hf_zero.Rescue`, or remove the setting."
            )

    def after_step(self, index: int, *, is_taken: bool) -> None:
        is_first = index == 0
        if is_taken:
            self._hand_over(self.optimizers[index].optimizer, self._buckets_of_optimizers[index])
        if is_first:
            self._parts.nonfinite.end_step(is_taken=is_taken)
        for buffers in self._parts.model_buffers.values():
            buffers.after_step()
        self.log.step += is_first
        if is_first:
            self.settings.steps += 1
            self.stop_due = self._stop_of_all_ranks()
            # A rank with a pending stop asks again in the next step.
            self.gradients.stop_agreed = 0
        self._enter(TrainingState.BETWEEN)
        parts = self._parts
        if is_first and parts.copies and parts.copies.is_due(self.log.step, every=self._config.check_replicas_every):
            # While gathers write, values would differ even between equal replicas.
            parts.parameter_gather.finish_all()
            parts.copies.compare_values(self.log.step)

    def _stop_of_all_ranks(self) -> int:
        """Returns the largest signal number of all ranks of the run in this step; 0 for none, and between outer steps.

        Ranks that step together have agreed at the end of backward. If the run has more ranks, as with a split model or outer
        steps, one more message is sent.
        """
        mesh, gradients = self._parts.mesh, self.gradients
        if gradients.stop_asked is no_signal or mesh.dp.groups.world_size == mesh.world_groups.world_size:
            return gradients.stop_agreed
        if self._waits_for_outer_step:
            return 0
        mine = torch.tensor([max(gradients.stop_agreed, gradients.stop_asked())], dtype=torch.uint8)
        return int(mesh.world.agree_max(mine, _STOP).item())

    @property
    def _may_send_early(self) -> bool:
        """Whether a bucket may be sent as soon as it is stepped, before the other buckets are.

        False with NVMe: a disk may fail on one rank, and the other ranks would wait for its sends. Also False if outer steps or
        checksums must run before a send.
        """
        config = self._config
        waits = config.check_replicas_every > 0 or self._parts.outer is not None
        return not waits and "nvme" not in (config.offload.optimizer, config.offload.params)

    def _bucket_stepped(self, bucket: Bucket) -> None:
        """Writes a bucket back, then sends stepped buckets in the order of all ranks, up to the first unstepped one."""
        if not self._sends_early:
            return
        with bucket.tier.h2d.in_parallel():
            self._parts.storage.write_back([bucket])
        # Count the step's writes as known. Otherwise the next forward would refuse them as unsent writes by the script.
        self.row_writes.follow([bucket])
        self._written.add(bucket)
        while self._to_send and self._to_send[0] in self._written:
            self._parts.send([self._to_send.popleft()])

    def _hand_over(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        parts = self._parts
        self._enter(TrainingState.STEP)
        parts.storage.after_step()
        left = list(filterfalse(self._written.__contains__, buckets))
        # Copy masters into parameters before any send, because the gather reads the parameters' shard.
        parts.storage.write_back(left)
        parts.tier.release_cores()
        if parts.outer is not None:
            self._waits_for_outer_step = not parts.outer.after_step(buckets)
        stepped_of = end_step_of(buckets)
        if self._gathers_layers:
            parts.sharded.follow_step(stepped_of)
        # Free gradients before the gathers begin, because the gathers need memory for buffers.
        self.store.release_all(buckets)
        if parts.replicas is not None:
            parts.replicas.after_update(optimizer, buckets)
        # Sent last, because the values must be stepped, written back and, with outer steps, averaged.
        self._parts.send(self._to_send)
        self.row_writes.follow(left)
        if any(bucket.layout.shards == 1 or not isinstance(bucket.memory, UnshardedMemory) for bucket in self._written):
            # No all-gather orders the copies of these buckets before the kernels that read them, so the device waits here.
            parts.tier.h2d.hold_up_device()
        if parts.parameter_tier.files is not None:
            parts.parameter_tier.files.end_step()


def _refuse_inside_backward() -> None:
    if is_in_backward():
        raise RuntimeError(
            "hf_zero: optimizer.step() was called inside a backward, for example by a gradient hook, before gradients are "
            "reduced. Call it after loss.backward(); to avoid keeping whole gradients until then, train at `stage: 2`."
        )
