"""The engine: one object that trains one model with sharded state. The only file that knows all of engine/."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from ..comm.choose import choose_step_transport, choose_transport
from ..comm.groups.groups import Groups
from ..comm.transport import Label
from ..config import ZeroConfig
from ..device import Arrival, with_index
from ..layout.intervals import Interval
from ..offload.choose import choose_activations, choose_tiers
from .buckets.bucket import Bucket, rows_with_gradient
from .buckets.memory import GatheredMemory, WholeMemory
from .buckets.rows import StateRow
from .build.agreement import describe, refuse_disagreement
from .build.auto_settings import settle_auto
from .build.bucketing import build_parts, check_parameters, owners
from .build.holders import bytes_elsewhere, choose_holder, refuse_unless_it_fits, reshards_after_forward, together
from .dtype_report import DtypeReport, report_dtypes
from .engine_reference import attach, detach
from .gradients.backward_pass import Gradients
from .gradients.choose_store import choose_store
from .gradients.clip import clamp_values
from .gradients.nonfinite import NonFiniteCheck
from .gradients.norm import choose_norm
from .gradients.store import GradientStore, Landing
from .hooks import WeakHook
from .memory_report import Places, report_memory
from .report_tables import CommReport, MemoryReport
from .state.full_tensors import Look, slot_of
from .state.optimizer import ShardedOptimizer, identity_of
from .state.resize import on_host, resize_whole
from .state.row_writes import RowWrites
from .state.state_rows import fill_rows, state_rows, state_scalars
from .travel.buffers import ModelBuffers, broadcast_buffers, start_buffers
from .travel.in_flight import ParameterGather, caches_parameters, is_compiled
from .travel.outer import choose_outer
from .travel.wire import choose_wire
from .units.exact_weights import ExactWeights
from .units.gathered import parameters_in
from .units.parameter_places import Homes
from .units.sharded_model import ShardedModel
from .units.weights import OwnWeights, load_weights, own_weights


class ZeroEngine:
    """Trains `model` in place with its state sharded over the ranks of torch.distributed (or on one rank without it).

    After construction an ordinary loop does the rest: forward, `loss.backward()`, `clip_grad_norm_`, `optimizer.step()`,
    `optimizer.zero_grad()`. Building it is collective: parameters and buffers become rank 0's on every rank.

    Args:
        model: any module with trainable floating-point parameters; at stage 3 they may all be frozen.
        optimizers: torch optimizers over its parameters. They stay the same objects.
        config: anything `ZeroConfig.of` takes.
        entry: what the script calls in place of `model`, where that is another module (a compiled one).
        device: that it is trained on; by default where its parameters are. At stage 3 they may be elsewhere: each rank
            then moves its shard only.

    Raises:
        ValueError: a model or optimizer that cannot be trained so; ranks that differ. ConfigError for settings.

    ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        config: object = None,
        *,
        entry: nn.Module | None = None,
        device: torch.device | None = None,
    ):
        self.config = ZeroConfig.of(config)
        self.model = model
        self._entry = entry or model
        self._trials = ()
        self._assemble(optimizers, device)

    def _meet(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device | None) -> None:
        model, comm = self.model, self.config.comm
        self.device = with_index(device or next(model.parameters()).device)
        self.groups = Groups.create(stage=self.config.stage, device_type=self.device.type, comm=comm)
        self.transport = choose_transport(self.groups, self.device, comm.timeout_s)
        self._is_replicated = self.groups.shard_size == 1
        self._peers = self.groups.of_a_step()
        self._stepping = choose_step_transport(self.transport, self.groups, self.device, comm.timeout_s)
        refuse_disagreement(describe(model, optimizers, self.config), self.transport)
        self.config, trials = settle_auto(self.config, model, self.groups, self.transport, self.device)
        self._trials += trials
        start_buffers(model, self.transport, self.device, placed=device is not None or self.config.stage == 3)

    def _assemble(self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device | None) -> None:
        model = self.model
        check_parameters(model, self.config)
        owner = owners(model, optimizers)
        self._meet(optimizers, device)
        offload, comm, shared = self.config.offload, self.config.comm, self.config.broadcast_buffers
        self._buffers = ModelBuffers(model, self._stepping, self.device, wanted=shared and self._peers.world_size > 1)
        self.tier, self.parameter_tier = together(self.transport, lambda: choose_tiers(offload, self.device))
        needed = bytes_elsewhere(model, self.config, self.tier, self.parameter_tier, owner, optimizers, self.groups)
        refuse_unless_it_fits(self.config, needed, self.transport)
        self.nonfinite = NonFiniteCheck(self.config, self._stepping, replicated=self._is_replicated)
        self._holder = choose_holder(
            self.config, self.tier, optimizers, self.transport, nonfinite=self.nonfinite, needed=needed
        )
        self._wire = choose_wire(self.config, self._peers, self._stepping, self.transport, self.device)
        self._parts = build_parts(
            model,
            owner,
            optimizers,
            self.config,
            self.groups,
            self._wire,
            self.transport,
            device=self.device,
            tier=self.tier,
            parameter_tier=self.parameter_tier,
            settle=self._holder.settle,
        )
        self._all_buckets = sorted((b for each in self._parts.values() for b in each), key=lambda b: b.layout.index)
        self.buckets = [bucket for bucket in self._all_buckets if bucket.trained]
        self._slot_of = {slot.parameter: slot for bucket in self.buckets for slot in bucket.slots}
        self._row_of = {row.slot.parameter: row for bucket in self.buckets for row in bucket.rows}
        self._store = self._make_store()
        self.sharded = ShardedModel(
            model,
            {name: found for name, found in self._parts.items() if isinstance(found[0].memory, GatheredMemory)},
            self.transport,
            self._wire,
            self._holder,
            self.config,
            device=self.device,
            reshard_after_forward=reshards_after_forward(self.config, model, self.device, self.transport),
        )
        self._gradients = Gradients(
            self.buckets, self._store, self._stepping, self._peers.world_size, self.sharded.schedule.end_backward
        )
        self._outer = choose_outer(self.transport, self.groups.outer, comm, self.buckets)
        whole = [bucket for bucket in self.buckets if isinstance(bucket.memory, WholeMemory)]
        self._parameters = ParameterGather(model, whole, self._wire.gather)
        self._exact = ExactWeights(whole, self._wire.exact, self._holder, self.transport, comm.meeting_timeout_s)
        self._look = Look(self._row_of, self._stepping, self._holder, comm, replicated=self._is_replicated)
        self._homes = Homes(model, self._all_buckets)
        self.activations = choose_activations(offload, self.device)
        self._norm = choose_norm(
            self.config, self.buckets, self._stepping, replicated=self._is_replicated, device=self.device
        )
        self._no_sync_depth = 0
        self._row_writes = RowWrites(self.buckets, self._stepping, before=self._end_reads, send=self._share)
        self.optimizers = [self._bind(optimizer, index) for index, optimizer in enumerate(optimizers)]
        self._handles = self._gradients.install() + self._hook_forward(self._entry) + self._homes.watch(self._entry)
        self._handles += self._row_writes.watch(model, optimizers, self.config)
        attach(self, (model, self._entry, *model.parameters()), keeps=not self.sharded.is_empty)

    # ---- a training step ----

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches that only accumulate. With `grad_accumulation: sharded` they are reduced all the same."""
        self._no_sync_depth += 1
        self._gradients.reducing = not self.config.accumulates_locally
        try:
            yield
        finally:
            self._no_sync_depth -= 1
            self._gradients.reducing = self._no_sync_depth == 0 or not self.config.accumulates_locally

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, parameters: Iterable[nn.Parameter] | None = None
    ) -> torch.Tensor:
        """Clips the gradients by their total norm over all ranks; returns that norm, a float32 scalar on the device.

        Args:
            max_norm: inf only measures.
            parameters: some of the model's parameters; None is all of them. Collective.
        """
        # By the parameters asked for, not the rows found: the ranks must come to the same answer.
        wanted = self._slot_of if parameters is None else {p: None for p in parameters if p in self._slot_of}
        rows = rows_with_gradient(self._row_of, wanted)
        measured = self._norm.measure(rows, norm_type=norm_type, max_norm=max_norm)
        self.nonfinite.look(measured, rows, at_all=len(wanted) == len(self._slot_of))
        self._holder.scale_gradients(rows, measured.coefficient)
        return measured.norm

    def clip_grad_value_(self, clip_value: float, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Clamps the gradients' elements to [-clip_value, clip_value]."""
        clamp_values(rows_with_gradient(self._row_of, self._slot_of if parameters is None else parameters), clip_value)

    def trains(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter lies in this engine's buckets."""
        return parameter in self._slot_of

    def finish_parameters(self) -> None:
        """Waits for the parameter all-gathers behind the last step. Reads through the model's modules do so themselves."""
        self._parameters.finish_all()

    def synchronise(self) -> None:
        """Makes the model the same on all ranks; saves do it. Collective.

        Sends what was written to this rank's part of the parameters in `optimizer.param_groups` outside of a step, and takes
        the outer step of `comm.sync_every`, if local steps wait for it.
        """
        self.finish_parameters()
        self._row_writes.send("the model")
        self.finish_parameters()
        if self.groups.outer is None:
            return
        self.sharded.schedule.reshard_all()
        self._row_writes.renew_copies(self._outer.finish())
        self.finish_parameters()
        broadcast_buffers(self.model, self.transport, self.device)

    # ---- looking in ----

    @contextmanager
    def gathered(
        self, target: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None = None, *, writeback: bool = False
    ) -> Iterator[None]:
        """Whole parameters to read or, with `writeback`, to edit. Collective, on every rank.

        Args:
            target: a module of the model, a parameter or several; None is the whole model.
            writeback: keep edits; what rank 0 wrote is what all ranks have afterwards.

        Raises:
            CommunicationError: some rank did not come within `comm.gather_timeout_s`.
            MemoryError: they do not fit.
            RuntimeError: an edit without `writeback`.
        """
        self.finish_parameters()
        if writeback:
            self.synchronise()
        parameters = parameters_in(self.model if target is None else target)
        with self.sharded.whole.gathered(parameters, writeback=writeback), self._exact.at_hand("hf_zero.gathered"):
            yield
            if writeback:
                for parameter in (p for p in parameters if p not in self.sharded.unit_of):
                    self.transport.broadcast(parameter.data, Label(kind="broadcast edits", subject="the model"))
                for bucket in {self._slot_of[p].bucket for p in parameters if p in self._slot_of}:
                    with self._holder.at_hand(bucket):
                        bucket.follow_values()
        if writeback:
            self._outer.start_from_masters()

    def full_grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The reduced gradient of a whole parameter, in its shape and the master dtype; None if it has none. Collective."""
        return self._look.gradient(slot_of(parameter, self._slot_of))

    def full_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor | object]:
        """The optimizer's state of a whole parameter: tensors with one value an element in its shape, the rest as it is.

        Collective. Empty before the first step.
        """
        return self._look.state(slot_of(parameter, self._slot_of), self.optimizers)

    @contextmanager
    def lent(self, purpose: str, *, wanted: bool) -> Iterator[dict[str, torch.Tensor]]:
        """For savers: whole, exact parameters where `wanted`, in host memory at stage 3; see `ShardedModel.lent`. Collective."""
        self.synchronise()
        with self._exact.at_hand(purpose), self.sharded.lent(purpose, wanted=wanted) as state:
            yield state

    def whole_state_dict(self, *, wanted: bool) -> dict[str, torch.Tensor]:
        """The model's state dict in host memory where `wanted`, and {} elsewhere. Collective; gathers a unit at a time."""
        with self.lent("the model's state dict", wanted=wanted) as state:
            return state

    @property
    def saves_together(self) -> bool:
        """Whether the model's own tensors are not what is to be saved; `whole_state_dict` is."""
        return not (self.sharded.is_empty and self._exact.is_empty and self.groups.outer is None)

    def memory_report(self) -> MemoryReport:
        """Bytes of state on this rank by kind, and what DDP holds of the same kind."""
        places = Places(self.tier, self.parameter_tier, self._holder, self.activations, self._outer)
        held = self._store.held_bytes() | self._wire.held_bytes()
        return report_memory(self.model, self.buckets, held, self.optimizers, self.sharded, places, self.device)

    def dtype_report(self) -> DtypeReport:
        """What parameters, gradients on their way, masters and moments are held in."""
        return report_dtypes(self.buckets, self.config, [sharded.optimizer for sharded in self.optimizers])

    def comm_report(self) -> CommReport:
        """Calls, bytes sent in and between nodes, and waits, by kind of collective, since the engine was built."""
        rows = self.transport.ledger.rows()
        return CommReport(rows=rows, gradient_error=self._wire.reduction.error, trials=self._trials)

    # ---- moving in and out ----

    def state_rows(self) -> Iterator[StateRow]:
        """This rank's masters and optimizer state, row by row, for a checkpoint."""
        yield from state_rows(self.optimizers, list(self._row_of.values()), self._holder, self._outer.replica)
        yield from self._outer.rows()

    def residual_rows(self) -> Iterator[StateRow]:
        """What this rank has not sent of its gradients (error feedback), copied; rows of whole parameters."""
        return self._wire.reduction.rows()

    def state_scalars(self) -> dict[str, dict[str, object]]:
        """Optimizer state of this rank's rows that is one value for a whole parameter (`step`)."""
        return state_scalars(self.optimizers, list(self._row_of.values()), self._holder)

    def fill_state(
        self,
        read: Callable[[str, str, Interval], torch.Tensor],
        kinds_of: Callable[[str], Sequence[str]],
        scalars_of: Callable[[str], dict[str, object]],
    ) -> None:
        """Replaces what `state_rows` and `residual_rows` give, after parameters are loaded; arguments: see `fill_rows`."""
        self._follow_edits()
        self._wire.reduction.fill(self.buckets, read, kinds_of)
        rows, replica = list(self._row_of.values()), self._outer.replica
        fill_rows(self.optimizers, rows, read, kinds_of, scalars_of, self._holder, replica)
        self._outer.fill(read, kinds_of)
        self._row_writes.follow(self.buckets)

    def parameters_in_buckets(self) -> list[nn.Parameter]:
        """All that `own_weights` hands out parts of, on some rank."""
        return [slot.parameter for bucket in self._all_buckets for slot in bucket.slots]

    def own_weights(self) -> Iterator[OwnWeights]:
        """This rank's part of the model's parameters as they are now; each element of those in buckets is on one rank."""
        return own_weights(self._all_buckets, self.groups, self._holder)

    def load_weights(self, read: Callable[[nn.Parameter, Interval], torch.Tensor]) -> None:
        """Replaces this rank's part of the model; `read` gives runs of parameters. `share_weights` has to follow."""
        self.finish_parameters()
        load_weights(self._all_buckets, self._holder, read)

    def share_weights(self) -> None:
        """Sends the loaded parts to ranks that hold parameters whole. Collective."""
        self._outer.start_from_masters()
        self._share(self.buckets)
        self._row_writes.follow(self.buckets)
        self.finish_parameters()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every trained parameter."""
        return {slot.name: tuple(slot.parameter.shape) for slot in self._slot_of.values()}

    def named_groups(self) -> list[tuple[torch.optim.Optimizer, list[list[str]]]]:
        """Each optimizer with the names of the trained parameters in each of its groups, in the user's order."""
        return [(sharded.optimizer, sharded.group_names(self._slot_of)) for sharded in self.optimizers]

    def readopt(self) -> None:
        """Takes back parameters that left their slots (`.to(dtype)`, `load_state_dict(assign=True)`), values and all.

        Raises:
            ValueError: one has another number of elements now; prepare the model anew.
        """
        self.finish_parameters()
        self._homes.take_back()
        self._follow_edits()

    def resize_embeddings(self, num_tokens: int, **kwargs) -> None:
        """`model.resize_token_embeddings` of a model in training: the other parameters' state and the old rows' go on.

        Collective. New rows are rank 0's and start without optimizer state. For its duration, the whole model and its
        whole optimizer state are held in host memory.

        Args:
            num_tokens: of the new vocabulary.
            kwargs: passed on to `resize_token_embeddings`.

        Raises:
            ValueError: the model has no such method.
        """
        if not hasattr(self.model, "resize_token_embeddings"):
            raise ValueError(f"hf_zero: {type(self.model).__name__} has no resize_token_embeddings to call.")
        states = {slot.name: on_host(self.full_state(slot.parameter)) for slot in self._slot_of.values()}
        optimizers, device = [sharded.optimizer for sharded in self.optimizers], self.device
        self.close()
        resize_whole(self.model, optimizers, states, num_tokens, **kwargs)
        self._assemble(optimizers, device)

    def close(self, *, rank0_only: bool = False) -> None:
        """Hands back an ordinary model and optimizer: hooks off, parameters in memory of their own, groups whole.

        The optimizer's state, which only exists in rows, is dropped where it is sharded. Collective.

        Args:
            rank0_only: at stage 3, whole parameters on rank 0 alone; on the others they are on the meta device.
        """
        self.synchronise()
        with self._exact.at_hand("ZeroEngine.close"):
            self._homes.own_memory(spared=self.sharded.unit_of)
        self._gradients.drop()
        for handle in self._handles:
            handle.remove()
        self.sharded.hand_back(wanted=self.groups.rank == 0 or not rank0_only)
        self._holder.close(self.buckets)
        self.parameter_tier.close()
        for optimizer in self.optimizers:
            optimizer.release()
        detach((self.model, self._entry, *self.model.parameters()))

    # ---- how it is put together ----

    def _make_store(self) -> GradientStore:
        most = self.config.grad_buffers if self._holder.steps_early else None
        landing = Landing(downlink=self.tier.downlink, landed=self._landed, most_under_way=most)
        return choose_store(self.buckets, self.config, self._stepping, self._wire.reduction, landing, self._peers)

    def _landed(self, bucket: Bucket, arrival: Arrival) -> None:
        # Under no_sync another backward comes, and adds to what `grad_accumulation: sharded` has reduced.
        if self._no_sync_depth == 0:
            self._holder.landed(bucket, arrival)

    def _bind(self, optimizer: torch.optim.Optimizer, index: int) -> ShardedOptimizer:
        mine = [bucket for bucket in self.buckets if bucket.key.optimizer == index]
        sharded = ShardedOptimizer(
            optimizer,
            rows=self._row_of,
            trained=set(self._slot_of),
            identity=identity_of(self.groups, self.config.stage, self.buckets),
            before_step=lambda: self._before_step(optimizer, mine),
            after_step=lambda: self._after_step(mine),
            holder=self._holder,
        )
        self._holder.step_with(optimizer, mine)
        return sharded

    def _hook_forward(self, entry: nn.Module) -> list:
        self._waits_at_the_root = is_compiled(entry) or caches_parameters(self.model)
        return [
            entry.register_forward_pre_hook(WeakHook(self, ZeroEngine._before_forward)),
            entry.register_forward_hook(WeakHook(self, ZeroEngine._after_forward), with_kwargs=True, always_call=True),
        ]

    def _before_forward(self, _module: nn.Module, _args: tuple) -> None:
        if torch._C._current_graph_task_id() != -1 or self.sharded.whole.is_lent:
            # Activation checkpointing runs the forward again inside backward; a saver calls it on one rank.
            return
        self._row_writes.refuse_unsent("a forward begins")
        self._gradients.recover()
        self.tier.cores.give_back()
        self._holder.before_forward()
        self.sharded.before_forward()
        if self._waits_at_the_root:
            self._parameters.finish_all()
        self._buffers.before_forward()
        if torch.is_grad_enabled():
            flats = (bucket.flat for bucket in self._all_buckets)
            self.activations.begin(chain(self.model.buffers(), self._slot_of, self._homes.frozen, flats))

    def _after_forward(self, _module: nn.Module, args: tuple, kwargs: dict, outputs: object) -> None:
        self.activations.end()
        self.sharded.after_forward(outputs)
        if torch.is_grad_enabled():
            self._gradients.end.watch(outputs)
            self._buffers.after_forward(under_no_sync=self._no_sync_depth > 0)

    def _before_step(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        self._end_reads()
        self._gradients.refuse_unreduced()
        self._homes.before_step()
        for bucket in buckets:
            bucket.begin_step()
        self.nonfinite.refuse_unscaled(optimizer, buckets)
        if self.nonfinite.is_due(optimizer):
            self.clip_grad_norm_(float("inf"))
        self.nonfinite.end(optimizer)
        self.tier.cores.take()

    def _end_reads(self) -> None:
        # The last gathers still send from the shards that the optimizer is about to write.
        self._parameters.finish_all()
        self.sharded.schedule.reshard_all()

    def _follow_edits(self) -> None:
        for bucket in self.buckets:
            with self._holder.at_hand(bucket):
                bucket.follow_edits()
        self._exact.put_back()

    def _after_step(self, buckets: Sequence[Bucket]) -> None:
        self._holder.after_step(buckets)
        self.tier.cores.give_back()
        for bucket in self._outer.after_step(buckets):
            bucket.write_back()
        for bucket in (bucket for bucket in buckets if not bucket.whole):
            bucket.end_step()
            self._store.release(bucket)
        self._buffers.after_step()
        self._share(reversed(buckets))
        self._row_writes.follow(buckets)
        if not self.config.overlap_param_gather:
            self._parameters.finish_all()
        self.parameter_tier.end_step()

    def _share(self, buckets: Iterable[Bucket]) -> None:
        if not self._is_replicated:
            self._parameters.start(bucket for bucket in buckets if isinstance(bucket.memory, WholeMemory))
            self._parameters.guard()
