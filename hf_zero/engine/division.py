"""Divides parameters into buckets by unit, dtype and optimizer group."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..buckets.bucket import BucketKey
from ..buckets.kept_dtypes import GatheredDtypes
from ..buckets.precision import Precision, resolve_precision, untrained_precision
from ..buckets.sizes import choose_sizes, least_unit_bytes
from ..buckets.unread_weights import wanted_dtype
from ..comm.groups import Groups
from ..config import AUTO, ZeroConfig
from ..layout.blocks import IN_BLOCKS
from ..layout.buckets import Alignment, BucketLayout, ParameterSpec, plan_buckets
from ..optimizer.scope import find_scope, keeps_intact, refuse_wrapper
from .buffers import ignored_parameters
from .models import is_outside
from .units import find_unit_modules, group_layers, own_parameters


def owners(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[nn.Parameter, tuple[int, int]]:
    """Returns (optimizer index, group index) of each trained parameter; (-1, -1) without an optimizer.

    Excludes `ignored_parameters`.

    Raises:
        ValueError: an optimizer wraps another one, or two optimizers have the same parameter.
    """
    ignored = ignored_parameters(model)
    owner = {p: (-1, -1) for p in model.parameters() if p.requires_grad and p not in ignored}
    for index, optimizer in enumerate(optimizers):
        refuse_wrapper(optimizer)
        for group_index, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if p in owner and owner[p] != (-1, -1):
                    name = next(name for name, parameter in model.named_parameters() if parameter is p)
                    first = optimizers[owner[p][0]]
                    raise ValueError(
                        f"hf_zero: {name!r} is held by two optimizers, {type(first).__name__} and {type(optimizer).__name__}. "
                        "Give each parameter to one; a tied weight is one parameter, under its first name."
                    )
                if p in owner:
                    owner[p] = (index, group_index)
    return owner


@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters that share no bucket with parameters of other parts.

    Attributes:
        modules: names of a unit's layers at stage 3; empty for the root.
        parameters: (name, parameter) in registration order.
        sharded: whether the parameters are a unit of stage 3, of which a rank keeps only its shard.
    """

    modules: tuple[str, ...]
    parameters: Sequence[tuple[str, nn.Parameter]]
    sharded: bool


def shards_parameters(config: ZeroConfig, groups: Groups) -> bool:
    """Whether a rank keeps only a shard of the parameters: at stage 3, except for one rank without `offload.params`."""
    return config.stage == 3 and (groups.shard_size > 1 or config.offload.moves_params)


def parts_of(
    model: nn.Module,
    config: ZeroConfig,
    groups: Groups,
    device: torch.device,
    unshared: Collection[nn.Parameter] = (),
) -> list[Part]:
    """Lists the parts to be put into buckets, in the order of their gradients, without `ignored_parameters`.

    Below stage 3, and for one rank without `offload.params`, all trained parameters are one part. Otherwise each unit is a part,
    including frozen parameters; the last layers are first and the root is last. Parameters outside of all models are the first
    part. They stay whole, since no model's forward gathers them.

    On an accelerator, the root's parameters after the layers (a head) precede the layers, so that their gradient, which may be
    the largest, does not wait for the gradient of the embeddings.

    Args:
        unshared: parameters that no other rank has, which are not sharded. They are in a separate part after their unit's part.
    """
    ignored = ignored_parameters(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p not in ignored]
    # Not in buckets with parameters of the model, because a loss's guide model never gets a gradient, and would delay the others.
    outside = Part(modules=(), parameters=[(name, p) for name, p in trained if is_outside(name)], sharded=False)
    if not shards_parameters(config, groups):
        inside = [(name, p) for name, p in trained if not is_outside(name)]
        parts = [outside, Part(modules=(), parameters=inside, sharded=False)]
        return [part for part in parts if part.parameters]
    units = find_unit_modules(model, config.unit_modules)
    own = {
        unit: [(name, p) for name, p in held if p not in ignored and not is_outside(name)]
        for unit, held in own_parameters(model, units).items()
    }
    values = {name: [p for _, p in held] for name, held in own.items()}
    layers = reversed(group_layers(units, values, least_unit_bytes(config, device)))
    after = [] if device.type == "cpu" else _after_layers(model, own)
    taken = {name for name, _ in after}
    before = [(name, parameter) for name, parameter in own[""] if name not in taken]
    of_layers = [(names, [held for name in names for held in own[name]]) for names in layers]
    parts = [outside]
    for names, held in [([], after), *of_layers, ([], before)]:
        shared = [(n, p) for n, p in held if p not in unshared]
        # Frozen ones are in no bucket, because no other rank has them, and no step changes them.
        alone = [(n, p) for n, p in held if p in unshared and p.requires_grad]
        parts.append(Part(modules=tuple(names), parameters=shared, sharded=True))
        parts.append(Part(modules=(), parameters=alone, sharded=False))
    return [part for part in parts if part.parameters]


def _after_layers(model: nn.Module, own: dict[str, list[tuple[str, nn.Parameter]]]) -> list[tuple[str, nn.Parameter]]:
    """Returns the root's parameters registered after all layers."""
    index = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    # Without layers the result is empty, and the root stays one part.
    last = max((index[name] for unit, held in own.items() if unit for name, _ in held), default=len(index))
    return [(name, parameter) for name, parameter in own[""] if index[name] > last]


@dataclass(frozen=True, kw_only=True)
class SplitKinds:
    """The split parameters of a model; empty if the model is not split.

    Attributes:
        parts: parameters of which a rank has only a part.
        experts: parameters whose state only `expert_shards` ranks share, fewer than the ranks that step together.
        expert_shards: number of ranks that share the state of experts.
    """

    parts: Collection[nn.Parameter] = ()
    experts: Collection[nn.Parameter] = ()
    expert_shards: int = 1


class Division:
    """The division of a model into buckets. No bucket mixes dtypes, optimizers, groups, or frozen and trained parameters.

    Only shapes and dtypes are read, so a model on the meta device is divided in the same way.

    Args:
        owner: (optimizer, group) of each trained parameter.
        device: the training device.
        align: the alignment of shards.

    Attributes:
        parts: the parts, in the order in which their gradients arrive.
        scopes: for each optimizer, the values on which the update of an element depends.
    """

    def __init__(
        self,
        model: nn.Module,
        owner: dict[nn.Parameter, tuple[int, int]],
        optimizers: Sequence[torch.optim.Optimizer],
        config: ZeroConfig,
        groups: Groups,
        *,
        device: torch.device,
        align: Alignment,
        split: SplitKinds,
    ):
        self._split = split
        self._quantizes = config.comm.quantizes
        # Experts that are only on this rank need no gather. With `offload.params` they are a unit nevertheless. Otherwise they
        # would stay on the device.
        is_alone = split.expert_shards == 1 and not config.offload.moves_params
        self.parts = parts_of(model, config, groups, device, split.experts if is_alone else ())
        self._owner = owner
        # What each optimizer reads to update an element, and whether its parameters must stay whole.
        self.scopes = [find_scope(optimizer) for optimizer in optimizers]
        self._intact = [
            keeps_intact(optimizer, found, config, shards=groups.shard_size)
            for optimizer, found in zip(optimizers, self.scopes)
        ]
        self._sizes = choose_sizes(model, config, groups, device)
        self._gathered = GatheredDtypes(model, config)
        self._shards = groups.shard_size
        self._align = align.and_also(IN_BLOCKS) if config.quantizes_moments else align

    def layouts_of(self, part: Part, first_index: int) -> tuple[BucketLayout, ...]:
        """Returns the layouts of a part's buckets, numbered from `first_index`."""
        return plan_buckets(
            [self._spec(name, parameter, sharded=part.sharded) for name, parameter in part.parameters],
            bucket_numel=self._sizes.layer_numel if part.modules else self._sizes.numel,
            shards=self._shards,
            first_index=first_index,
            align=self._align,
        )

    def _spec(self, name: str, parameter: nn.Parameter, *, sharded: bool) -> ParameterSpec:
        """Returns a parameter's spec. Parameters with equal keys may share a bucket."""
        optimizer, group = self._owner.get(parameter, (-1, -1))
        gathered = self._gathered.of(parameter, sharded=sharded)
        is_expert = parameter in self._split.experts
        is_split = self._quantizes and parameter in self._split.parts
        # Ask only for trained parameters. Frozen ones keep their dtype, and another key would divide them into more buckets.
        stays = parameter.requires_grad and self._gathered.stays(parameter)
        key = BucketKey(
            parameter.requires_grad,
            wanted_dtype(parameter),
            gathered,
            optimizer,
            group,
            is_expert,
            is_split,
            stays,
            sharded and self._gathered.is_packed(parameter),
        )
        intact = optimizer >= 0 and self._intact[optimizer]
        shards = self._split.expert_shards if is_expert else None
        return ParameterSpec(name=name, numel=parameter.numel(), key=key, intact=intact, shards=shards)


def precision_of(
    config: ZeroConfig,
    key: BucketKey,
    *,
    adds_in_master: bool,
    separate_master: bool,
    copies: bool,
) -> Precision:
    """Returns the dtypes of a bucket.

    Args:
        adds_in_master: gradients are summed over the ranks in the master dtype.
        separate_master: masters are stored in different memory than parameters.
        copies: see `Precision`.
    """
    if not key.trained:
        return untrained_precision(key.dtype, key.gathered_dtype)
    if key.stays:
        # float32 parameters need no stochastic rounding.
        rounding = "nearest" if key.dtype == torch.float32 else config.rounding
        config = replace(config, param_dtype=AUTO, rounding=rounding)
    return resolve_precision(
        config,
        key.dtype,
        gathered=key.gathered_dtype,
        separate_master=separate_master,
        adds_in_master=adds_in_master,
        copies=copies,
    )
