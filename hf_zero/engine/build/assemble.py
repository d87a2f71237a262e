"""Builds the parts of an engine from a model, its optimizers and the config."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...buckets.bucket import Bucket, ParameterSlot, Row
from ...buckets.memory import UnshardedMemory
from ...comm.all_or_none import all_or_none
from ...comm.groups.groups import with_time_limits
from ...comm.transport import Transport
from ...config import ConfigError, OffloadConfig, ZeroConfig
from ...device import with_index
from ...offload.activations import Activations
from ...offload.choose import Placement, choose_activations, choose_tiers
from ...offload.parameter_shards import ParameterTier
from ...offload.tier import Tier
from ...optimizer.state.holder import StateHolder
from ...optimizer.state.replicas import ReplicaCheck
from ..gradients.nonfinite import NonFiniteCheck
from ..gradients.norm import GradientNorm, choose_norm
from ..travel.buffers import ModelBuffers, ignored_parameters, start_buffers
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
from .agreement import describe, refuse_disagreement, with_kernels_that_run
from .bucket_builder import BucketBuilder
from .bucketing import Division, SplitKinds, check_parameters, owners
from .holders import bytes_elsewhere, choose_holder, refuse_unless_it_fits, reshards_after_forward
from .mesh import Mesh
from .refusals import refuse_beside_split, refuse_renormed_embeddings, refuse_shared_storage


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an engine is made of.

    Attributes:
        config: with a value for each `auto` that is tried before training.
        device: that the model is trained on, with its index.
        all_buckets: of trained and of frozen parameters, in the order of their numbers.
        buckets: those of trained parameters.
        slot_of: every trained parameter's place in its bucket.
        row_of: this rank's part of a trained parameter, for those that it has any of.
        copies: None, unless the model is split over ranks.
    """

    config: ZeroConfig
    device: torch.device
    mesh: Mesh
    tier: Tier
    parameter_tier: ParameterTier
    nonfinite: NonFiniteCheck
    holder: StateHolder
    wire: Wire
    all_buckets: list[Bucket]
    buckets: list[Bucket]
    slot_of: dict[nn.Parameter, ParameterSlot]
    row_of: dict[nn.Parameter, Row]
    sharded: ShardedModel
    outer: OuterSteps
    model_buffers: ModelBuffers
    parameter_gather: ParameterGather
    exact: ExactWeights
    parameter_places: ParameterPlaces
    activations: Activations
    norm: GradientNorm
    replicas: ReplicaCheck
    copies: CopyChecks | None


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
    home, facts = device, describe(model, optimizers, config)
    device = with_index(home or next(model.parameters()).device)
    config = replace(config, comm=with_time_limits(config.comm, device.type))
    mesh = Mesh.create(split, config, device)
    all_groups, transport, world = mesh.dp.all_groups, mesh.dp.all_transport, mesh.world
    if not split.is_empty:
        refuse_disagreement({"config": facts["config"]}, world)
    refuse_disagreement(facts, transport)
    config = with_kernels_that_run(config, all_groups, transport, device)
    start_buffers(model, transport, device, placed=home is not None or config.stage == 3)
    tier, parameter_tier = _choose_tiers(config.offload, device, world)
    needed = bytes_elsewhere(model, config, tier, parameter_tier, owner, optimizers, mesh)
    refuse_unless_it_fits(config, needed, world)
    nonfinite = NonFiniteCheck(config, mesh.agreement)
    holder = choose_holder(config, tier, optimizers, transport, nonfinite=nonfinite, needed=needed)
    wire = choose_wire(config, mesh.dp.groups, device)
    kinds = SplitKinds(parts=split.parts, experts=split.experts, expert_shards=mesh.expert_dp.groups.shard_size)
    division = Division(model, owner, optimizers, config, all_groups, device=device, align=wire.align, split=kinds)
    trained_numel = sum(parameter.numel() for parameter in owner)
    builder = BucketBuilder(
        config=config,
        mesh=mesh,
        wire=wire,
        device=device,
        placement=Placement(tier, device, ratio=config.offload.ratio, trained_numel=trained_numel),
        parameter_tier=parameter_tier,
        adopt=_adopting(model, holder, on_progress),
    )
    all_buckets, of_units = builder.build(model, division)
    schedule = Unsharding(
        Unit((), of_units.get((), ())),
        [Unit(modules, buckets) for modules, buckets in of_units.items() if modules],
        wire=wire,
        prefetch=config.prefetch_units,
        reshard_after_forward=reshards_after_forward(config, model, device, transport),
    )
    buckets = [bucket for bucket in all_buckets if bucket.trained]
    row_of = {row.slot.parameter: row for bucket in buckets for row in bucket.rows}
    unsharded = [bucket for bucket in buckets if isinstance(bucket.memory, UnshardedMemory)]
    is_shared = config.broadcast_buffers and mesh.dp.groups.world_size > 1
    copies = None if split.is_empty else CopyChecks(split, world, mesh.tp, all_buckets)
    return Parts(
        config=config,
        device=device,
        mesh=mesh,
        tier=tier,
        parameter_tier=parameter_tier,
        nonfinite=nonfinite,
        holder=holder,
        wire=wire,
        all_buckets=all_buckets,
        buckets=buckets,
        slot_of={slot.parameter: slot for bucket in buckets for slot in bucket.slots},
        row_of=row_of,
        sharded=ShardedModel(model, schedule, transport, holder, config, device=device),
        outer=choose_outer(transport, all_groups.outer, config.comm, buckets, holder.at_hand),
        model_buffers=ModelBuffers(model, mesh.dp.transport, device, wanted=is_shared),
        parameter_gather=ParameterGather(model, unsharded, wire.gather),
        exact=ExactWeights(unsharded, wire.exact, holder, transport, config.comm.meeting_timeout_s),
        parameter_places=ParameterPlaces(model, all_buckets),
        activations=choose_activations(config.offload, device),
        replicas=_replica_check(model, all_buckets, holder, mesh, config),
        copies=copies,
        norm=_choose_norm(mesh, config, device, buckets, copies),
    )


def _replica_check(
    model: nn.Module, all_buckets: Sequence[Bucket], holder: StateHolder, mesh: Mesh, config: ZeroConfig
) -> ReplicaCheck:
    world = mesh.dp.all_groups.world
    return ReplicaCheck(
        config.check_replicas_every,
        all_buckets,
        _frozen_whole(model, all_buckets),
        holder,
        mesh.dp.transport,
        world.ranks[world.place],
        mesh.place_of,
        has_copies=max(group.groups.replicate.size for group in (mesh.dp, mesh.expert_dp)) > 1,
    )


def _choose_norm(
    mesh: Mesh, config: ZeroConfig, device: torch.device, buckets: Sequence[Bucket], copies: CopyChecks | None
) -> GradientNorm:
    # With experts apart all ranks agree, and of those that hold the same gradient one counts it.
    is_among_all = bool(mesh.split.experts)

    def counts(row: Row) -> bool:
        is_first_of_copy = copies is None or copies.is_first_with(row.slot.name)
        return is_first_of_copy and (row.slot.bucket.group.is_first or not is_among_all)

    return choose_norm(config, buckets, mesh.agreement, device=device, counts=None if copies is None else counts)


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
