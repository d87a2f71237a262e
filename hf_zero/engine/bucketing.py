"""Refuses unsupported models, divides parameters into units and buckets, and builds the buckets."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from ..arithmetic.flat import FLOAT_DTYPES
from ..buckets.bucket import Bucket, BucketKey
from ..buckets.memory import ParameterMemory, UnshardedMemory
from ..buckets.offloaded_memory import sharded_memory
from ..buckets.packed import is_packed, refuse_inner_tensors, refuse_unpackable, start_alike
from ..buckets.precision import (
    GatheredDtypes,
    Precision,
    choose_sizes,
    least_unit_bytes,
    resolve_precision,
    take_from_file,
    take_rank_0s,
    untrained_precision,
    wanted_dtype,
)
from ..comm.groups import Groups
from ..config import AUTO, ConfigError, ZeroConfig
from ..hooks.weak import engine_attached_to
from ..layout.blocks import IN_BLOCKS
from ..layout.buckets import Alignment, BucketLayout, ParameterSpec, plan_buckets
from ..offload.choice import Placement
from ..offload.shards import ParameterTier
from ..optimizer.scope import find_scope, keeps_intact, refuse_wrapper
from ..optimizer.trial import UpdateScope
from .buffers import ignored_by_ddp, ignored_parameters
from .compiled import compiles_itself
from .models import Models, is_outside, named_models_in
from .split_model import Mesh, SplitModel
from .wire import Wire

# ---- Refuses unsupported models, settings and optimizers, before anything is moved ----

_WRAPPERS = {
    "DistributedDataParallel": "DDP averages its gradients",
    "DataParallel": (
        "DataParallel copies it to the GPUs of this one process, as Trainer does for `python train.py` where it sees several; "
        "start a process for each GPU (torchrun, accelerate launch) or let it see one (CUDA_VISIBLE_DEVICES=0)"
    ),
    "FullyShardedDataParallel": "FSDP shards it",
    "FSDPModule": "FSDP (`fully_shard`) shards it",
    "DeepSpeedEngine": "DeepSpeed trains it",
}

_PLAIN = (torch.Tensor, nn.Parameter)


def refuse_other_engines(model: nn.Module) -> None:
    """Raises `ConfigError` if another engine has wrapped or sharded the model or a part of it."""
    for name, module in model.named_modules():
        # Compare names of classes, because imports of the other engines are slow, and they may not be installed. Search the
        # `__mro__`, because `fully_shard` gives each module a new class with `FSDPModule` as a base.
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS]
        if kinds:
            what = repr(name) if name else "the model"
            raise ConfigError(
                f"hf_zero: {what} is of class {type(module).__name__}: {_WRAPPERS[kinds[0]]}. Two engines cannot own one model. "
                "Give hf_zero the plain model, which a wrapper has as `module`, before anything wraps it."
            )


def refuse_second_engine(model: nn.Module) -> None:
    """Raises `ValueError` if parameters of the model are in the buckets of a live `ZeroEngine`."""
    for name, parameter in model.named_parameters():
        engine = engine_attached_to(parameter)
        # Both models may share a frozen parameter that the other engine leaves whole, because it is in no bucket.
        if engine is not None and (engine.trains(parameter) or parameter in engine.sharded.unit_of):
            raise ValueError(
                f"hf_zero: {name!r} is in the buckets of another ZeroEngine, and two cannot reduce its gradient. "
                "Close that engine on all ranks (hf_zero.engine_of(model).close()) and use a new optimizer, or use "
                "another model."
            )


def refuse_beside_split(
    model: nn.Module, split: SplitModel, config: ZeroConfig, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raises `ConfigError` for settings and optimizers that do not work with a split model."""
    if split.is_empty:
        return
    if isinstance(model, Models):
        raise ConfigError(
            "hf_zero: a model that is split over ranks (tensor or expert parallel) is trained together with another model, or "
            "with parameters of no model. Give each its own optimizer, or load without tp_size and ep_size."
        )
    if config.comm.sync_every > 1:
        raise ConfigError(
            f"hf_zero config: `comm.sync_every` is {config.comm.sync_every}, and the model is split over ranks (tensor or expert "
            "parallel), all of which take each step together. Leave `comm.sync_every` at 1."
        )
    if split.experts:
        _refuse_beside_experts(config)
    if config.out_of_memory == "halve":
        raise ConfigError(
            "hf_zero config: `out_of_memory: halve` does not go with a model that is split over ranks (tensor or "
            "expert parallel), whose other ranks would wait for the failed one. Leave `out_of_memory` at stop."
        )
    for optimizer in optimizers:
        if find_scope(optimizer).scope in (UpdateScope.PARAMETER, UpdateScope.MODEL):
            raise ConfigError(
                f"hf_zero: the optimizer {type(optimizer).__name__} updates an element by what the rest of its "
                "parameter is, and this split model has only parts of parameters. Use AdamW, SGD, Lion, ..., or "
                "load without tp_size and ep_size."
            )


def _refuse_beside_experts(config: ZeroConfig) -> None:
    """The same for experts that are split over more ranks than compute a batch together."""
    apart = "experts are split over more ranks than the rest of the model (ep_size above tp_size), and have groups of their own"
    if config.comm.shard_group_size != AUTO:
        raise ConfigError(
            f"hf_zero config: `comm.shard_group_size` is {config.comm.shard_group_size}, and {apart}, which it does not say the "
            "size of. Leave `comm.shard_group_size` at auto, or give ep_size the value of tp_size."
        )
    if config.comm.secondary_shard != "none":
        raise ConfigError(
            f"hf_zero config: `comm.secondary_shard` is {config.comm.secondary_shard}, and {apart}, not all of which may have "
            "several ranks on a node. Leave `comm.secondary_shard` at none, or give ep_size the value of tp_size."
        )


def refuse_renormed_embeddings(model: nn.Module, config: ZeroConfig) -> None:
    """Raises `ValueError` for an embedding with `max_norm` whose weight or optimizer state is sharded.

    Its forward scales the embeddings of this rank's tokens in place, so weights differ between ranks. DDP does not compare its
    replicas, so each rank continues with different weights.
    """
    if config.stage == 0 or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and _is_edited(module, config):
            raise ValueError(
                f"hf_zero: {name!r} is an embedding with `max_norm={module.max_norm}`, which scales other rows on "
                "each rank. Build it with `max_norm=None` and scale inside `with hf_zero.gathered(model, "
                "writeback=True):`, or train at `stage: 0`."
            )


def _is_edited(module: nn.Embedding | nn.EmbeddingBag, config: ZeroConfig) -> bool:
    is_shared_out = config.stage == 3 or module.weight.requires_grad
    return module.max_norm is not None and is_shared_out


class _Extent(NamedTuple):
    """A tensor's bytes from its first element to its last."""

    device: str
    begin: int
    end: int
    name: str
    tensor: torch.Tensor


def refuse_shared_storage(model: nn.Module) -> None:
    """Raises `ValueError` if a trained parameter shares elements with another parameter or with a buffer.

    One Parameter object in several modules is allowed.
    """
    found = {id(tensor): (name, tensor) for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    for one, other in _overlapping(found.values()):
        if (one.tensor.requires_grad or other.tensor.requires_grad) and _share_elements(one.tensor, other.tensor):
            raise ValueError(
                f"hf_zero: {one.name!r} and {other.name!r} are two tensors in the same memory, which the engine "
                "would separate. Make them one Parameter (decoder.weight = encoder.weight), or copy one "
                "(.detach().clone()), before the model is prepared."
            )


def _overlapping(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[_Extent, _Extent]]:
    """Yields pairs of tensors whose extents overlap."""
    before: list[_Extent] = []
    for extent in sorted((_extent(name, tensor) for name, tensor in named if _has_memory(tensor)), key=lambda e: e[:3]):
        # Sorted by address, so an extent overlaps only earlier ones that have not ended yet.
        before = [other for other in before if other.device == extent.device and extent.begin < other.end]
        yield from ((other, extent) for other in before)
        before.append(extent)


def _has_memory(tensor: torch.Tensor) -> bool:
    # The memory layout of other classes is unknown.
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _extent(name: str, tensor: torch.Tensor) -> _Extent:
    begin = tensor.data_ptr()
    return _Extent(str(tensor.device), begin, begin + _span(tensor) * tensor.element_size(), name, tensor)


def _span(tensor: torch.Tensor) -> int:
    """Returns the number of elements from the first to the last, including gaps."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


def _share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors with overlapping extents share elements. For example, the columns of a matrix only interleave."""
    # If both have no gaps, an overlap is shared. A tensor without gaps may still be in a gap of the other one.
    if _span(one) == one.numel() and _span(other) == other.numel():
        return True
    return bool(torch.isin(_addresses(one), _addresses(other)).any())


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    places = torch.arange(_span(tensor)).as_strided(tensor.shape, tensor.stride())
    return places.reshape(-1) * tensor.element_size() + tensor.data_ptr()


# ---- Chooses the modules to unshard before their forward, and to reshard afterwards: the units ----

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Containers may be iterated without a call, so their hooks would never run. Their children are considered instead."""

_SMALLEST_SHARE = 64
"""A unit chosen by size has at least 1 / this number of the model's elements. Gathers of smaller units would not pay off."""


def find_unit_modules(model: nn.Module, names: Sequence[str] | str) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) of each unit in registration order, without nested units; may be empty.

    Args:
        names: class names, as in transformers' `_no_split_modules`. `auto` uses the classes in the model's `_no_split_modules`,
            or else repeated blocks of its ModuleLists and Sequentials, or else its children with a minimum size.

    Raises:
        ConfigError: no module has one of the classes.
    """
    units = [
        (f"{prefix}.{name}" if prefix else name, module)
        for prefix, part in named_models_in(model)
        for name, module in _units_of(part, names)
    ]
    if not units and names != AUTO:
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"hf_zero config: `unit_modules` is {list(names)!r}, and {type(model).__name__} has no module of such a class. "
            f"It has: {', '.join(known)}."
        )
    return units


def _units_of(model: nn.Module, names: Sequence[str] | str) -> list[tuple[str, nn.Module]]:
    if names != AUTO:
        return _of_classes(model, set(names))
    return (
        _of_classes(model, _no_split_classes(model)) or _of_classes(model, _repeated_classes(model)) or _by_size(model)
    )


def _no_split_classes(model: nn.Module) -> set[str]:
    # Search all modules, because wrappers such as PEFT's do not copy the attribute of the model inside.
    return {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}


def _repeated_classes(model: nn.Module) -> set[str]:
    repeated: set[str] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            # A block has children. Otherwise each Linear of a plain Sequential would be a unit.
            blocks = [
                child for child in module if not isinstance(child, _CONTAINERS) and any(True for _ in child.children())
            ]
            counts = Counter(type(child).__name__ for child in blocks)
            repeated.update(name for name, count in counts.items() if count > 1)
    return repeated


def _of_classes(model: nn.Module, classes: set[str]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        # The model itself, with an empty name, is no unit, because all parameters would be whole at the same time.
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if name and not inside and type(module).__name__ in classes and _numel(module) > 0:
            found.append((name, module))
    return found


def _by_size(model: nn.Module) -> list[tuple[str, nn.Module]]:
    least = _numel(model) / _SMALLEST_SHARE
    children = [(name, child) for name, child in model.named_children() if _numel(child) >= least]
    found: list[tuple[str, nn.Module]] = []
    for name, child in children:
        # A compiled container is called as a whole, so hooks of layers inside would run in the middle of a graph.
        if isinstance(child, _CONTAINERS) and not compiles_itself(child):
            found.extend((f"{name}.{inner}", module) for inner, module in _by_size(child))
        else:
            found.append((name, child))
    return found


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def group_layers(
    units: Sequence[tuple[str, nn.Module]], parameters_of: Mapping[str, Sequence[nn.Parameter]], least_bytes: int
) -> list[list[str]]:
    """Joins consecutive layers of one class in a list into units of at least `least_bytes`; returns the names of each unit.

    Args:
        units: (name, module) of the layers, in registration order.
        parameters_of: maps a layer's name to the parameters that the layer alone would gather.
        least_bytes: number of bytes from which on a unit gets no further layer.
    """
    groups: list[list[str]] = []
    place, gathered_bytes = None, 0
    for name, module in units:
        nbytes = sum(parameter.nbytes for parameter in parameters_of[name])
        its_place = (name.rpartition(".")[0], type(module))
        if groups and its_place == place and gathered_bytes < least_bytes:
            groups[-1].append(name)
            gathered_bytes += nbytes
        else:
            groups.append([name])
            place, gathered_bytes = its_place, nbytes
    return groups


def own_parameters(
    model: nn.Module, units: Sequence[tuple[str, nn.Module]]
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Maps unit names to (name, parameter) pairs, "" for the root, which also has weights tied between units."""
    owners: dict[nn.Parameter, set[str]] = {}
    for name, module in model.named_modules():
        unit = next((outer for outer, _ in units if name == outer or name.startswith(f"{outer}.")), "")
        # Search by module, because `named_parameters` yields a tied weight only once, which would hide the second unit.
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(unit)
    own: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in ("", *(name for name, _ in units))}
    for name, parameter in model.named_parameters():
        units_of = owners[parameter]
        own[next(iter(units_of)) if len(units_of) == 1 else ""].append((name, parameter))
    return own


# ---- Divides parameters into buckets by unit, dtype and optimizer group ----


def check_parameters(model: nn.Module, config: ZeroConfig) -> None:
    """Raises `ValueError` or `ConfigError` for a model that cannot be trained or, at stage 3, sharded."""
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
            (name, p)
            for name, p in model.named_parameters()
            if p.is_floating_point() and p.dtype not in FLOAT_DTYPES and not is_packed(p)
        ]
        if other:
            raise ConfigError(
                f"hf_zero config: `comm.weights` and `comm.gradients` quantise float32 and 16-bit parameters, and "
                f"{other[0][0]!r} is {other[0][1].dtype}. Leave them at none, or train in float32 or bfloat16."
            )
    for name, p in model.named_parameters():
        if p.requires_grad and p not in ignored:
            refuse_inner_tensors(name, p)
        elif p not in ignored:
            refuse_unpackable(name, p, sharded=config.stage == 3)


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
    behind = [] if device.type == "cpu" else _behind_layers(model, own)
    taken = {name for name, _ in behind}
    before = [(name, parameter) for name, parameter in own[""] if name not in taken]
    of_layers = [(names, [held for name in names for held in own[name]]) for names in layers]
    parts = [outside]
    for names, held in [([], behind), *of_layers, ([], before)]:
        shared = [(n, p) for n, p in held if p not in unshared]
        # Frozen ones are in no bucket, because no other rank has them, and no step changes them.
        alone = [(n, p) for n, p in held if p in unshared and p.requires_grad]
        parts.append(Part(modules=tuple(names), parameters=shared, sharded=True))
        parts.append(Part(modules=(), parameters=alone, sharded=False))
    return [part for part in parts if part.parameters]


def _behind_layers(model: nn.Module, own: dict[str, list[tuple[str, nn.Parameter]]]) -> list[tuple[str, nn.Parameter]]:
    """Returns the root's parameters registered after all layers."""
    place = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    # Without layers the result is empty, and the root stays one part.
    last = max((place[name] for unit, held in own.items() if unit for name, _ in held), default=len(place))
    return [(name, parameter) for name, parameter in own[""] if place[name] > last]


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
        self._quantises = config.comm.quantises
        # Experts that are only on this rank need no gather. With `offload.params` they are a unit nevertheless. Otherwise they
        # would stay on the device.
        is_alone = split.expert_shards == 1 and not config.offload.moves_params
        self.parts = parts_of(model, config, groups, device, split.experts if is_alone else ())
        self._owner = owner
        # For each optimizer, whether its parameters must not be cut.
        self.scopes = [find_scope(optimizer) for optimizer in optimizers]
        self._intact = [
            keeps_intact(optimizer, found, config, shards=groups.shard_size)
            for optimizer, found in zip(optimizers, self.scopes)
        ]
        self._sizes = choose_sizes(model, config, groups, device)
        self._gathered = GatheredDtypes(model, config)
        self._shards = groups.shard_size
        self._align = align.and_also(IN_BLOCKS) if config.quantises_moments else align

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
        is_split = self._quantises and parameter in self._split.parts
        # Only for trained parameters. Frozen ones keep their dtype anyway, and another key would divide them into more buckets.
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
    weights: Callable[[torch.Tensor], None] | None,
    adds_in_master: bool,
    apart: bool,
) -> Precision:
    """Returns the dtypes of a bucket.

    Args:
        weights: see `Precision`.
        adds_in_master: gradients are summed over the ranks in the master dtype.
        apart: masters are stored in different memory than parameters.
    """
    if not key.trained:
        return untrained_precision(key.dtype, key.gathered_dtype)
    if key.stays:
        # float32 parameters need no stochastic rounding.
        rounding = "nearest" if key.dtype == torch.float32 else config.rounding
        config = replace(config, param_dtype=AUTO, rounding=rounding)
    return resolve_precision(
        config, key.dtype, gathered=key.gathered_dtype, apart=apart, weights=weights, adds_in_master=adds_in_master
    )


# ---- Moves a model's parameters into flat buckets ----


@dataclass(frozen=True, kw_only=True)
class BucketBuilder:
    """Builds the buckets of a model, part by part.

    Attributes:
        mesh: the ranks that share parameters.
        wire: how parameters and gradients are sent.
        device: the training device.
        placement: chooses the tier of each bucket's state.
        parameter_tier: stores shards of parameters.
        adopt: called with each new bucket.
    """

    config: ZeroConfig
    mesh: Mesh
    wire: Wire
    device: torch.device
    placement: Placement
    parameter_tier: ParameterTier
    adopt: Callable[[Bucket], None]

    def build(self, model: nn.Module, division: Division) -> tuple[list[Bucket], dict[tuple[str, ...], list[Bucket]]]:
        """Returns all buckets, in the order of their reduction, and the buckets of each unit by its modules. Collective.

        Afterwards, parameters in no bucket are also on the device, with rank 0's values unless the script has excluded them from
        DDP.
        """
        built: list[Bucket] = []
        of_units: dict[tuple[str, ...], list[Bucket]] = {}
        # One answer for all parts, because all buckets have the same gradient store.
        are_parameters = self._rows_are_parameters(p for part in division.parts for _, p in part.parameters)
        for part in division.parts:
            layouts = division.layouts_of(part, first_index=len(built))
            buckets = self._build_part(part, layouts, are_parameters=are_parameters)
            built += buckets
            if part.sharded:
                of_units.setdefault(part.modules, []).extend(buckets)
        start_alike(model, self.device, self.mesh.dp.all_transport)
        taken = {slot.parameter for bucket in built for slot in bucket.slots}
        ignored, names = ignored_parameters(model), ignored_by_ddp(model)
        for name, parameter in model.named_parameters():
            if parameter in ignored and name in names:
                parameter.data = parameter.detach().to(self.device)
            elif parameter not in taken:
                # Parameters in buckets already have rank 0's values.
                self._start_alike(parameter)
            if parameter not in taken:
                take_from_file(parameter, self.device)
        return built, of_units

    def _build_part(self, part: Part, layouts: Sequence[BucketLayout], *, are_parameters: bool) -> list[Bucket]:
        parameter_of = dict(part.parameters)
        buckets = []
        for layout in layouts:
            parameters = [parameter_of[slot.name] for slot in layout.slots]
            # Before the bucket copies the values: at stage 3 this rank keeps only its part of rank 0's values.
            for parameter in parameters:
                self._start_alike(parameter)
            key = cast(BucketKey, layout.key)
            group = self.mesh.expert_dp if key.is_expert else self.mesh.dp
            rounds = self.wire.rounding_in(group)
            numel = sum(p.numel() for p in parameters)
            tier = self.placement.next_tier(numel) if key.trained else self.placement.device_tier
            precision = precision_of(
                self.config,
                key,
                weights=None if part.sharded else rounds,
                adds_in_master=self.wire.adds_in_wider(group),
                apart=self.parameter_tier.masters_apart(tier) if part.sharded else tier.is_apart,
            )
            place = (layout, precision.param, self.device, layout.shard(group.groups.shard_rank))
            memory: ParameterMemory = (
                sharded_memory(
                    *place, precision.kept, tier=self.parameter_tier, rounded=rounds is not None and not key.is_packed
                )
                if part.sharded
                else UnshardedMemory(*place)
            )
            bucket = Bucket(
                layout,
                parameters,
                precision,
                memory,
                group=group,
                rows_are_parameters=are_parameters,
                tier=tier,
            )
            # At once, so that the state moves to its tier before the next bucket allocates memory on the device.
            self.adopt(bucket)
            buckets.append(bucket)
        return buckets

    def _start_alike(self, parameter: nn.Parameter) -> None:
        take_rank_0s(parameter, device=self.device, transport=self.mesh.group_of(parameter).all_transport)

    def _rows_are_parameters(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the optimizer steps the parameters themselves: on one rank, without masters and without offload."""
        if self.mesh.dp.groups.shard_size > 1 or self.config.offload.moves_params or self.placement.tier.is_apart:
            return False
        dtypes = {wanted_dtype(parameter) for parameter in parameters}
        return not any(resolve_precision(self.config, dtype).has_master for dtype in dtypes)
