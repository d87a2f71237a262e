"""Which parameters of a model share a bucket: by unit, dtype and optimizer group."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...buckets.bucket import BucketKey
from ...buckets.bucket_sizes import choose_sizes, least_unit_bytes
from ...buckets.gathered_dtypes import GatheredDtypes
from ...buckets.mapped_parameters import wanted_dtype
from ...buckets.precision import Precision, resolve_precision, untrained_precision
from ...comm.groups.groups import Groups
from ...config import AUTO, ConfigError, ZeroConfig
from ...kernels.checks import FLOAT_DTYPES
from ...kernels.quantise import BlockFormat
from ...layout.blocks import IN_BLOCKS
from ...layout.slots import Alignment, BucketLayout, ParameterSpec, plan_buckets
from ...optimizer.state.elementwise import keeps_intact, refuse_wrapper
from ..travel.buffers import ignored_parameters
from ..units.unit_modules import find_unit_modules, group_layers, own_parameters
from .refusals import refuse_other_engines, refuse_second_engine

_QUANTISED = (torch.int8, torch.uint8)
"""What quantised weights are packed into."""


def check_parameters(model: nn.Module, config: ZeroConfig) -> None:
    """Raises `ValueError` for a model that cannot be trained, or at stage 3 not sharded."""
    refuse_other_engines(model)
    refuse_second_engine(model)
    of_jit = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    scripted = [name for name, module in of_jit if any(True for _ in module.parameters())]
    if scripted:
        raise ValueError(
            f"hf_zero: {scripted[0]!r} is a module of torch.jit, whose parameters and calls Python does not see. Give the plain "
            "module, and compile inside the layers if need be (layer.forward = torch.compile(layer.forward))."
        )
    on_meta = [name for name, p in model.named_parameters() if p.is_meta]
    if on_meta:
        raise ValueError(
            f"hf_zero: {len(on_meta)} parameters are on the meta device and have no values (first: {on_meta[0]!r}). Load "
            "the model with from_pretrained, or build it outside `torch.device('meta')`, before accelerator.prepare."
        )
    ignored = ignored_parameters(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p not in ignored]
    if not trained and config.stage < 3:
        raise ValueError(
            "hf_zero: no parameter of the model requires a gradient, so there is nothing to train or shard."
        )
    strange = [(name, p.dtype) for name, p in trained if not p.dtype.is_floating_point]
    if strange:
        name, dtype = strange[0]
        raise ValueError(
            f"hf_zero: {name!r} is trained in {dtype}, and buckets hold real numbers. Keep it as "
            "nn.Parameter(torch.view_as_real(weight)), and compute with torch.view_as_complex(self.weight) in forward."
        )
    if config.comm.quantises:
        other = [
            (name, p) for name, p in model.named_parameters() if p.is_floating_point() and p.dtype not in FLOAT_DTYPES
        ]
        if other:
            raise ConfigError(
                f"hf_zero config: `comm.weights` and `comm.gradients` quantise float32 and 16-bit parameters, and "
                f"{other[0][0]!r} is {other[0][1].dtype}. Leave them at none, or train in float32 or bfloat16."
            )
    packed = [(name, p) for name, p in model.named_parameters() if not (p.dtype.is_floating_point or p in ignored)]
    if config.stage == 3 and packed:
        name, p = packed[0]
        if type(p) is nn.Parameter and p.dtype not in _QUANTISED:
            raise ValueError(
                f"hf_zero: {name!r} is {p.dtype}, and stage 3 shards all parameters, of which only floating-point ones can be. "
                "Make it a buffer (register_buffer), which stays whole on each rank, or train at stage 2 or below."
            )
        raise ValueError(
            f"hf_zero: {name!r} is quantised ({type(p).__name__}, {p.dtype}): its scales lie beside it and belong to whole "
            "blocks, so it cannot be sharded by element (stage 3). Train a QLoRA model with stage 2 or below, where the "
            "quantised base stays whole on each rank, or load the base without quantisation."
        )


def owners(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[nn.Parameter, tuple[int, int]]:
    """(optimizer index, group index) of each trained parameter; (-1, -1) for one that no optimizer has.

    Without those that are left to each rank (`ignored_parameters`).

    Raises:
        ValueError: an optimizer has parameters that are not the model's, or wraps another; or two have the same.
    """
    of_model, ignored = set(model.parameters()), ignored_parameters(model)
    owner = {p: (-1, -1) for p in model.parameters() if p.requires_grad and p not in ignored}
    for index, optimizer in enumerate(optimizers):
        refuse_wrapper(optimizer)
        for group_index, group in enumerate(optimizer.param_groups):
            foreign = [p for p in group["params"] if p not in of_model]
            if foreign:
                raise ValueError(
                    f"hf_zero: group {group_index} of {type(optimizer).__name__} holds {len(foreign)} parameters that are "
                    f"not in the model (first: shape {tuple(foreign[0].shape)}). Build the optimizer from this model's "
                    "parameters, after any step that replaces them (resize_token_embeddings, get_peft_model, .to(dtype)). An "
                    "optimizer steps one model: where these are another's, give each model an optimizer of its own, or prepare "
                    "one module that has both."
                )
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


def parts_of(
    model: nn.Module,
    config: ZeroConfig,
    groups: Groups,
    device: torch.device,
    unshared: Collection[nn.Parameter] = (),
) -> list[Part]:
    """What goes into buckets, in the order in which gradients arrive: all but `ignored_parameters`.

    Below stage 3, and for one rank that keeps its parameters on the device, all trained parameters in one part. Else a part
    for each unit, frozen parameters too, the last layers first and the root last; then what `persist_below_numel` keeps whole.
    On an accelerator what the root has behind its layers (a head) comes first, so that its gradient, which may be the largest
    of all, does not wait for the embeddings'.

    Args:
        unshared: what no other rank has, and is not sharded: it is in a part behind that of its unit.
    """
    ignored = ignored_parameters(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p not in ignored]
    if config.stage < 3 or (groups.shard_size == 1 and not config.offload.moves_params):
        return [Part(modules=(), parameters=trained, sharded=False)]
    units = find_unit_modules(model, config.unit_modules)
    own = {
        unit: [(name, p) for name, p in held if p not in ignored] for unit, held in own_parameters(model, units).items()
    }
    least = config.persist_below_numel
    values = {name: [p for _, p in held] for name, held in own.items()}
    layers = reversed(group_layers(units, values, least_unit_bytes(config, device)))
    behind = [] if device.type == "cpu" else _behind_layers(model, own)
    taken = {name for name, _ in behind}
    before = [(name, parameter) for name, parameter in own[""] if name not in taken]
    of_layers = [(names, [held for name in names for held in own[name]]) for names in layers]
    parts = []
    for names, held in [([], behind), *of_layers, ([], before)]:
        shared = [(n, p) for n, p in held if p.numel() >= least and p not in unshared]
        alone = [(n, p) for n, p in held if p in unshared and p.requires_grad]
        parts.append(Part(modules=tuple(names), parameters=shared, sharded=True))
        parts.append(Part(modules=(), parameters=alone, sharded=False))
    kept = [(name, p) for name, p in trained if p.numel() < least and p not in unshared]
    parts.append(Part(modules=(), parameters=kept, sharded=False))
    return [part for part in parts if part.parameters]


def _behind_layers(model: nn.Module, own: dict[str, list[tuple[str, nn.Parameter]]]) -> list[tuple[str, nn.Parameter]]:
    """What of the root's is registered behind all layers."""
    place = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    last = max((place[name] for unit, held in own.items() if unit for name, _ in held), default=len(place))
    return [(name, parameter) for name, parameter in own[""] if place[name] > last]


@dataclass(frozen=True, kw_only=True)
class SplitKinds:
    """Parameters of a model that is split over ranks; none of one that is not.

    Attributes:
        parts: of which a rank has a part.
        experts: those that only `expert_shards` ranks share, and not all that take a step together.
    """

    parts: Collection[nn.Parameter] = ()
    experts: Collection[nn.Parameter] = ()
    expert_shards: int = 1


class Division:
    """How a model is divided into buckets: none mixes dtypes, optimizers, groups, or frozen and trained parameters.

    It reads shapes and dtypes only, so that a model on the meta device is divided as one with values is.

    Args:
        owner: (optimizer, group) of each trained parameter.
        device: that the model is trained on.
        align: on which elements shards may begin.

    Attributes:
        parts: in the order in which gradients arrive.
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
        self._quantises = config.comm.quantises
        is_alone = split.expert_shards == 1 and not config.offload.moves_params
        self.parts = parts_of(model, config, groups, device, split.experts if is_alone else ())
        self._owner = owner
        # Of each optimizer, whether its parameters must not be cut.
        self._intact = [keeps_intact(optimizer, config, shards=groups.shard_size) for optimizer in optimizers]
        self._sizes = choose_sizes(model, config, groups, device)
        self._gathered = GatheredDtypes(model, config)
        self._shards = groups.shard_size
        self._align = align.and_also(IN_BLOCKS) if config.quantises_moments else align

    def layouts_of(self, part: Part, first_index: int) -> tuple[BucketLayout, ...]:
        """The layouts of a part's buckets, numbered from `first_index`."""
        return plan_buckets(
            [self._spec(name, parameter, sharded=part.sharded) for name, parameter in part.parameters],
            bucket_numel=self._sizes.layer_numel if part.is_layer else self._sizes.numel,
            shards=self._shards,
            first_index=first_index,
            align=self._align,
        )

    def _spec(self, name: str, parameter: nn.Parameter, *, sharded: bool) -> ParameterSpec:
        """Parameters of one key may share a bucket."""
        optimizer, group = self._owner.get(parameter, (-1, -1))
        gathered = self._gathered.of(parameter, sharded=sharded)
        is_expert = parameter in self._split.experts
        is_split = self._quantises and parameter in self._split.parts
        stays = parameter.requires_grad and self._gathered.stays(parameter)
        key = BucketKey(
            parameter.requires_grad, wanted_dtype(parameter), gathered, optimizer, group, is_expert, is_split, stays
        )
        intact = optimizer >= 0 and self._intact[optimizer]
        shards = self._split.expert_shards if is_expert else None
        return ParameterSpec(name=name, numel=parameter.numel(), key=key, intact=intact, shards=shards)


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
    if key.stays:
        # What is float32 needs no rounding by chance.
        rounding = "nearest" if key.dtype == torch.float32 else config.rounding
        config = replace(config, param_dtype=AUTO, rounding=rounding)
    return resolve_precision(
        config, key.dtype, gathered=key.gathered_dtype, apart=apart, weights=weights, adds_in_master=adds_in_master
    )
