"""Builds the parts of an engine, once all ranks agree on the model, the optimizers and the config."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..arithmetic.flat import uses_kernels
from ..buckets.bucket import Bucket
from ..buckets.memory import UnshardedMemory
from ..buckets.packed import add_scales, take_out_scales
from ..comm.all_or_none import all_or_none
from ..comm.transport import Transport
from ..config import ConfigError, OffloadConfig, ZeroConfig
from ..extras import extra
from ..offload.activations import ActivationsInHostMemory
from ..offload.choice import Placement, choose_tiers
from ..offload.shards import ParameterTier
from ..offload.tiers import Tier
from ..optimizer.replicas import ReplicaCheck
from ..optimizer.storage import OptimizerStorage, StepChoice
from ..optimizer.storage_choice import StorageChoice
from ..stage3.sharded_model import ShardedModel
from ..stage3.unit import Unit
from ..stage3.unsharding import Unsharding
from ..step.nonfinite import NonFiniteCheck
from ..step.norm import GradientNorm, choose_norm
from ..step.parameter_gather import ParameterGather
from .agreed_start import agree_to_start
from .buffers import ModelBuffers, broadcast_buffers, has_buffers, ignored_parameters, move_buffers
from .builder import BucketBuilder
from .division import Division, SplitKinds, owners, shards_parameters
from .exact_weights import ExactWeights
from .models import models_in
from .parameter_places import ParameterPlaces
from .parts import Parts
from .room import bytes_elsewhere, has_room_to_step, refuse_unless_it_fits, reshards_after_forward
from .split_model import CopyChecks, Mesh, SplitModel
from .unsupported import check_parameters, refuse_renormed_embeddings, refuse_shared_storage, refuse_with_split_models
from .wire import choose_wire


def choose_storage(
    config: ZeroConfig,
    tier: Tier,
    optimizers: Sequence[torch.optim.Optimizer],
    transport: Transport,
    *,
    nonfinite: NonFiniteCheck,
) -> OptimizerStorage:
    """Chooses the storage of optimizer state in this tier, and how it is stepped.

    Args:
        nonfinite: checks the gradients before a step.
    """
    stored = StorageChoice(config, tier, optimizers)
    return OptimizerStorage(
        choose_state=stored.of,
        choice=_choose_steps(config, tier, nonfinite),
        files=tier.files,
        transport=transport,
        window=tier.window,
    )


def _choose_steps(config: ZeroConfig, tier: Tier, nonfinite: NonFiniteCheck) -> StepChoice:
    if not uses_kernels(config.kernels, tier.device):
        return StepChoice()
    # A function, because each check of the gradients sets a new tensor as `found_inf`.
    return extra("kernels", "KernelSteps")(lambda: nonfinite.found_inf)


def assemble(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
    device: torch.device | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Parts:
    """Moves a model into buckets, and builds the parts of its engine. Collective.

    Args:
        device: see `ZeroEngine`.
        on_progress: see `ZeroEngine`.

    Raises:
        ValueError, ConfigError, MemoryError, OSError: the model cannot be trained with these settings. Raised on every rank.
    """
    if config.is_open:
        raise ConfigError(
            "hf_zero config: `stage: auto` works only with accelerate and Trainer, which choose the stage before they build an "
            "engine. Pass ZeroEngine a stage (0, 1, 2, 3), such as the one that `hf-zero plan` recommends."
        )
    if config.report:
        raise ConfigError(
            "hf_zero config: `report` works only with accelerate and Trainer. In a loop around ZeroEngine, remove it and "
            'write `with hf_zero.RunRecorder(engine, "runs/first"):` around the loop.'
        )
    check_parameters(model, config)
    refuse_shared_storage(model)
    refuse_renormed_embeddings(model, config)
    # After the checks, because `SplitModel` replaces the model's DTensors by plain parameters, and an error must restore them.
    split = SplitModel(model, optimizers)
    try:
        refuse_with_split_models(model, split, config, optimizers)
        return _assemble(model, optimizers, config, device, split, on_progress)
    except Exception:
        # Restore the script's parameters, because the script may catch the error and try again.
        take_out_scales(model)
        split.restore()
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
    is_moved = device is not None
    config, device, mesh = agree_to_start(model, optimizers, config, device, split)
    all_groups, transport = mesh.dp.all_groups, mesh.dp.all_transport
    if is_moved or config.stage == 3:
        move_buffers(model, device)
    broadcast_buffers(model, transport, device)
    on_device = has_room_to_step(config, owner, optimizers, device, mesh)
    tier, parameter_tier = _choose_tiers(config.offload, device, mesh.world, steps_on_device=on_device)
    needed = bytes_elsewhere(model, config, tier, parameter_tier, owner, optimizers, mesh)
    # Before the first bucket, because afterwards parts of the model have moved, and the script could not continue.
    refuse_unless_it_fits(config, needed, mesh.world)
    nonfinite = NonFiniteCheck(model, config, mesh.agreement, mesh.dp.transport, speaks=all_groups.is_first_of_run)
    storage = choose_storage(config, tier, optimizers, transport, nonfinite=nonfinite)
    wire = choose_wire(config, mesh.dp.groups, device)
    kinds = SplitKinds(parts=split.parts, experts=split.experts, expert_shards=mesh.expert_dp.groups.shard_size)
    # Before the division, which handles only parameters. Otherwise the scales would stay whole on each rank.
    if shards_parameters(config, all_groups):
        add_scales(model)
    division = Division(model, owner, optimizers, config, all_groups, device=device, align=wire.align, split=kinds)
    trained_numel = sum(parameter.numel() for parameter in owner)
    builder = BucketBuilder(
        config=config,
        mesh=mesh,
        wire=wire,
        device=device,
        placement=Placement(tier, device, ratio=config.offload.ratio, trained_numel=trained_numel),
        parameter_tier=parameter_tier,
        storage=storage,
        on_progress=on_progress,
    )
    all_buckets, of_units = builder.build(model, division)
    schedule = Unsharding(
        Unit((), of_units.get((), ())),
        [Unit(modules, buckets) for modules, buckets in of_units.items() if modules],
        wire=wire,
        prefetch=config.prefetch_units,
        reshard_after_forward=reshards_after_forward(config, model, device, transport),
        transport=mesh.dp.transport if split.is_empty else mesh.world,
    )
    buckets = [bucket for bucket in all_buckets if bucket.trained]
    row_of = {row.slot.parameter: row for bucket in buckets for row in bucket.rows}
    unsharded = [bucket for bucket in buckets if isinstance(bucket.memory, UnshardedMemory)]
    is_shared = config.broadcast_buffers and mesh.dp.groups.world_size > 1
    copies = None if split.is_empty else CopyChecks(split, mesh.world, mesh.tp, all_buckets)
    return Parts(
        config=config,
        device=device,
        mesh=mesh,
        groups=mesh.dp.groups,
        split=split,
        tier=tier,
        parameter_tier=parameter_tier,
        nonfinite=nonfinite,
        storage=storage,
        wire=wire,
        all_buckets=all_buckets,
        buckets=buckets,
        slot_of={slot.parameter: slot for bucket in buckets for slot in bucket.slots},
        row_of=row_of,
        scopes=division.scopes,
        sharded=ShardedModel(model, schedule, transport, storage, config, device=device),
        outer=None
        if all_groups.outer is None
        else extra("wire", "SyncedEvery")(transport, all_groups.outer, config.comm, buckets, storage.fetched_master),
        # Buffers are equal on ranks that step together: with `comm.sync_every`, each group has its own until the outer step.
        model_buffers={
            each: ModelBuffers(each, mesh.dp.transport, device)
            for each in models_in(model)
            if is_shared and has_buffers(each)
        },
        parameter_gather=ParameterGather(model, unsharded, wire.gather),
        exact=ExactWeights(unsharded, wire.exact, storage, transport, config.comm.meeting_timeout_s),
        parameter_places=ParameterPlaces(model, all_buckets),
        activations=ActivationsInHostMemory(device) if config.offload.activations == "cpu" else None,
        replicas=_replica_check(model, all_buckets, storage, parameter_tier, mesh, config)
        if config.check_replicas_every
        else None,
        copies=copies,
        norm=_choose_norm(mesh, config, device, buckets, copies),
    )


def _replica_check(
    model: nn.Module,
    all_buckets: Sequence[Bucket],
    storage: OptimizerStorage,
    parameter_tier: ParameterTier,
    mesh: Mesh,
    config: ZeroConfig,
) -> ReplicaCheck:
    world = mesh.dp.all_groups.world
    return ReplicaCheck(
        config.check_replicas_every,
        all_buckets,
        _frozen_whole(model, all_buckets),
        storage,
        mesh.dp.transport,
        world.ranks[world.index],
        mesh.copies_of,
        has_copies=max(group.groups.replicate.size for group in (mesh.dp, mesh.expert_dp)) > 1,
        weights_in_files=parameter_tier.files is not None,
    )


def _choose_norm(
    mesh: Mesh, config: ZeroConfig, device: torch.device, buckets: Sequence[Bucket], copies: CopyChecks | None
) -> GradientNorm:
    counted = None
    if copies is not None:
        # If experts are split over more ranks, the norm is over all ranks, and only one rank counts each gradient.
        is_among_all = bool(mesh.split.experts)
        counted = frozenset(
            slot.name
            for bucket in buckets
            if bucket.group.is_first or not is_among_all
            for slot in bucket.slots
            if copies.is_first_with(slot.name)
        )
    return choose_norm(config, buckets, mesh.agreement, device=device, counted=counted)


def _frozen_whole(model: nn.Module, all_buckets: Sequence[Bucket]) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters in no bucket, which are whole and equal on every rank."""
    held = {slot.parameter for bucket in all_buckets for slot in bucket.slots} | ignored_parameters(model)
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter not in held]


def _choose_tiers(
    config: OffloadConfig, device: torch.device, transport: Transport, *, steps_on_device: bool
) -> tuple[Tier, ParameterTier]:
    """Like `choose_tiers`, and raises the first failing rank's `ConfigError` on every rank. Collective."""
    return all_or_none(
        transport.exchange,
        lambda: choose_tiers(config, device, steps_on_device=steps_on_device),
        expected=(ConfigError,),
        error=lambda _, reason: ConfigError(reason),
    )
