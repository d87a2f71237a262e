"""Traces a model's activations, and measures free memory."""

import copy
import dataclasses
import gc
import inspect
import logging
import os
import resource
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..buckets.kept_dtypes import uncast_parameters
from ..buckets.packed import is_packed
from ..config import AUTO
from ..device import free_bytes
from ..forecast.fit import RESERVE, PlanError
from ..forecast.peak import Activations, Live
from ..hooks.tensors import differentiable_tensors
from .batches import exchanged_bytes, inner_model, part_of
from .fake_operations import FakeOperations
from .meta_models import checkpoint, is_checkpointed

# ---- The memory of a micro-batch: a forward and a backward on fake tensors, counted while they live ----
#
# [Note: a trace] FakeTensorMode runs the model's own forward and autograd's own backward; only the kernels do nothing. So the
# trace sees which tensors the current attention implementation saves, tensors saved twice or as views, recomputation by
# checkpointing, casts by autocast and by the loss, and when each tensor is freed. Storages are counted from their allocation
# until their last reference is dropped. Memory used inside a single kernel call is not counted. If a GPU is in use, the fake
# tensors claim to be on it, because `sdpa` attention and dropout save different tensors on a GPU than on the host.

_log = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_ATTENTION_ON_HOST = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ITS_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_ASKS_FOR_DEVICE = torch.ops.prim.device.default
"""Makes up two thirds of the calls in a trace, because autograd calls it for every gradient."""

_SUM = torch.ops.aten.add.Tensor

_PRODUCT_IN_FOUR_BITS = "bitsandbytes.gemm_4bit"
"""Arguments: inputs, codes and the weight's shape (outputs, inputs)."""

_BETWEEN_RANKS = ("c10d", "_c10d_functional")
"""Namespaces of torch's collectives."""

_TILE = 4096, 32768
"""Tokens and words per tile of logits in TRL's chunked loss. Liger's and torch's tiles are smaller."""

_TILES_ON_HOST = 8
"""Tiles alive at a time in TRL's loss, if no Triton kernel computes in place."""

Batch = Mapping[str, Any]


def trace(
    model: nn.Module,
    batch: Batch | Callable[[], Batch],
    *,
    shape: str,
    tokens: int,
    autocast: torch.dtype | None = None,
    param_dtype: str = AUTO,
    recomputes: bool = False,
    on_host: bool = True,
    sp_size: int = 1,
) -> Activations:
    """Counts the memory of a forward and a backward of `model`, without changing the model or allocating memory.

    Args:
        model: the model.
        batch: keyword arguments of the model's forward, on any device including meta; or a function that makes them.
        shape: the micro-batch's shape, in words.
        tokens: the micro-batch's elements on a rank.
        autocast: the dtype of mixed precision; None without.
        param_dtype: the config's dtype of floating-point parameters; `auto` does not change them.
        recomputes: whether activation checkpointing is on, regardless of the model's own state.
        on_host: whether training runs on the host.
        sp_size: number of ranks that compute each sequence together; counts one rank's part.

    Raises:
        PlanError: the model cannot be copied, or its forward needs values.
    """
    if sp_size > 1:
        same: dict[str, Any] = {"shape": shape, "tokens": tokens, "autocast": autocast, "param_dtype": param_dtype}
        same |= {"recomputes": recomputes, "on_host": on_host}
        whole = trace(model, batch, **same)
        # A rank's tokens with all heads have as many bytes as the whole sequence with a part of the heads, but fewer
        # operations.
        part = trace(model, lambda: part_of(batch() if callable(batch) else batch, sp_size), **same)
        passes = 3 if recomputes or is_checkpointed(model) else 2
        itemsize = (autocast or next(p.dtype for p in model.parameters() if p.is_floating_point())).itemsize
        return dataclasses.replace(
            part,
            flops=whole.flops // sp_size,
            forward_flops=whole.forward_flops // sp_size,
            exchanged_bytes=passes * exchanged_bytes(model, tokens, sp_size, itemsize),
        )
    # Only a GPU in use: if a plan in a notebook initialized the GPU, a launcher could no longer fork ranks. Without a GPU,
    # torch cannot choose a GPU kernel, and the process would end at the first gradient.
    has_gpu = not on_host and torch.cuda.is_initialized()
    devices = [torch.device("cuda", torch.cuda.current_device())] if has_gpu else []
    ways: dict[str, Any] = {
        "autocast": autocast,
        "param_dtype": param_dtype,
        "recomputes": recomputes,
        "on_host": on_host,
    }
    for device in (*devices, _HOST):
        try:
            with _without_collections():
                return _traced(model, batch, device, shape=shape, tokens=tokens, **ways)
        except PlanError:
            raise
        except Exception as error:
            if device != _HOST:
                # An operation may lack a fake implementation on a GPU but have one on the host.
                _log.info("hf_zero: activations are counted as on the host (%s: %s).", type(error).__name__, error)
                continue
            # The model's code may read values, which fake tensors lack.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise PlanError(
                f"hf_zero: activations of {type(model).__name__} cannot be traced without values ({type(error).__name__}: "
                f"{reason[0][:200]}). Plan without them, or measure a step."
            ) from error
    raise AssertionError("the host is tried last")


def _traced(
    model: nn.Module,
    batch: "Batch | Callable[[], Batch]",
    device: torch.device,
    *,
    shape: str,
    tokens: int,
    autocast: torch.dtype | None,
    param_dtype: str,
    recomputes: bool,
    on_host: bool,
) -> Activations:
    """Traces with fake tensors claiming to be on `device`."""
    mode, like = FakeTensorMode(allow_non_fake_inputs=True), partial(_like, device=device)
    living = _LivingBytes(FakeOperations(mode), _vocabulary_of(model), tiles=_TILES_ON_HOST if on_host else 1)
    fake = _without_memory(model, mode, living, None if param_dtype == AUTO else getattr(torch, param_dtype), like)
    if recomputes:
        checkpoint(fake)
    in_chunks = _take_out_kernels(fake, on_host=on_host)
    with mode:
        made = batch() if callable(batch) else batch
        inputs = recursively_apply(like, dict(made))
    if _has_fused_head(inner_model(fake)):
        inputs[_FUSED_HEAD] = True
    recursively_apply(living.leave_out, inputs)
    casts: AbstractContextManager = torch.autocast(device.type, autocast) if autocast else nullcontext()
    with torch.random.fork_rng(devices=[]), _packed_as(made.get("position_ids")), mode, living:
        with torch.enable_grad(), casts:
            loss = _loss_of(fake(**inputs))
        saved, saved_logits, forward_flops = living.now, living.logits, living.flops
        loss.backward()
        del loss
    traced = Activations(
        curve=tuple(living.curve),
        saved_bytes=saved,
        flops=living.flops,
        forward_flops=forward_flops,
        tokens=tokens,
        shape=shape,
        saved_logits=saved_logits,
        tile_bytes=living.tile_bytes,
        pinned_bytes=living.pinned_bytes,
    )
    return traced.in_chunks() if in_chunks else traced


@contextmanager
def _without_collections() -> Iterator[None]:
    """Stops Python's garbage collector: scanning the objects of all imports would take as long as the trace."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _packed_as(position_ids: torch.Tensor | None) -> Iterator[None]:
    """Sets in transformers whether samples contain several packed sequences, which fake positions cannot show.

    Otherwise a sample of one sequence is traced with a mask of length x length in each layer.

    Args:
        position_ids: the batch's positions with values; None if the model makes them.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    stock = getattr(masks, "find_packed_sequence_indices", None)
    if stock is None or (position_ids is not None and (position_ids.is_meta or stock(position_ids) is not None)):
        yield
        return
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = stock


def _vocabulary_of(model: nn.Module) -> int | None:
    """Returns the vocabulary size of a language model's head; None without a head."""
    embeddings: Any = getattr(inner_model(model), "get_output_embeddings", None)
    head = embeddings() if callable(embeddings) else None
    weight = getattr(head, "weight", None)
    return weight.shape[0] if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None


# ---- Chunked losses, which never have all logits ----
#
# TRL's trainers replace a model's forward by one that computes the loss from `lm_head.weight` tile by tile, if the batch asks
# for it. On the host a trace asks for it, too. Liger's kernels, and TRL's on an accelerator, need values. For them, the trace
# restores the class's forward in its copy of the model, and excludes this forward's logits from the figures.

_FUSED_HEAD = "fused_lm_head"
"""TRL's argument of forwards."""


def _has_fused_head(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    while forward is not None:
        if _FUSED_HEAD in inspect.signature(forward, follow_wrapped=False).parameters:
            return True
        # Look inside the wrapper of mixed precision.
        forward = getattr(forward, "__wrapped__", None)
    return False


def _take_out_kernels(model: nn.Module, *, on_host: bool) -> bool:
    """Replaces kernels' forwards by the classes' own ones. Returns whether the loss was a chunked one."""
    of_modules = [
        module
        for module in model.modules()
        if getattr(module.__dict__.get("forward"), "__module__", "").startswith("liger_kernel")
        or (not on_host and _has_fused_head(module))
    ]
    for module in of_modules:
        del module.forward
    return inner_model(model) in of_modules


def _loss_of(outputs: Any) -> torch.Tensor:
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.mean()
    found = differentiable_tensors(outputs)
    if not found:
        raise PlanError(
            "hf_zero: the model returns no tensor that a gradient can start from, so nothing can be traced."
        )
    return found[0].float().mean()


def _like(tensor: torch.Tensor, dtype: torch.dtype | None = None, *, device: torch.device) -> torch.Tensor:
    """Returns an empty tensor of this shape on the device, with `dtype` if floating-point."""
    is_cast = dtype is not None and tensor.is_floating_point()
    return torch.empty(tensor.shape, dtype=dtype if is_cast else tensor.dtype, device=device)


Like = Callable[..., torch.Tensor]
"""`_like` with the device of a trace."""


def _fake_copy(held: Any, living: "_LivingBytes", copies: dict[int, Any], like: Like) -> Any:
    """Returns a fake copy of a tensor, or of the state of a packed weight.

    Args:
        held: the tensor or state.
        living: does not count the fake tensors.
        copies: collects the copied states, which modules refer to as well.
        like: makes a fake tensor.
    """
    if isinstance(held, torch.Tensor):
        fake = like(held)
        living.leave_out(fake)
        return fake
    if not hasattr(held, "absmax"):
        return held
    alike = copies[id(held)] = copy.copy(held)
    alike.__dict__.update({name: _fake_copy(each, living, copies, like) for name, each in held.__dict__.items()})
    return alike


def _without_memory(
    model: nn.Module, mode: FakeTensorMode, living: "_LivingBytes", dtype: torch.dtype | None, like: Like
) -> nn.Module:
    """Returns a copy of the model with fake parameters and buffers, which drops each arriving gradient.

    The copy has no module hooks, because a script's own hooks would count, log or store this pass as a training step.
    """
    copies: dict[int, Any] = {}
    states: dict[int, Any] = {}
    uncast = frozenset() if dtype is None else uncast_parameters(model, dtype)
    with mode:
        for parameter in model.parameters():
            empty = like(parameter, None if parameter in uncast or is_packed(parameter) else dtype)
            copied = copies[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            if is_packed(parameter):
                # Kernels read shapes and blocks from these attributes, but no values.
                for name, held in parameter.__dict__.items():
                    copied.__dict__[name] = _fake_copy(held, living, states, like)
        for buffer in model.buffers():
            copies[id(buffer)] = like(buffer)
    for each in copies.values():
        living.leave_out(each)
    fake = copy.deepcopy(model, copies | states)
    for module in fake.modules():
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        ):
            hooks.clear()
    for name, parameter in fake.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(living.take_gradient, name))
    return fake.train()


class _LivingBytes(TorchDispatchMode):
    """Counts the bytes of live storages, and floating-point operations.

    Args:
        operations: runs the operations.
        vocabulary: vocabulary size of the model's head, by which logits are recognized.
        tiles: tiles alive at a time in a chunked loss.

    Attributes:
        now: current bytes.
        logits: the part of `now` with the shape of logits.
        curve, tile_bytes, pinned_bytes: see `Activations`.
    """

    def __init__(self, operations: FakeOperations, vocabulary: int | None, tiles: int) -> None:
        super().__init__()
        self._operations = operations
        self.now = self.logits = self.flops = self.tile_bytes = self.pinned_bytes = 0
        self.curve = [Live()]
        self._vocabulary, self._tiles = vocabulary, tiles
        self._pinned = 0
        self._known: set[int] = set()
        self._left_out: list[torch.UntypedStorage] = []

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Excludes a permanent tensor, such as a parameter."""
        storage = tensor.untyped_storage()
        # Keep the storage alive: a forward may drop it (`p.data = ...`), and a new storage could get the same id.
        self._left_out.append(storage)
        self._known.add(id(storage))

    def take_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            come = self.curve[-1].come
            self.curve.append(self._at_most(Live(gradient=name, come=come)))
            nbytes, parameter.grad = parameter.grad.nbytes, None
            self.curve.append(self._at_most(Live(gradient=name, come=come + nbytes)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _ASKS_FOR_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func.namespace in _BETWEEN_RANKS:
            # The other ranks may not be in this forward, so a collective would wait forever.
            raise PlanError("hf_zero: the model's forward communicates with other ranks")
        kwargs = dict(kwargs or {})
        # A forward may copy to host memory and fetch the copy in backward. Fake tensors cannot be pinned.
        is_pinned = bool(kwargs.pop("pin_memory", False))
        result = self._operations.run(func, args, kwargs)
        self._count_operations(func, args, kwargs, result)
        # Autograd sums gradients of one tensor in place unless the first is a view, but not under a dispatch mode, where the
        # sum of a tied weight's two gradients would be counted as a third one. Only a backward's own operations run with
        # gradients off.
        is_in_place = func is _SUM and not torch.is_grad_enabled() and args[0]._base is None
        if isinstance(result, torch.Tensor):
            self._count(result, is_pinned=is_pinned, is_in_place=is_in_place)
        else:
            recursively_apply(self._count, result, is_pinned=is_pinned, is_in_place=is_in_place)
        return result

    def _count(self, tensor: torch.Tensor, *, is_pinned: bool, is_in_place: bool) -> None:
        # A real tensor is an attribute of a module.
        if not isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        address = id(storage)
        if address in self._known:
            return
        self._known.add(address)
        nbytes = storage.nbytes()
        kind = "_pinned" if is_pinned else "logits" if self._are_logits(tensor) else "now"
        if is_pinned:
            self._pinned += nbytes
            self.pinned_bytes = max(self.pinned_bytes, self._pinned)
        else:
            self.now += nbytes
            self.logits += nbytes if kind == "logits" else 0
            if not is_in_place:
                self.curve[-1] = self._at_most(self.curve[-1])
        weakref.finalize(storage, self._forget, address, kind, nbytes)

    def _are_logits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has one number per token and word of the vocabulary."""
        if tensor.dim() < 2 or tensor.shape[-1] != self._vocabulary or not tensor.is_floating_point():
            return False
        tokens = tensor.numel() // self._vocabulary
        tile = self._tiles * min(tokens, _TILE[0]) * min(self._vocabulary, _TILE[1]) * tensor.itemsize
        self.tile_bytes = max(self.tile_bytes, tile)
        return True

    def _at_most(self, before: Live) -> Live:
        """Returns the maximum of `before` and the bytes alive now."""
        most, logits = max((before.most, before.logits), (self.now, self.logits))
        beside = max(before.without_logits, self.now - self.logits)
        return dataclasses.replace(before, most=most, logits=logits, without_logits=beside)

    def _forget(self, address: int, kind: str, nbytes: int) -> None:
        self._known.discard(address)
        if kind == "_pinned":
            self._pinned -= nbytes
            return
        self.now -= nbytes
        self.logits -= nbytes if kind == "logits" else 0

    def _count_operations(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        packet = func.overloadpacket
        if packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=result))
        elif str(packet) == _PRODUCT_IN_FOUR_BITS:
            inputs, _, (width, _) = args[:3]
            self.flops += 2 * inputs.numel() * width
        elif packet in (_ATTENTION_ON_HOST, _ITS_BACKWARD):
            # (samples, heads, length, width): two products in forward; five in backward, which recomputes the scores.
            backward = packet is _ITS_BACKWARD
            query, key = args[1:3] if backward else args[:2]
            rows, heads, length, width = query.shape
            self.flops += 2 * rows * heads * length * key.shape[-2] * width * (5 if backward else 2)


# ---- Memory still available to a rank ----

_STATUS = Path("/proc/self/status")
_LIMITED = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))


def free_for_training(device: torch.device) -> int:
    """Returns the bytes that this rank can still allocate on its training device; on the host, its share of the free memory.

    On the host this is the minimum over the system's free memory, the control group's limit, and the process's own limits.
    """
    return free_bytes(device) if device.type != "cpu" else min(free_bytes(device), _within_limits())


def reserve_on(device: torch.device) -> float:
    """Returns the share of a training device that a fitting set-up leaves free; depends on this process's allocator."""
    if device.type != "cpu":
        return RESERVE["accelerator"]
    return RESERVE["host" if "MALLOC_MMAP_THRESHOLD_" in os.environ else "host's heap"]


def _within_limits() -> int:
    """Returns the bytes left by the process's own limits."""
    left = 2**63 - 1
    used = _used() if _STATUS.is_file() else {}
    for limit, name in _LIMITED:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and name in used:
            left = min(left, max(0, soft - used[name]))
    return left


def _used() -> dict[str, int]:
    lines = (line.partition(":") for line in _STATUS.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if name.startswith("Vm")}
