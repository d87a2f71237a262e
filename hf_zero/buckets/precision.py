"""Dtypes of parameters, master weights, gradients and gathers, and the sizes of buckets."""

import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from ..comm.groups import Groups
from ..comm.ledger import Label
from ..comm.transport import Transport
from ..config import AUTO, ConfigError, ZeroConfig
from ..device import ask_for
from .packed import beside_packed

# ---- Parameters still in a memory-mapped checkpoint file, from which the engine reads this rank's part ----

_MARK = "_hf_zero_loaded"


@dataclass(frozen=True, kw_only=True)
class LoadedFromFile:
    """Marks a parameter whose data is a view of a file.

    Attributes:
        dtype: dtype in the model; the file's may differ.
    """

    dtype: torch.dtype


def mark_loaded(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Notes a parameter's dtype in the model. All ranks read its values from equal files."""
    parameter.__dict__[_MARK] = LoadedFromFile(dtype=dtype)


def is_loaded(parameter: nn.Parameter) -> bool:
    """Whether all ranks read this parameter's values from a file, so no rank has to send them."""
    return _MARK in parameter.__dict__


def wanted_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Returns the dtype in which a parameter will be trained."""
    return parameter.__dict__[_MARK].dtype if is_loaded(parameter) else parameter.dtype


def forget_loaded(parameter: nn.Parameter) -> None:
    """Removes the mark, because the parameter now has its own memory."""
    parameter.__dict__.pop(_MARK, None)


def take_from_file(parameter: nn.Parameter, device: torch.device) -> None:
    """Copies a parameter that is still in a file to the device, in the model's dtype."""
    if not is_loaded(parameter):
        return
    ask_for(parameter.data)
    # Copy even if dtype and device match: otherwise the parameter would stay a view of the mapped file.
    parameter.data = parameter.detach().to(device, wanted_dtype(parameter), copy=True)
    forget_loaded(parameter)


def take_rank_0s(parameter: nn.Parameter, device: torch.device, transport: Transport) -> None:
    """Copies rank 0's values of a parameter to this device, unless all ranks read the values from a file. Collective."""
    if is_loaded(parameter):
        return
    # As in DDP, rank 0's values are trained, regardless of the other ranks' seeds.
    with torch.no_grad():
        # Contiguous, because a collective sends memory in its order, and a rank with different strides would get permuted
        # values.
        values = parameter.detach().to(device).contiguous()
        transport.broadcast(values, Label(kind="broadcast parameters", subject="the model"))
        # If the address is the same, nothing was copied, and the broadcast has written to the parameter's own memory.
        if values.data_ptr() != parameter.data_ptr():
            parameter.data = values


# ---- The dtypes of parameters, gradients and master weights, and the owner of the cast; decided only here ----


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one bucket.

    Attributes:
        param: dtype of the parameters in forward and backward.
        kept: dtype of saved parameters, and of the shard from which stage 3 gathers and casts to `param`. Equal to `param`
            otherwise.
        reduce: dtype of gradients in collectives.
        master: dtype of the copy updated by the optimizer, and of the shard of the reduced gradient, because optimizers need
            equal dtypes. If equal to `kept`, the optimizer updates the parameters themselves.
        weights: rounds parameters in place to the quantized blocks in which they are gathered; None for an exact gather, and
            if each rank keeps an exact shard of the parameters (stage 3).
        apart: whether the master has different memory than the parameters (offload), so there is one even with equal dtypes.
        stochastic: whether parameters are the stochastically rounded master, which exists only during the step.
        adds_in_master: whether ranks sum gradients in the master dtype, regardless of `reduce`.
    """

    param: torch.dtype
    kept: torch.dtype
    reduce: torch.dtype
    master: torch.dtype
    weights: Callable[[torch.Tensor], None] | None = None
    apart: bool = False
    stochastic: bool = False
    adds_in_master: bool = False

    @cached_property
    def reduced(self) -> torch.dtype:
        """Returns the dtype of the arriving sum over the ranks. A wider dtype would hold no more digits."""
        return self.master if self.adds_in_master else self.reduce

    @cached_property
    def has_master(self) -> bool:
        """Whether the optimizer steps on tensors different from the parameters."""
        return self.apart or self.master != self.kept or self.weights is not None

    @cached_property
    def keeps_master(self) -> bool:
        """Whether the master persists between steps."""
        return self.has_master and not self.stochastic

    @cached_property
    def rounds(self) -> bool:
        """Whether the master has more digits than the saved parameter. A checkpoint then needs both."""
        return self.keeps_master and self.master != self.kept

    @cached_property
    def casts(self) -> bool:
        """Whether forward and backward use the parameters in a dtype different from `kept`."""
        return self.kept != self.param


def resolve_precision(
    config: ZeroConfig,
    model_dtype: torch.dtype,
    *,
    gathered: torch.dtype | None = None,
    apart: bool = False,
    weights: Callable[[torch.Tensor], None] | None = None,
    adds_in_master: bool = False,
) -> Precision:
    """Chooses the dtypes for parameters of `model_dtype`. A 16-bit parameter gets an fp32 master.

    Args:
        config: the engine's settings.
        model_dtype: the parameters' dtype in the model.
        gathered: the dtype to which stage 3 casts for forward and backward; None for no cast.
        apart, weights, adds_in_master: see `Precision`.

    Raises:
        ConfigError: `rounding: stochastic` with a dtype other than bfloat16, or `moments: 8bit` with float64.
    """
    kept = kept_dtype(config, model_dtype)
    param = gathered or kept
    stochastic = config.rounding == "stochastic"
    if stochastic and kept != torch.bfloat16:
        raise ConfigError(
            f"hf_zero config: `rounding: stochastic` is for bfloat16 parameters, and some are trained in {kept}. Set "
            "`param_dtype: bfloat16`, or leave `rounding` at nearest."
        )
    # In 16 bits most updates are smaller than half of a parameter's last digit and would be rounded away.
    master = torch.float32 if kept.itemsize < 4 else kept
    if config.quantises_moments and master != torch.float32:
        raise ConfigError(
            f"hf_zero config: `moments: {config.moments}` is for moments in float32, and some parameters are trained in {kept}. "
            "Leave `moments` at 32bit, or set `param_dtype: float32`."
        )
    reduce = param if config.reduce_dtype == AUTO else getattr(torch, config.reduce_dtype)
    return Precision(
        param=param,
        kept=kept,
        reduce=reduce,
        master=master,
        weights=weights,
        apart=apart,
        stochastic=stochastic,
        adds_in_master=adds_in_master,
    )


def kept_dtype(config: ZeroConfig, model_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which trained parameters of `model_dtype` are stored and saved."""
    return model_dtype if config.param_dtype == AUTO else getattr(torch, config.param_dtype)


def untrained_precision(dtype: torch.dtype, gathered: torch.dtype | None = None) -> Precision:
    """Returns the dtypes of frozen parameters: unchanged, except that stage 3 may gather in a different dtype."""
    param = gathered or dtype
    return Precision(param=param, kept=dtype, reduce=param, master=dtype)


_AUTOCAST_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""Maps accelerate's `mixed_precision` to a dtype. Under fp8, linear layers cast to float8, other layers to bfloat16."""


def resolve_casts(config: ZeroConfig, mixed_precision: str) -> ZeroConfig:
    """Completes the config under mixed precision with the dtype in which stage 3 gathers.

    Under bf16, autocast would keep a cast copy of each whole layer from its forward to its backward, and gathers would send
    float32. If layers are gathered in bfloat16, their weights need no cast and no copy is kept.

    Raises:
        ConfigError: like `check_cast_owner`.
    """
    check_cast_owner(config, mixed_precision)
    # `param_dtype: float32` requests float32 in forward and backward, so autocast does the casts.
    is_open = config.stage == 3 and config.gather_dtype == AUTO == config.param_dtype
    return replace(config, gather_dtype="bfloat16") if mixed_precision == "bf16" and is_open else config


def for_evaluation(config: ZeroConfig) -> ZeroConfig:
    """Completes the config of a model used only for evaluation: frozen parameters are gathered in the dtype of trained ones.

    A reference model with the same weights as the trained model then computes the same values.
    """
    if config.param_dtype != "bfloat16":
        return config
    return replace(config, param_dtype=AUTO, gather_dtype=config.param_dtype)


def check_cast_owner(config: ZeroConfig, mixed_precision: str) -> str:
    """Returns the owner of the cast to lower precision, for the plan. Refuses two owners with different dtypes.

    Args:
        config: the engine's settings.
        mixed_precision: accelerate's or Trainer's setting: "no", "bf16", "fp16" or "fp8".
    """
    if mixed_precision == "no":
        if config.param_dtype != AUTO:
            return f"the engine, parameters to {config.param_dtype}"
        return "nobody: parameters stay in the model's dtype"
    dtype, autocast = _AUTOCAST_DTYPES[mixed_precision], f"autocast to {mixed_precision} (accelerate)"
    if mixed_precision == "fp8":
        autocast = "linear layers to fp8 (torchao), autocast to bf16 (accelerate)"
    if mixed_precision == "fp16" and config.gather_dtype == "bfloat16":
        raise ConfigError(
            "hf_zero: two owners of the cast: mixed_precision='fp16' autocasts to float16 and the config says `gather_dtype: "
            "bfloat16`. Keep one: mixed_precision='bf16' with it, or mixed_precision='fp16' with `gather_dtype: auto`."
        )
    if config.param_dtype in (AUTO, "float32"):
        return autocast
    if config.param_dtype == dtype == "bfloat16":
        return f"the engine, parameters to bfloat16; {autocast} for what is not"
    both = ", or both" if dtype == "bfloat16" else ""
    raise ConfigError(
        f"hf_zero: two owners of the cast: mixed_precision={mixed_precision!r} autocasts to {dtype} and the config says "
        f"`param_dtype: {config.param_dtype}`. Keep one: mixed_precision={mixed_precision!r} with `param_dtype: auto`, or "
        f"`param_dtype: {dtype}` without mixed_precision for {dtype} parameters with an fp32 master{both}."
    )


# ---- Parameters excluded from casts, and the dtype of stage 3's gathers, as in FSDP's MixedPrecision ----

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def float32_names(models: Iterable[object], dtype: torch.dtype) -> re.Pattern[str] | None:
    """Returns a pattern for the names of parameters kept in float32 in a cast to `dtype`.

    Args:
        models: models or model classes.
        dtype: the target dtype of the cast.

    Returns:
        None if all parameters are cast.
    """
    names: set[str] = set()
    # `from_pretrained` loads these in float32 even if a 16-bit dtype is requested.
    for model in models if dtype in _SIXTEEN_BITS else ():
        names.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        # Like `from_pretrained`: these overflow in float16, whose largest number is 65,504. bfloat16 has float32's range.
        if dtype == torch.float16:
            names.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    # transformers treats the names as regular expressions with a star for any characters.
    return re.compile("|".join(sorted(names)).replace("*", ".*")) if names else None


def uncast_parameters(model: nn.Module, dtype: torch.dtype) -> frozenset[nn.Parameter]:
    """Returns the parameters unchanged by a cast to `dtype`: matches of `float32_names`, and batch norms.

    A batch norm's statistics are float32 buffers, and torch refuses 16-bit weights with float32 statistics.
    """
    if dtype not in _SIXTEEN_BITS:
        return frozenset()
    # Ask all modules, because wrappers such as PEFT's do not repeat the inner model's list.
    pattern = float32_names(model.modules(), dtype)
    # With duplicates, because the pattern may match a tied parameter by its second name only.
    named = model.named_parameters(remove_duplicate=False)
    kept = [parameter for name, parameter in named if pattern is not None and pattern.search(name)]
    norms = (module for module in model.modules() if hasattr(module, "track_running_stats"))
    return frozenset([*kept, *(parameter for norm in norms for parameter in norm.parameters(recurse=False))])


class GatheredDtypes:
    """Chooses the dtype to which forward and backward cast a sharded parameter: `gather_dtype`, for float32 parameters.

    `uncast_parameters` are never cast, not even by `param_dtype`.
    """

    def __init__(self, model: nn.Module, config: ZeroConfig):
        self._config = config
        self._dtype = torch.bfloat16 if config.gather_dtype == "bfloat16" else None
        self._packed = beside_packed(model)
        self._spared = self._packed | uncast_parameters(model, self._dtype) if self._dtype else frozenset()
        auto = config.param_dtype == AUTO
        self._kept = frozenset() if auto else uncast_parameters(model, getattr(torch, config.param_dtype))

    def stays(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter keeps the model's dtype, regardless of `param_dtype`."""
        return parameter in self._kept

    def is_packed(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is frozen and is a packed weight, or belongs to a packed weight's module."""
        return not parameter.requires_grad and parameter in self._packed

    def of(self, parameter: nn.Parameter, *, sharded: bool) -> torch.dtype | None:
        """Returns the dtype of the cast; None without one. `sharded`: whether a rank keeps only its shard of the parameter."""
        wanted = wanted_dtype(parameter)
        is_cast = parameter.requires_grad and parameter not in self._kept
        kept = kept_dtype(self._config, wanted) if is_cast else wanted
        return self._dtype if sharded and kept == torch.float32 and parameter not in self._spared else None


# ---- The cost of an accelerator's collective, and the bucket size derived from it ----
#
# [Note: the size of buckets] A collective of b bytes costs latency + b / bandwidth. Gradients of n bytes are reduced in n / b
# buckets during backward. If the links are the bottleneck, all buckets cost (n / b) x latency + n / bandwidth. Two
# more parts cannot be hidden: backward computes the first b bytes before any reduction starts, and the reduction of the last b
# bytes starts after backward has ended. With b / bandwidth for the last reduction, the sum is smallest at b = sqrt(n x latency
# x bandwidth). The minimum is flat: half or twice the size adds a quarter to the parts that depend on b, so the constants
# need not match the machine.
#
# The constants are from NCCL's own choice of algorithms (NVIDIA/nccl, src/graph/tuning.cc, tables baseLat and hwLat, ring
# algorithm with the protocol Simple): 8.4 us per collective, 3.4 us per step between neighbors on NVLink, 9.6 us per step
# between nodes, and a ring bandwidth of at most 235 GB/s within a node of A100s. Between nodes each accelerator has a link of
# 200 Gbit/s, and a ring uses all links of a node. The constants have not been measured with this package.

_CALL_S = 8.4e-6
_STEP_S = 3.4e-6
_STEP_BETWEEN_NODES_S = 9.6e-6
_BYTES_A_SECOND = 235e9
_LINK_BYTES_A_SECOND = 25e9


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """The cost of a reduce-scatter or an all-gather over a group of ranks."""

    latency_s: float
    bytes_a_second: float

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.bytes_a_second

    def bucket_bytes(self, total_bytes: int) -> int:
        """Returns the bucket size at which reducing `total_bytes` ends earliest; see [Note: the size of buckets]."""
        return round(math.sqrt(total_bytes * self.latency_s * self.bytes_a_second))


def cost_of(*, ranks: int, nodes: int) -> CollectiveCost:
    """Estimates a ring over `ranks` ranks, equally many on each of `nodes` nodes."""
    between = nodes - 1
    bandwidth = _BYTES_A_SECOND
    if between:
        # Each rank of a node has a link, and the ring uses all of them; the slower of link and node limits the ring.
        bandwidth = min(bandwidth, _LINK_BYTES_A_SECOND * ranks / nodes)
    return CollectiveCost(
        latency_s=_CALL_S + (ranks - 1 - between) * _STEP_S + between * _STEP_BETWEEN_NODES_S,
        bytes_a_second=bandwidth,
    )


# ---- Sizes of buckets and units: `bucket_bytes` and `unit_bytes`, or a choice by model, ranks and device ----

_MIB = 2**20
_SMALLEST_BYTES = 1 * _MIB
_LARGEST_BYTES = 25 * _MIB
_BUCKETS_A_MODEL = 8
_LARGEST_UNIT_BYTES = 32 * _MIB
"""On the host, a stage 3 unit is one bucket of each kind if it fits in this size: a layer of BERT-base has 28 MiB."""

_LARGEST_QUEUED_BYTES = 256 * _MIB
"""Limits the memory of the `GRAD_BUFFERS` in flight on an accelerator: a 7B model in bfloat16 then has 67 buckets."""

SMALLEST_UNIT_BYTES = {"cpu": 1 * _MIB, "accelerator": 16 * _MIB}
"""[Note: the least bytes of a unit]
The two gathers and the reduction of a unit cost Python about half a millisecond per step, independent of their size. In this
time gloo sends about 1 MiB, and NVLink some 100 MB. But gathered units need memory, and two or three exist at a time. 16 MiB,
less than a layer of BERT-base in float32, is negligible on a GPU and joins the layers of smaller models.
"""

_ANY = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class BucketSizes:
    """The maximum size of a bucket, in elements.

    Attributes:
        layer_numel: for a layer's buckets at stage 3.
        numel: for all other buckets.
    """

    numel: int
    layer_numel: int


def choose_sizes(model: nn.Module, config: ZeroConfig, groups: Groups, device: torch.device) -> BucketSizes:
    """Chooses the bucket sizes for a model. `bucket_bytes` refers to the smallest dtype of `reduce`.

    With `auto` on the host, see [Note: buckets on the host]. With `auto` on several accelerators, a stage 3 layer is one
    bucket of each kind regardless of its size, because it is gathered and reduced as a whole; other buckets have the cheapest
    size, see [Note: the size of buckets].
    """
    # All parameters if none is trained: stage 3 also has buckets of frozen parameters, and `min` below needs at least one.
    trained = [p for p in model.parameters() if p.requires_grad] or list(model.parameters())
    gathered = GatheredDtypes(model, config)
    dtypes = {p: (wanted_dtype(p), gathered.of(p, sharded=config.stage == 3)) for p in trained}
    itemsize = {of: resolve_precision(config, of[0], gathered=of[1]).reduce.itemsize for of in set(dtypes.values())}
    smallest = min(itemsize.values())
    total_bytes = sum(p.numel() * itemsize[dtypes[p]] for p in trained)
    if isinstance(config.bucket_bytes, int):
        numel = max(1, config.bucket_bytes // smallest)
        return BucketSizes(numel=numel, layer_numel=numel)
    if device.type == "cpu":
        numel = (_LARGEST_UNIT_BYTES if config.stage == 3 else bytes_on_host(total_bytes)) // smallest
        return BucketSizes(numel=numel, layer_numel=numel)
    numel = bytes_on_accelerators(total_bytes, groups) // smallest
    return BucketSizes(numel=numel, layer_numel=numel if groups.world_size == 1 else _ANY)


def least_unit_bytes(config: ZeroConfig, device: torch.device) -> int:
    """Returns the bytes below which consecutive layers are joined into one unit; see [Note: the least bytes of a unit]."""
    if isinstance(config.unit_bytes, int):
        return config.unit_bytes
    if config.unit_modules != AUTO:
        return 0
    return SMALLEST_UNIT_BYTES["cpu" if device.type == "cpu" else "accelerator"]


def bytes_on_host(total_bytes: int) -> int:
    """Returns the size for about eight buckets per model, between 1 MiB (calls cost) and 25 MiB (the last one is exposed).

    [Note: buckets on the host]
    Over gloo, buckets of 16 to 32 MB needed the same CPU time per step as DDP, buckets of 4 MB 5 % more, and buckets of 1 MB 7
    % more (a GPT-2 with 30 M parameters, two ranks on two cores).
    """
    return min(_LARGEST_BYTES, max(_SMALLEST_BYTES, total_bytes // _BUCKETS_A_MODEL))


def bytes_on_accelerators(total_bytes: int, groups: Groups) -> int:
    """Returns the cheapest size for the group that reduces whole buckets, up to 256 MiB and an eighth of all gradients.

    With larger buckets, the `GRAD_BUFFERS` would hold most of the gradients, which stage 2 is meant to free. A single rank
    sends nothing and gets the largest size, because each bucket costs the host some 150 us per step.
    """
    largest = min(_LARGEST_QUEUED_BYTES, total_bytes // _BUCKETS_A_MODEL)
    if groups.world_size == 1:
        return max(_SMALLEST_BYTES, largest)
    # A shard group of one rank sends nothing; the replicas all-reduce whole gradients.
    group = groups.shard if groups.shard.size > 1 else groups.replicate
    nodes = len({groups.nodes[rank] for rank in group.ranks})
    wanted = cost_of(ranks=group.size, nodes=nodes).bucket_bytes(total_bytes)
    return max(_SMALLEST_BYTES, min(largest, wanted))
