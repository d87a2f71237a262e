"""Builds the parts of an engine, once all ranks agree on the model, the optimizers and the config."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..arithmetic.flat import give_up_triton, runs_triton, uses_kernels
from ..buckets.bucket import Bucket, ParameterSlot, Row, unsharded
from ..buckets.memory import UnshardedMemory
from ..buckets.packed import add_scales, shapes_beside, take_out_scales
from ..buckets.unread_weights import wanted_dtype
from ..comm.all_or_none import Exchange, all_or_none, first_difference
from ..comm.groups import Groups, with_time_limits
from ..comm.transport import Transport
from ..config import AUTO, ConfigError, OffloadConfig, ZeroConfig
from ..config.zero import by_name
from ..device import with_index
from ..extras import extra
from ..offload.activations import ActivationsInHostMemory
from ..offload.choice import Placement, choose_tiers
from ..offload.shards import ParameterTier
from ..offload.tiers import Tier
from ..optimizer.replicas import ReplicaCheck
from ..optimizer.shared_settings import SharedSettings
from ..optimizer.storage import OptimizerStorage, StepChoice
from ..optimizer.storage_choice import StorageChoice
from ..optimizer.trial import Finding
from ..stage3.sharded_model import ShardedModel
from ..stage3.unit import Unit
from ..stage3.unsharding import Unsharding
from ..step.nonfinite import NonFiniteCheck
from ..step.norm import GradientNorm, choose_norm
from ..step.parameter_gather import ParameterGather
from .buffers import ModelBuffers, broadcast_buffers, has_buffers, ignored_parameters, place_buffers
from .builder import BucketBuilder
from .division import Division, SplitKinds, owners, shards_parameters
from .exact_weights import ExactWeights
from .models import models_in
from .parameter_places import ParameterPlaces
from .room import bytes_elsewhere, has_room_to_step, refuse_unless_it_fits, reshards_after_forward
from .split_model import CopyChecks, Mesh, SplitModel
from .unsupported import check_parameters, refuse_beside_split, refuse_renormed_embeddings, refuse_shared_storage
from .wire import Wire, choose_wire


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


# The agreements at the start: all ranks train the same model with the same settings, and all use kernels or none does.

_START = "start of an engine"

FILES_ATTRIBUTE = "_hf_zero_files"
"""Attribute of a model whose weights are still in files: a description of the files."""


def describe(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
) -> dict[str, str]:
    """Returns everything on which the ranks must agree, as a dict from subject to a readable value."""
    facts = _settings(config)
    files = [each.__dict__.get(FILES_ATTRIBUTE, "none") for each in models_in(model)]
    facts["files of the weights"] = ", ".join(files)
    named_parameters = list(model.named_parameters())
    ignored = ignored_parameters(model)
    # Parameters left to each rank may differ even in shape and dtype.
    facts["parameters that DDP would ignore"] = repr([name for name, p in named_parameters if p in ignored])
    for name, p in ((name, p) for name, p in named_parameters if p not in ignored):
        held = "trained" if p.requires_grad else "frozen"
        facts[f"parameter {name}"] = f"shape {tuple(p.shape)}, {wanted_dtype(p)}, {held}"
    # A hash instead of all names, because an error shows the value, and a model has thousands of names.
    facts["order of parameters"] = hashlib.sha256(json.dumps([n for n, _ in named_parameters]).encode()).hexdigest()[
        :16
    ]
    facts["scales beside packed weights"] = hashlib.sha256(repr(shapes_beside(model)).encode()).hexdigest()[:16]
    for index, optimizer in enumerate(optimizers):
        sizes = [sum(p.numel() for p in group["params"] if p not in ignored) for group in optimizer.param_groups]
        facts[f"optimizer {index}"] = f"{type(optimizer).__name__} over groups of {sizes} elements"
    settings = SharedSettings(optimizers)
    settings.digest()
    return facts | settings.facts() | dict(_module_settings(model))


def _settings(config: ZeroConfig) -> dict[str, str]:
    """Returns the config setting by setting, because errors show a single fact."""
    return {f"the setting `{name}`": str(value) for name, value in by_name(config).items()}


def _module_settings(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields settings of modules: all float attributes of torch's modules (eps, p), and dropout probabilities of other modules.

    Other float attributes of other modules may differ between ranks, for example a time.
    """
    for name, module in model.named_modules():
        is_of_torch = type(module).__module__.startswith("torch.nn.")
        for attribute, value in vars(module).items():
            if isinstance(value, float) and (is_of_torch or "drop" in attribute):
                yield f"{attribute} of {name or 'the model'} ({type(module).__name__})", repr(value)


def refuse_disagreement(facts: dict[str, str], exchange: Exchange) -> None:
    """Raises `ValueError` on every rank if the facts differ, with the first difference from rank 0. Collective."""
    difference = first_difference(exchange, facts)
    if difference is not None:
        raise ValueError(
            f"hf_zero: the ranks do not train the same thing. {difference}. Build model, optimizer and config the same way on "
            "every rank (seed, config, data and settings)."
        )


def with_kernels_that_run(config: ZeroConfig, groups: Groups, transport: Transport, device: torch.device) -> ZeroConfig:
    """Returns the config with `kernels: never` if any rank cannot launch kernels. Collective.

    Kernels add in a different order than torch, so all ranks must use them, or none.

    Raises:
        ConfigError: some rank cannot launch kernels, and the config has `kernels: always`.
    """
    faults = transport.exchange(extra("kernels", "launch_fault")(device) if runs_triton(device) else None)
    found = [(rank, fault) for rank, fault in enumerate(faults) if fault is not None]
    if not found:
        return config
    rank, fault = found[0]
    what = f"triton cannot launch a kernel on rank {rank} ({fault})"
    remedy = (
        "Triton compiles at the first launch, with a C compiler, Python's headers (python3-dev) and a cache to write to"
    )
    if config.kernels == "always":
        raise ConfigError(f"hf_zero: `kernels: always`, but {what}. {remedy}; or use `kernels: auto`.")
    give_up_triton(device)
    if groups.is_first_of_run:
        print(f"hf_zero: {what}; torch's operations do what kernels would. {remedy}.", file=sys.stderr, flush=True)
    return replace(config, kernels="never") if config.kernels == AUTO else config


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of an engine.

    Attributes:
        config: the config, in which each `auto` that is tried before training has a value.
        device: the training device, with its index.
        all_buckets: the buckets of trained and frozen parameters, by their index.
        buckets: the buckets of trained parameters.
        slot_of: the slot of every trained parameter in its bucket.
        row_of: this rank's row of each trained parameter with elements on this rank.
        scopes: for each optimizer, whether its parameters may be cut, and the reason.
        copies: checks of the model's copies; None unless the model is split over ranks.
        model_buffers: the broadcast buffers of each model; empty if each rank keeps its own.
        activations: None if activations stay on the device.
        replicas: None unless `check_replicas_every` is set.
        outer: `SyncedEvery` of the extra `wire`; None if all ranks run each step together.
    """

    config: ZeroConfig
    device: torch.device
    mesh: Mesh
    groups: Groups
    split: SplitModel
    tier: Tier
    parameter_tier: ParameterTier
    nonfinite: NonFiniteCheck
    storage: OptimizerStorage
    wire: Wire
    all_buckets: list[Bucket]
    buckets: list[Bucket]
    slot_of: dict[nn.Parameter, ParameterSlot]
    row_of: dict[nn.Parameter, Row]
    scopes: list[Finding]
    sharded: ShardedModel
    outer: Any
    model_buffers: dict[nn.Module, ModelBuffers]
    parameter_gather: ParameterGather
    exact: ExactWeights
    parameter_places: ParameterPlaces
    activations: ActivationsInHostMemory | None
    norm: GradientNorm
    replicas: ReplicaCheck | None
    copies: CopyChecks | None

    def end_reads(self) -> None:
        """Ends all reads of rows before a write: gathers that send from the shards, and copies that read the masters."""
        self.parameter_gather.finish_all()
        if self.tier.is_apart:
            self.tier.h2d.wait()
        if not self.sharded.is_empty:
            self.sharded.schedule.reshard_all()

    def send(self, buckets: Iterable[Bucket]) -> None:
        """Starts sending this rank's part of some buckets to the ranks with whole parameters."""
        if self.groups.shard_size > 1:
            self.parameter_gather.start(unsharded(buckets))


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
    # After the checks, because `SplitModel` replaces the model's DTensors by plain parameters, and an error must restore them.
    split = SplitModel(model, optimizers)
    try:
        refuse_beside_split(model, split, config, optimizers)
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
    home, facts = device, describe(model, optimizers, config)
    device = with_index(home or next(model.parameters()).device)
    config = replace(config, comm=with_time_limits(config.comm, device.type))
    mesh = Mesh.create(split, config, device)
    all_groups, transport, world = mesh.dp.all_groups, mesh.dp.all_transport, mesh.world
    # Before anything moves, because different ranks would hang in their first collective without an error.
    # All ranks compare only settings, because parts of a split model have different shapes.
    if not split.is_empty:
        refuse_disagreement(_settings(config), partial(world.exchange, purpose=_START))
    refuse_disagreement(facts, partial(transport.exchange, purpose=_START))
    # All ranks use kernels or none does, because kernels add in a different order than torch.
    config = with_kernels_that_run(config, all_groups, transport, device)
    if home is not None or config.stage == 3:
        place_buffers(model, device)
    broadcast_buffers(model, transport, device)
    on_device = has_room_to_step(config, owner, optimizers, device, mesh)
    tier, parameter_tier = _choose_tiers(config.offload, device, world, steps_on_device=on_device)
    needed = bytes_elsewhere(model, config, tier, parameter_tier, owner, optimizers, mesh)
    # Before the first bucket, because afterwards parts of the model have moved, and the script could not continue.
    refuse_unless_it_fits(config, needed, world)
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
        transport=mesh.dp.transport if split.is_empty else world,
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
        mesh.place_of,
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
