"""Refuses unsupported models, settings and optimizers, before anything is moved."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ..arithmetic.flat import FLOAT_DTYPES
from ..buckets.packed import is_packed, refuse_inner_tensors, refuse_unpackable
from ..config import AUTO, ConfigError, ZeroConfig
from ..hooks.weak import engine_attached_to
from ..optimizer.scope import find_scope
from ..optimizer.trial import UpdateScope
from .buffers import ignored_by_ddp, ignored_parameters
from .models import Models
from .split_model import SplitModel, is_dtensor

_WRAPPERS = {
    "DistributedDataParallel": "DDP averages its gradients",
    "DataParallel": (
        "DataParallel copies it to the GPUs of this one process, as Trainer does for `python train.py` if several are visible; "
        "start one process per GPU (torchrun, accelerate launch) or make one GPU visible (CUDA_VISIBLE_DEVICES=0)"
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
                f"hf_zero: {what} is of class {type(module).__name__}: {_WRAPPERS[kinds[0]]}. Two engines cannot own one "
                "model. Pass hf_zero the plain model (the wrapper's `module`), before anything wraps it."
            )


def refuse_second_engine(model: nn.Module) -> None:
    """Raises `ValueError` if parameters of the model are in the buckets of a live `ZeroEngine`."""
    for name, parameter in model.named_parameters():
        engine = engine_attached_to(parameter)
        # Both models may share a frozen parameter that the other engine leaves whole, because it is in no bucket.
        if engine is not None and (engine.trains(parameter) or parameter in engine.sharded.unit_of):
            raise ValueError(
                f"hf_zero: {name!r} is in the buckets of another ZeroEngine, and only one engine can reduce its gradient. "
                "Close that engine on all ranks (hf_zero.engine_of(model).close()) and use a new optimizer, or use another "
                "model."
            )


def refuse_with_split_models(
    model: nn.Module, split: SplitModel, config: ZeroConfig, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raises `ConfigError` for settings and optimizers that do not work with a split model."""
    if split.is_empty:
        return
    if isinstance(model, Models):
        raise ConfigError(
            "hf_zero: a model that is split over ranks (tensor or expert parallel) is trained together with another model, or "
            "with parameters outside any model. Give each its own optimizer, or load without tp_size and ep_size."
        )
    if config.comm.sync_every > 1:
        raise ConfigError(
            f"hf_zero config: `comm.sync_every` is {config.comm.sync_every}, but the model is split over ranks (tensor or "
            "expert parallel), which must take each step together. Leave `comm.sync_every` at 1."
        )
    if split.experts:
        _refuse_with_experts(config)
    if config.out_of_memory == "halve":
        raise ConfigError(
            "hf_zero config: `out_of_memory: halve` cannot be combined with a model that is split over ranks (tensor or expert "
            "parallel): the other ranks would wait for the failed one. Leave `out_of_memory` at stop."
        )
    for optimizer in optimizers:
        if find_scope(optimizer).scope in (UpdateScope.PARAMETER, UpdateScope.MODEL):
            raise ConfigError(
                f"hf_zero: the optimizer {type(optimizer).__name__} needs whole parameters for its update, but in this split "
                "model each rank has only parts of them. Use AdamW, SGD, Lion, ..., or load without tp_size and ep_size."
            )


def _refuse_with_experts(config: ZeroConfig) -> None:
    """The same for experts that are split over more ranks than compute a batch together."""
    because = (
        "experts are split over more ranks than the rest of the model (ep_size above tp_size) and have separate groups"
    )
    if config.comm.shard_group_size != AUTO:
        raise ConfigError(
            f"hf_zero config: `comm.shard_group_size` is {config.comm.shard_group_size}, and {because}. The setting does not "
            "define the size of these groups. Leave `comm.shard_group_size` at auto, or give ep_size the value of tp_size."
        )
    if config.comm.secondary_shard != "none":
        raise ConfigError(
            f"hf_zero config: `comm.secondary_shard` is {config.comm.secondary_shard}, and {because}. Some of these groups may "
            "have only one rank on a node. Leave `comm.secondary_shard` at none, or give ep_size the value of tp_size."
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
                f"hf_zero: {name!r} is an embedding with `max_norm={module.max_norm}`, which scales different rows on each "
                "rank. Build it with `max_norm=None` and scale inside `with hf_zero.gathered(model, writeback=True):`, or "
                "train at `stage: 0`."
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
                f"hf_zero: {one.name!r} and {other.name!r} are two tensors in the same memory, and the engine would give them "
                "separate memory. Make them one Parameter (decoder.weight = encoder.weight), or copy one (.detach().clone()), "
                "before the model is prepared."
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


def refuse_meta(model: nn.Module) -> None:
    """Raises `ValueError` if parameters have no values."""
    on_meta = [name for name, p in model.named_parameters() if p.is_meta]
    if on_meta:
        raise ValueError(
            f"hf_zero: {len(on_meta)} parameters are on the meta device and have no values (first: {on_meta[0]!r}). Load "
            "the model with from_pretrained, or build it outside `torch.device('meta')`, before accelerator.prepare."
        )
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise ValueError(
            f"hf_zero: {lazy[0]!r} belongs to a lazy module and has no shape yet. Run a forward before accelerator.prepare and "
            "before the optimizer is built."
        )


def _refuse_without_flat_memory(model: nn.Module, ignored: frozenset[nn.Parameter]) -> None:
    """Raises `ValueError` for sparse and nested parameters and buffers, and for buffers that are DTensors, as DDP does."""
    for name, parameter in model.named_parameters():
        if parameter not in ignored and (parameter.layout is not torch.strided or parameter.is_nested):
            kind = "nested" if parameter.is_nested else f"of layout {parameter.layout}"
            raise ValueError(
                f"hf_zero: the parameter {name!r} is {kind}, but buckets hold dense tensors (torch.strided). Train a dense "
                "Parameter, and convert it in the layer's forward."
            )
    left_out = ignored_by_ddp(model)
    for name, buffer in model.named_buffers():
        is_strange = buffer.layout is not torch.strided or buffer.is_nested or is_dtensor(buffer)
        if is_strange and name not in left_out:
            raise ValueError(
                f"hf_zero: the buffer {name!r} is a {type(buffer).__name__} of layout {buffer.layout}, but rank 0's buffers "
                "are sent as dense tensors (torch.strided). Keep it in a plain attribute of the module."
            )


def check_parameters(model: nn.Module, config: ZeroConfig) -> None:
    """Raises `ValueError` or `ConfigError` for a model that cannot be trained or, at stage 3, sharded."""
    refuse_other_engines(model)
    refuse_second_engine(model)
    of_jit = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    scripted = [name for name, module in of_jit if any(True for _ in module.parameters())]
    if scripted:
        raise ValueError(
            f"hf_zero: {scripted[0]!r} is a torch.jit module, which hides its parameters and calls from Python. Pass the plain "
            "module, and compile inside the layers if needed (layer.forward = torch.compile(layer.forward))."
        )
    refuse_meta(model)
    ignored = ignored_parameters(model)
    _refuse_without_flat_memory(model, ignored)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p not in ignored]
    if not trained and config.stage < 3:
        raise ValueError(
            "hf_zero: no parameter of the model requires a gradient, so there is nothing to train or shard. Set requires_grad "
            "before prepare, or use stage 3, which also shards frozen parameters."
        )
    strange = [(name, p.dtype) for name, p in trained if not p.dtype.is_floating_point]
    if strange:
        name, dtype = strange[0]
        raise ValueError(
            f"hf_zero: {name!r} is trained in {dtype}, but buckets hold real numbers. Keep it as "
            "nn.Parameter(torch.view_as_real(weight)), and compute with torch.view_as_complex(self.weight) in forward."
        )
    if config.comm.quantizes:
        other = [
            (name, p)
            for name, p in model.named_parameters()
            if p.is_floating_point() and p.dtype not in FLOAT_DTYPES and not is_packed(p)
        ]
        if other:
            raise ConfigError(
                "hf_zero config: `comm.weights` and `comm.gradients` quantize float32 and 16-bit parameters, but "
                f"{other[0][0]!r} is {other[0][1].dtype}. Leave them at none, or train in float32 or bfloat16."
            )
    for name, p in model.named_parameters():
        if p.requires_grad and p not in ignored:
            refuse_inner_tensors(name, p)
        elif p not in ignored:
            refuse_unpackable(name, p, sharded=config.stage == 3)
