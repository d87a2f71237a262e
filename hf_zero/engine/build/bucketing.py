"""Divides a model's parameters into buckets, by unit, dtype and optimizer group."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

from ...buckets.bucket import Bucket, BucketKey
from ...buckets.bucket_sizes import choose_sizes, least_unit_bytes
from ...buckets.gathered_dtypes import GatheredDtypes
from ...buckets.mapped_parameters import take_from_file, take_rank_0s, wanted_dtype
from ...buckets.memory import ParameterMemory, UnshardedMemory
from ...buckets.offloaded_memory import memory_in
from ...buckets.precision import Precision, resolve_precision, untrained_precision
from ...buckets.shared_memory import memory_of
from ...comm.groups.groups import Groups
from ...comm.transport import Transport
from ...config import ConfigError, ZeroConfig
from ...kernels.checks import FLOAT_DTYPES
from ...kernels.quantise import BlockFormat
from ...layout.blocks import IN_BLOCKS
from ...layout.slots import Alignment, BucketLayout, ParameterSpec, plan_buckets
from ...offload.parameter_shards import ParameterTier
from ...offload.placement import Placement
from ...offload.tier import Tier
from ...optimizer.state.elementwise import keeps_intact
from ..travel.wire import Wire
from ..units.unit_modules import find_unit_modules, group_layers, own_parameters
from .other_engines import refuse_other_engines


def check_parameters(model: nn.Module, config: ZeroConfig) -> None:
    """Raises `ValueError` for a model that cannot be trained, or at stage 3 not sharded."""
    refuse_other_engines(model)
    on_meta = [name for name, p in model.named_parameters() if p.is_meta]
    if on_meta:
        raise ValueError(
            f"hf_zero: {len(on_meta)} parameters are on the meta device and have no values (first: {on_meta[0]!r}). Load "
            "the model with from_pretrained, or build it outside `torch.device('meta')`, before accelerator.prepare."
        )
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained and config.stage < 3:
        raise ValueError(
            "hf_zero: no parameter of the model requires a gradient, so there is nothing to train or shard."
        )
    strange = [(name, p.dtype) for name, p in trained if not p.dtype.is_floating_point]
    if strange:
        raise ValueError(f"hf_zero: {strange[0][0]!r} is trained in {strange[0][1]}; only floating-point dtypes are.")
    if config.comm.quantises:
        other = [
            (name, p) for name, p in model.named_parameters() if p.is_floating_point() and p.dtype not in FLOAT_DTYPES
        ]
        if other:
            raise ConfigError(
                f"hf_zero config: `comm.weights` and `comm.gradients` quantise float32 and 16-bit parameters, and "
                f"{other[0][0]!r} is {other[0][1].dtype}. Leave them at none, or train in float32 or bfloat16."
            )
    packed = [(name, p) for name, p in model.named_parameters() if not p.dtype.is_floating_point]
    if config.stage == 3 and packed:
        name, p = packed[0]
        raise ValueError(
            f"hf_zero: {name!r} is quantised ({type(p).__name__}, {p.dtype}): its scales lie beside it and belong to whole "
            "blocks, so it cannot be sharded by element (stage 3). Train a QLoRA model with stage 2 or below, where the "
            "quantised base stays whole on each rank, or load the base without quantisation."
        )


def owners(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[nn.Parameter, tuple[int, int]]:
    """(optimizer index, group index) of each trained parameter; (-1, -1) for one that no optimizer has.

    Raises:
        ValueError: an optimizer has parameters that are not the model's, or two have the same.
    """
    of_model = set(model.parameters())
    owner = {p: (-1, -1) for p in model.parameters() if p.requires_grad}
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            foreign = [p for p in group["params"] if p not in of_model]
            if foreign:
                raise ValueError(
                    f"hf_zero: group {group_index} of {type(optimizer).__name__} holds {len(foreign)} parameters that are "
                    f"not in the model (first: shape {tuple(foreign[0].shape)}). Build the optimizer from this model's "
                    "parameters, after any step that replaces them (resize_token_embeddings, get_peft_model, .to(dtype))."
                )
            for p in group["params"]:
                if p in owner and owner[p] != (-1, -1):
                    raise ValueError("hf_zero: two optimizers hold the same parameter; give each parameter to one.")
                if p in owner:
                    owner[p] = (index, group_index)
    return owner


@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters that share no bucket with those of other parts.

    Attributes:
        modules: names of the layers of a unit at stage 3; the root has none.
        parameters: (name, parameter) in registration order.
        sharded: they are a unit of stage 3, of which a rank keeps its shard only.
    """

    modules: tuple[str, ...]
    parameters: Sequence[tuple[str, nn.Parameter]]
    sharded: bool

    @property
    def is_layer(self) -> bool:
        """Whether it is a unit of stage 3 that comes and goes as a whole."""
        return bool(self.modules)


def parts_of(model: nn.Module, config: ZeroConfig, groups: Groups, device: torch.device) -> list[Part]:
    """What goes into buckets, in the order in which gradients arrive.

    Below stage 3, and for one rank that keeps its parameters on the device, all trained parameters in one part. Else a part
    for each unit, frozen parameters too, the last layers first and the root last; then what `persist_below_numel` keeps whole.
    On an accelerator what the root has behind its layers (a head) comes first, so that its gradient, which may be the largest
    of all, does not wait for the embeddings'.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if config.stage < 3 or (groups.shard_size == 1 and not config.offload.moves_params):
        return [Part(modules=(), parameters=trained, sharded=False)]
    units = find_unit_modules(model, config.unit_modules)
    own = own_parameters(model, units)
    least = config.persist_below_numel
    values = {name: [p for _, p in held] for name, held in own.items()}
    layers = reversed(group_layers(units, values, least_unit_bytes(config, device)))
    behind = [] if device.type == "cpu" else _behind_layers(model, own)
    taken = {name for name, _ in behind}
    before = [(name, parameter) for name, parameter in own[""] if name not in taken]
    of_layers = [(names, [held for name in names for held in own[name]]) for names in layers]
    parts = [
        Part(modules=tuple(names), parameters=[(n, p) for n, p in held if p.numel() >= least], sharded=True)
        for names, held in [([], behind), *of_layers, ([], before)]
    ]
    kept = [(name, p) for name, p in trained if p.numel() < least]
    parts.append(Part(modules=(), parameters=kept, sharded=False))
    return [part for part in parts if part.parameters]


def _behind_layers(model: nn.Module, own: dict[str, list[tuple[str, nn.Parameter]]]) -> list[tuple[str, nn.Parameter]]:
    """What of the root's is registered behind all layers."""
    place = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    last = max((place[name] for unit, held in own.items() if unit for name, _ in held), default=len(place))
    return [(name, parameter) for name, parameter in own[""] if place[name] > last]


def build_parts(
    model: nn.Module,
    owner: dict[nn.Parameter, tuple[int, int]],
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
    groups: Groups,
    wire: Wire,
    transport: Transport,
    *,
    device: torch.device,
    tier: Tier,
    parameter_tier: ParameterTier,
    adopt: Callable[[Bucket], None],
) -> tuple[list[Bucket], dict[tuple[str, ...], list[Bucket]]]:
    """Moves a model into flat buckets: all, as they are numbered and reduced, and those of each unit by its modules. Collective.

    Parameters that are in none are on the device afterwards too, with rank 0's values.

    Args:
        owner: (optimizer, group) of each trained parameter.
        tier, parameter_tier: where state, and where shards of parameters, live.
        adopt: called with each bucket when it is built.
    """
    built: list[Bucket] = []
    of_units: dict[tuple[str, ...], list[Bucket]] = {}
    start_alike = partial(take_rank_0s, device=device, transport=transport)
    intact = [keeps_intact(optimizer, config, shards=groups.shard_size) for optimizer in optimizers]
    sizes = choose_sizes(model, config, groups, device)
    gathered = GatheredDtypes(model, config)
    trained_numel = sum(parameter.numel() for parameter in owner)
    placement = Placement(tier, device, ratio=config.offload.ratio, trained_numel=trained_numel)
    for part in parts_of(model, config, groups, device):
        buckets = build_buckets(
            part,
            owner,
            intact,
            config,
            groups,
            wire,
            gathered,
            bucket_numel=sizes.layer_numel if part.is_layer else sizes.numel,
            first_index=len(built),
            device=device,
            placement=placement,
            parameter_tier=parameter_tier,
            prepare=start_alike,
            adopt=adopt,
        )
        built += buckets
        if part.sharded:
            of_units.setdefault(part.modules, []).extend(buckets)
    taken = {slot.parameter for bucket in built for slot in bucket.slots}
    for parameter in model.parameters():
        if parameter not in taken:
            start_alike(parameter)
            take_from_file(parameter, device)
    return built, of_units


def build_buckets(
    part: Part,
    owner: dict[nn.Parameter, tuple[int, int]],
    intact: Sequence[bool],
    config: ZeroConfig,
    groups: Groups,
    wire: Wire,
    gathered: GatheredDtypes,
    *,
    bucket_numel: int,
    first_index: int,
    device: torch.device,
    placement: Placement,
    parameter_tier: ParameterTier,
    prepare: Callable[[nn.Parameter], None],
    adopt: Callable[[Bucket], None],
) -> list[Bucket]:
    """Moves a part's parameters into flat buckets. Never mixes dtypes, optimizers, groups, or frozen and trained in one.

    Args:
        intact: of each optimizer, whether its parameters must not be cut.
        bucket_numel: elements a bucket should not pass.
        wire: how parameters and gradients travel.
        gathered: which parameters are cast for forward and backward.
        placement: of state in tiers.
        parameter_tier: where shards of parameters live.
        prepare: called with each parameter before its values are taken.
        adopt: called with each bucket when it is built.
    """
    parameter_of = dict(part.parameters)
    buckets = []
    make_memory = _choose_memory(part, wire, parameter_tier, device)
    are_parameters = rows_are_parameters(config, groups, parameter_of.values(), placement)
    layouts = layouts_of(
        part,
        owner,
        intact,
        config,
        groups,
        gathered,
        bucket_numel=bucket_numel,
        first_index=first_index,
        align=wire.align,
    )
    for layout in layouts:
        parameters = [parameter_of[slot.name] for slot in layout.slots]
        for parameter in parameters:
            prepare(parameter)
        key = cast(BucketKey, layout.key)
        numel = sum(p.numel() for p in parameters)
        tier = placement.next_tier(numel) if key.trained else placement.device_tier
        apart = parameter_tier.masters_apart(tier) if part.sharded else tier.is_apart
        precision = precision_of(
            config,
            key,
            weights=None if part.sharded else wire.weight_format,
            adds_in_master=wire.reduction.adds_in_wider,
            apart=apart,
        )
        place = (layout, precision.param, device, layout.shard(groups.shard_rank))
        buckets.append(
            Bucket(
                layout,
                parameters,
                precision,
                make_memory(*place, precision.kept) if part.sharded else make_memory(*place),
                shard_rank=groups.shard_rank,
                rows_are_parameters=are_parameters,
                tier=tier,
            )
        )
        adopt(buckets[-1])
    return buckets


def _choose_memory(
    part: Part, wire: Wire, parameter_tier: ParameterTier, device: torch.device
) -> Callable[..., ParameterMemory]:
    if wire.peers is not None:
        return memory_of(wire.peers, sharded=part.sharded)
    if part.sharded:
        return memory_in(parameter_tier, device, rounded=wire.weight_format is not None)
    return UnshardedMemory


def layouts_of(
    part: Part,
    owner: dict[nn.Parameter, tuple[int, int]],
    intact: Sequence[bool],
    config: ZeroConfig,
    groups: Groups,
    gathered: GatheredDtypes,
    *,
    bucket_numel: int,
    first_index: int,
    align: Alignment,
) -> tuple[BucketLayout, ...]:
    """The layouts of a part's buckets, which move nothing: a model on the meta device has them too.

    Arguments: see `build_buckets`.
    """
    return plan_buckets(
        _specs(part, owner, intact, gathered),
        bucket_numel=bucket_numel,
        shards=groups.shard_size,
        first_index=first_index,
        align=align.and_also(IN_BLOCKS) if config.quantises_moments else align,
    )


def precision_of(
    config: ZeroConfig, key: BucketKey, *, weights: BlockFormat | None, adds_in_master: bool, apart: bool
) -> Precision:
    """The dtypes of a bucket.

    Args:
        weights: the blocks in which parameters come to every rank; None where they come as they are.
        adds_in_master: gradients are summed over the ranks in the master dtype.
        apart: masters live elsewhere than parameters.
    """
    if not key.trained:
        return untrained_precision(key.dtype, key.gathered_dtype)
    return resolve_precision(
        config, key.dtype, gathered=key.gathered_dtype, apart=apart, weights=weights, adds_in_master=adds_in_master
    )


def _specs(
    part: Part, owner: dict[nn.Parameter, tuple[int, int]], intact: Sequence[bool], gathered: GatheredDtypes
) -> list[ParameterSpec]:
    """What the layout has to know of a part's parameters: those of one key may share a bucket."""
    specs = []
    for name, parameter in part.parameters:
        place = owner.get(parameter, (-1, -1))
        gathered_dtype = gathered.of(parameter, sharded=part.sharded)
        key = BucketKey(parameter.requires_grad, wanted_dtype(parameter), gathered_dtype, *place)
        specs.append(
            ParameterSpec(name=name, numel=parameter.numel(), key=key, intact=place[0] >= 0 and intact[place[0]])
        )
    return specs


def rows_are_parameters(
    config: ZeroConfig, groups: Groups, parameters: Iterable[nn.Parameter], placement: Placement
) -> bool:
    """Whether the optimizer steps on the parameters themselves: one rank, which has no master of any and moves none."""
    if groups.shard_size > 1 or config.offload.moves_params or placement.tier.is_apart:
        return False
    return not any(resolve_precision(config, dtype).has_master for dtype in {wanted_dtype(p) for p in parameters})
