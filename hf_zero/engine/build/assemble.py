"""Builds the parts of an engine from a model, its optimizers and the config."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...buckets.bucket import Bucket, ParameterSlot, Row
from ...buckets.memory import UnshardedMemory
from ...comm.all_or_none import all_or_none
from ...comm.choose import choose_step_transport, choose_transport
from ...comm.groups.groups import Groups, with_time_limits
from ...comm.ledger import Ledger
from ...comm.local import LocalTransport
from ...comm.model_copies import Agreement, ModelCopies
from ...comm.transport import Transport
from ...config import CommConfig, ConfigError, OffloadConfig, ZeroConfig
from ...device import with_index
from ...offload.activations import Activations
from ...offload.choose import Placement, choose_activations, choose_tiers
from ...offload.parameter_shards import ParameterTier
from ...offload.tier import Tier
from ...optimizer.state.full_tensors import FullTensors
from ...optimizer.state.holder import StateHolder
from ...optimizer.state.replicas import ReplicaCheck
from ..gradients.nonfinite import NonFiniteCheck
from ..gradients.norm import GradientNorm, choose_norm
from ..travel.buffers import ModelBuffers, ignored_parameters, start_buffers
from ..travel.expert_wire import wire_with_experts
from ..travel.in_flight import ParameterGather
from ..travel.outer import OuterSteps, choose_outer
from ..travel.wire import Wire, choose_wire
from ..units.copy_checks import CopyChecks
from ..units.exact_weights import ExactWeights
from ..units.parameter_places import ParameterPlaces
from ..units.schedule import Unsharding
from ..units.sharded_model import ShardedModel
from ..units.split_model import SplitModel
from ..units.unit import Unit
from .agreement import describe, refuse_disagreement
from .beside_split import refuse_beside_split
from .bucket_builder import BucketBuilder
from .bucketing import Division, SplitKinds, check_parameters, owners
from .holders import bytes_elsewhere, choose_holder, refuse_unless_it_fits, reshards_after_forward
from .kernels_that_run import with_kernels_that_run
from .renormed_embeddings import refuse_renormed_embeddings
from .shared_storage import refuse_shared_storage
from .sharers import Sharers, SharersOfKinds


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The ranks of a run, and what they have agreed on before anything is moved.

    Attributes:
        config: with a value for each `auto` that is tried before training.
        transport: between the ranks that share one copy of the state.
        peers: the ranks that take a step together.
        step_transport: between those.
        device: that the model is trained on, with its index.
        split: the model's parameters of which a rank has a part, by tensor or expert parallelism.
        sharers: which ranks share the state of which parameters: those of `groups`, but for experts that are split over more
            ranks than compute a batch together.
        run: all ranks of the run; `groups`, unless the model is split.
        everyone: between those.
        together: between the ranks that compute a batch together; this rank alone, unless the model is split.
        copy: between the ranks that hold one copy of the model together; `together`, but for such experts.
    """

    config: ZeroConfig
    groups: Groups
    transport: Transport
    peers: Groups
    step_transport: Transport
    device: torch.device
    split: SplitModel
    sharers: SharersOfKinds
    run: Groups
    everyone: Transport
    together: Transport
    copy: Transport

    @property
    def is_replicated(self) -> bool:
        """Whether each rank holds whole rows, as under DDP."""
        return self.groups.shard_size == 1

    @property
    def not_counted(self) -> str:
        """Which traffic of training is the model's own and in no report, in words; "" where there is none."""
        if self.split.is_empty:
            return ""
        copies = self.run.world_size // len(self.split.copy_ranks)
        between = (
            f"between the {copies} copies of the model"
            if copies == self.groups.world_size
            else "of state and gradients"
        )
        return (
            f"These are hf_zero's, {between}. What ranks {list(self.split.copy_ranks)} send each other in forward and backward "
            "as one copy (tensor or expert parallel) is the model's own and not counted."
        )

    @property
    def agreement(self) -> Agreement:
        """Between the ranks of which each has its share of a step's gradients."""
        if self.split.experts:
            # Ranks that share the experts are not those that share the rest.
            return Agreement(self.everyone)
        copy = None if self.split.is_empty else self.copy
        return Agreement(self.step_transport, copy, replicated=self.is_replicated)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an engine is made of.

    Attributes:
        all_buckets: of trained and of frozen parameters, in the order of their numbers.
        buckets: those of trained parameters.
        slot_of: every trained parameter's place in its bucket.
        row_of: this rank's part of a trained parameter, for those that it has any of.
        unsharded: the trained buckets whose parameters every rank has.
    """

    meeting: Meeting
    tier: Tier
    parameter_tier: ParameterTier
    nonfinite: NonFiniteCheck
    holder: StateHolder
    wire: Wire
    all_buckets: list[Bucket]
    buckets: list[Bucket]
    slot_of: dict[nn.Parameter, ParameterSlot]
    row_of: dict[nn.Parameter, Row]
    unsharded: list[Bucket]
    sharded: ShardedModel
    outer: OuterSteps
    model_buffers: ModelBuffers
    parameter_gather: ParameterGather
    exact: ExactWeights
    full_tensors: FullTensors
    parameter_places: ParameterPlaces
    activations: Activations
    norm: GradientNorm
    replicas: ReplicaCheck
    copies: CopyChecks


def assemble(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
    device: torch.device | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Parts:
    """Moves a model into buckets and makes what trains it. Collective.

    Args:
        device, on_progress: see `ZeroEngine`.

    Raises:
        ValueError, ConfigError, MemoryError, OSError: it cannot be trained so; on every rank alike.
    """
    if config.is_open:
        raise ConfigError(
            "hf_zero config: `stage: auto` is chosen by accelerate's and Trainer's doors, before there is an engine. Give "
            "ZeroEngine a stage (0, 1, 2, 3), such as `hf-zero plan` recommends."
        )
    if config.report:
        raise ConfigError(
            "hf_zero config: `report` is done by accelerate's and Trainer's doors. In a loop around ZeroEngine, leave it out and "
            'write `with hf_zero.RunRecorder(engine, "runs/first"):` around the loop.'
        )
    check_parameters(model, config)
    refuse_shared_storage(model)
    refuse_renormed_embeddings(model, config)
    split = SplitModel(model, optimizers)
    try:
        refuse_beside_split(split, config, optimizers)
        return _assemble(model, optimizers, config, device, split, on_progress)
    except Exception:
        split.give_back()
        raise


def _assemble(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
    device: torch.device | None,
    split: SplitModel,
    on_progress: Callable[[int, int], None],
) -> Parts:
    owner = owners(model, optimizers)
    meeting = _meet(model, optimizers, config, device, split)
    config, groups, transport, device = meeting.config, meeting.groups, meeting.transport, meeting.device
    tier, parameter_tier = _choose_tiers(config.offload, device, meeting.everyone)
    needed = bytes_elsewhere(model, config, tier, parameter_tier, owner, optimizers, meeting.sharers)
    refuse_unless_it_fits(config, needed, meeting.everyone)
    nonfinite = NonFiniteCheck(config, meeting.agreement)
    holder = choose_holder(config, tier, optimizers, transport, nonfinite=nonfinite, needed=needed)
    wires, sharers = _choose_wires(meeting), meeting.sharers
    wire = wires.of_all
    kinds = SplitKinds(parts=split.parts, experts=split.experts, expert_shards=sharers.experts.groups.shard_size)
    division = Division(model, owner, optimizers, config, groups, device=device, align=wire.align, split=kinds)
    trained_numel = sum(parameter.numel() for parameter in owner)
    builder = BucketBuilder(
        config=config,
        sharers=sharers,
        wire=wires.usual,
        expert_wire=wires.experts,
        device=device,
        placement=Placement(tier, device, ratio=config.offload.ratio, trained_numel=trained_numel),
        parameter_tier=parameter_tier,
        adopt=_adopting(model, holder, on_progress),
    )
    all_buckets, of_units = builder.build(model, division)
    sharded = _sharded_model(model, of_units, meeting, wire, holder)
    buckets = [bucket for bucket in all_buckets if bucket.trained]
    row_of = {row.slot.parameter: row for bucket in buckets for row in bucket.rows}
    unsharded = [bucket for bucket in buckets if isinstance(bucket.memory, UnshardedMemory)]
    is_shared = config.broadcast_buffers and meeting.peers.world_size > 1
    copies = CopyChecks(split, meeting.everyone, meeting.together, all_buckets)
    return Parts(
        meeting=meeting,
        tier=tier,
        parameter_tier=parameter_tier,
        nonfinite=nonfinite,
        holder=holder,
        wire=wire,
        all_buckets=all_buckets,
        buckets=buckets,
        slot_of={slot.parameter: slot for bucket in buckets for slot in bucket.slots},
        row_of=row_of,
        unsharded=unsharded,
        sharded=sharded,
        outer=choose_outer(transport, groups.outer, config.comm, buckets, holder.at_hand),
        model_buffers=ModelBuffers(model, meeting.step_transport, device, wanted=is_shared),
        parameter_gather=ParameterGather(model, unsharded, wire.gather),
        exact=ExactWeights(unsharded, wire.exact, holder, transport, config.comm.meeting_timeout_s),
        full_tensors=FullTensors(
            row_of, sharers.step_transport_of, holder, config.comm, replicated=meeting.is_replicated
        ),
        parameter_places=ParameterPlaces(model, all_buckets),
        activations=choose_activations(config.offload, device),
        replicas=_replica_check(model, all_buckets, holder, meeting),
        copies=copies,
        norm=_choose_norm(meeting, buckets, copies),
    )


@dataclass(frozen=True, kw_only=True)
class _Wires:
    """How buckets travel: the usual ones, those of experts that fewer ranks share, and each bucket by its own."""

    usual: Wire
    experts: Wire
    of_all: Wire


def _choose_wires(meeting: Meeting) -> _Wires:
    usual = choose_wire(meeting.config, meeting.peers, meeting.step_transport, meeting.device)
    if not meeting.split.experts:
        return _Wires(usual=usual, experts=usual, of_all=usual)
    sharers = meeting.sharers.experts
    experts = choose_wire(meeting.config, sharers.groups, sharers.transport, meeting.device)
    return _Wires(usual=usual, experts=experts, of_all=wire_with_experts(usual, experts))


def _replica_check(
    model: nn.Module, all_buckets: Sequence[Bucket], holder: StateHolder, meeting: Meeting
) -> ReplicaCheck:
    world, sharers = meeting.groups.world, meeting.sharers
    replicates = {each.groups.of_a_step().replicate.size for each in (sharers.usual, sharers.experts)}
    return ReplicaCheck(
        meeting.config.check_replicas_every,
        all_buckets,
        _frozen_whole(model, all_buckets),
        holder,
        meeting.step_transport,
        world.ranks[world.place],
        sharers.place_of,
        has_copies=max(replicates) > 1,
    )


def _choose_norm(meeting: Meeting, buckets: Sequence[Bucket], copies: CopyChecks) -> GradientNorm:
    def counts(row: Row) -> bool:
        return meeting.sharers.of(row.slot.bucket).is_first and copies.counted(row)

    counted = None if meeting.split.is_empty else counts if meeting.split.experts else copies.counted
    return choose_norm(meeting.config, buckets, meeting.agreement, device=meeting.device, counts=counted)


def _adopting(
    model: nn.Module, holder: StateHolder, on_progress: Callable[[int, int], None]
) -> Callable[[Bucket], None]:
    """Gives each bucket to `holder`, and tells how much of the model is in buckets."""
    # As they are before: at stage 3 they have no memory afterwards.
    nbytes_of = {parameter: parameter.nbytes for parameter in model.parameters()}
    total, done = sum(nbytes_of.values()), 0

    def adopt(bucket: Bucket) -> None:
        nonlocal done
        holder.adopt(bucket)
        done += sum(nbytes_of.get(slot.parameter, 0) for slot in bucket.slots)
        on_progress(done, total)

    return adopt


def _frozen_whole(model: nn.Module, all_buckets: Sequence[Bucket]) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are in no bucket: every rank has them whole, and alike."""
    held = {slot.parameter for bucket in all_buckets for slot in bucket.slots} | ignored_parameters(model)
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter not in held]


def _choose_tiers(config: OffloadConfig, device: torch.device, transport: Transport) -> tuple[Tier, ParameterTier]:
    """Like `choose_tiers`, and raises the first failing rank's `ConfigError` on every rank. Collective."""
    return all_or_none(
        transport.exchange,
        lambda: choose_tiers(config, device),
        expected=(ConfigError,),
        error=lambda _, reason: ConfigError(reason),
    )


def _sharded_model(
    model: nn.Module,
    of_units: dict[tuple[str, ...], list[Bucket]],
    meeting: Meeting,
    wire: Wire,
    holder: StateHolder,
) -> ShardedModel:
    """The units of stage 3; none below it.

    Args:
        of_units: names of a unit's modules → its buckets; the root has no names.
    """
    config, transport, device = meeting.config, meeting.transport, meeting.device
    schedule = Unsharding(
        Unit((), of_units.get((), ())),
        [Unit(modules, buckets) for modules, buckets in of_units.items() if modules],
        wire=wire,
        prefetch=config.prefetch_units,
        reshard_after_forward=reshards_after_forward(config, model, device, transport),
    )
    return ShardedModel(model, schedule, transport, meeting.sharers.transport_of, holder, config, device=device)


def _meet(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
    device: torch.device | None,
    split: SplitModel,
) -> Meeting:
    placed = with_index(device or next(model.parameters()).device)
    comm = with_time_limits(config.comm, placed.type)
    timeout_s = comm.limit_s
    plain = CommConfig(timeout_s=timeout_s, late_s=comm.late_s, node_size=comm.node_size)
    of_all, everyone, together, copy, alike, alike_experts = None, None, None, None, None, None
    if not split.is_empty:
        # All ranks, and those of a copy, have no state of their own to share: they only agree.
        of_all = Groups.create(stage=1, device_type=placed.type, comm=plain)
        everyone = choose_transport(of_all, placed, timeout_s)
        batches = ModelCopies.of(everyone.exchange(split.ranks, "ranks of a copy of the model"))
        everyone.ledger.watch.log.part = batches.part_in_words(of_all.rank)
        alike, together = batches.alike, _between(batches.copies, placed, plain, everyone.ledger)
        copy = together
        if split.experts:
            copies = ModelCopies.of(everyone.exchange(split.copy_ranks, "ranks of a copy of the experts"))
            alike_experts, copy = copies.alike, _between(copies.copies, placed, plain, everyone.ledger)
    groups = Groups.create(stage=config.stage, device_type=placed.type, comm=config.comm, apart=alike)
    transport = choose_transport(groups, placed, timeout_s, everyone.ledger if everyone else None)
    step_transport = choose_step_transport(transport, groups, placed, timeout_s)
    experts = None
    if alike_experts is not None:
        theirs = Groups.create(stage=config.stage, device_type=placed.type, comm=config.comm, apart=alike_experts)
        between = choose_transport(theirs, placed, timeout_s, transport.ledger)
        experts = Sharers(groups=theirs, transport=between, step_transport=between)
    facts = describe(model, optimizers, config)
    if everyone is not None:
        refuse_disagreement({"config": facts["config"]}, everyone)
    refuse_disagreement(facts, transport)
    # Behind the comparison: process groups of other limits train the same thing.
    config = with_kernels_that_run(replace(config, comm=comm), groups, transport, placed)
    start_buffers(model, transport, placed, placed=device is not None or config.stage == 3)
    usual = Sharers(groups=groups, transport=transport, step_transport=step_transport)
    return Meeting(
        config=config,
        groups=groups,
        transport=transport,
        peers=groups.of_a_step(),
        step_transport=step_transport,
        device=placed,
        split=split,
        sharers=SharersOfKinds(split=split, usual=usual, experts=experts or usual),
        run=of_all or groups,
        everyone=everyone or transport,
        together=together or LocalTransport(transport.ledger),
        copy=copy or LocalTransport(transport.ledger),
    )


def _between(sets: Sequence[Sequence[int]], device: torch.device, comm: CommConfig, ledger: Ledger) -> Transport:
    """A transport between the ranks of each set, who only agree."""
    groups = Groups.create(stage=1, device_type=device.type, comm=comm, apart=tuple(map(sorted, sets)))
    return choose_transport(groups, device, groups.timeout_s, ledger)
