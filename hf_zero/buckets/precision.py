"""Dtypes of parameters, masters, gradients and gathers, and the size of buckets."""

import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..comm.groups import Groups
from ..comm.ledger import Label
from ..comm.transport import Transport
from ..config import AUTO, ConfigError, ZeroConfig
from ..device import ask_for

# Parameters whose values still lie in a checkpoint file, memory-mapped, until the engine takes this rank's part.

_MARK = "_hf_zero_loaded"


@dataclass(frozen=True, kw_only=True)
class LoadedFromFile:
    """What is known of a parameter whose data is a view of a file.

    Attributes:
        dtype: that the model wants; the file may have another.
    """

    dtype: torch.dtype


def mark_loaded(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Notes that every rank reads this parameter from equal files, and the dtype that it is wanted in."""
    parameter.__dict__[_MARK] = LoadedFromFile(dtype=dtype)


def is_loaded(parameter: nn.Parameter) -> bool:
    """Whether all ranks have this parameter's values from a file, so that none has to send them."""
    return _MARK in parameter.__dict__


def wanted_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype that a parameter is to be trained in."""
    return parameter.__dict__[_MARK].dtype if is_loaded(parameter) else parameter.dtype


def forget_loaded(parameter: nn.Parameter) -> None:
    """Takes the note away: the parameter has memory of its own now."""
    parameter.__dict__.pop(_MARK, None)


def take_from_file(parameter: nn.Parameter, device: torch.device) -> None:
    """Gives a parameter that still lies in a file memory of its own on the device, in the dtype that it is wanted in."""
    if not is_loaded(parameter):
        return
    ask_for(parameter.data)
    parameter.data = parameter.detach().to(device, wanted_dtype(parameter), copy=True)
    forget_loaded(parameter)


def take_rank_0s(parameter: nn.Parameter, device: torch.device, transport: Transport) -> None:
    """Puts a parameter on the device with rank 0's values, unless all ranks have them from a file. Collective."""
    if is_loaded(parameter):
        return
    # As DDP: what rank 0 has is what is trained, whatever the other ranks were seeded with.
    with torch.no_grad():
        values = parameter.detach().to(device).contiguous()
        transport.broadcast(values, Label(kind="broadcast parameters", subject="the model"))
        if values.data_ptr() != parameter.data_ptr():
            parameter.data = values


# ---- Which dtype parameters, gradients and masters have, and who casts: the one place that decides ----


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one bucket.

    Attributes:
        param: of the parameters in forward and backward.
        kept: of the parameters outside of both: of the shard that stage 3 gathers from, which it casts to `param`, and of what
            is saved. Equal to `param` everywhere else.
        reduce: in which gradients travel.
        master: of the copy that the optimizer updates; the parameters themselves where it equals `kept`. The shard of
            the reduced gradient has this dtype too, since optimizers ask for equal dtypes.
        weights: rounds parameters, in place, as the blocks do in which they come to every rank, and which leave them fewer digits
            than the master; None where they come as they are, and for those of which a rank keeps an exact shard (stage 3).
        apart: masters live in other memory than the parameters, so that there is one even where the dtypes are equal.
        stochastic: parameters are their master rounded by chance, so that it is there for the step only.
        adds_in_master: gradients are summed over the ranks in the master dtype, whatever they travel in.
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
        """In which the sum over the ranks arrives. Another one that is wider holds no more digits of it."""
        return self.master if self.adds_in_master else self.reduce

    @cached_property
    def has_master(self) -> bool:
        """Whether the optimizer steps on other tensors than the parameters."""
        return self.apart or self.master != self.kept or self.weights is not None

    @cached_property
    def keeps_master(self) -> bool:
        """Whether these last from step to step."""
        return self.has_master and not self.stochastic

    @cached_property
    def rounds(self) -> bool:
        """Whether the master has digits that the saved parameter has not, so that a checkpoint needs both."""
        return self.keeps_master and self.master != self.kept

    @cached_property
    def casts(self) -> bool:
        """Whether forward and backward see the parameters in another dtype than the one they are kept in."""
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
    """The dtypes for parameters that the model holds in `model_dtype`. A 16-bit parameter gets an fp32 master.

    Args:
        gathered: that stage 3 casts them to for forward and backward; None leaves them in the dtype that they are kept in.

    Raises:
        ConfigError: `rounding: stochastic` for other dtypes than bfloat16; `moments: 8bit` for float64.
    """
    kept = kept_dtype(config, model_dtype)
    param = gathered or kept
    stochastic = config.rounding == "stochastic"
    if stochastic and kept != torch.bfloat16:
        raise ConfigError(
            f"hf_zero config: `rounding: stochastic` is for bfloat16 parameters, and some are trained in {kept}. Set "
            "`param_dtype: bfloat16`, or leave `rounding` at nearest."
        )
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
    """The dtype in which trained parameters that the model holds in `model_dtype` are kept and saved."""
    return model_dtype if config.param_dtype == AUTO else getattr(torch, config.param_dtype)


def untrained_precision(dtype: torch.dtype, gathered: torch.dtype | None = None) -> Precision:
    """Of frozen parameters: they stay as they are, and stage 3 may gather them in another dtype."""
    param = gathered or dtype
    return Precision(param=param, kept=dtype, reduce=param, master=dtype)


_AUTOCAST_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def resolve_casts(config: ZeroConfig, mixed_precision: str) -> ZeroConfig:
    """The config of an engine under accelerate's or Trainer's mixed precision: which dtype stage 3 gathers in.

    Under bf16, autocast would keep a cast copy of each whole layer from its forward to its backward, and float32 would
    travel. Gathered in bfloat16, layers find weights that need no cast, and leave nothing behind.

    Raises:
        ConfigError: as `check_cast_owner`.
    """
    check_cast_owner(config, mixed_precision)
    # `param_dtype: float32` asks for float32 in forward and backward, and so for autocast's own casts.
    is_open = config.stage == 3 and config.gather_dtype == AUTO == config.param_dtype
    return replace(config, gather_dtype="bfloat16") if mixed_precision == "bf16" and is_open else config


def check_cast_owner(config: ZeroConfig, mixed_precision: str) -> str:
    """Who casts parameters or activations to a lower precision, in words for the plan. Refuses two that differ, and fp8.

    Args:
        mixed_precision: accelerate's or Trainer's setting: "no", "bf16", "fp16" or "fp8".
    """
    if mixed_precision == "fp8":
        raise ConfigError(
            "hf_zero: mixed_precision='fp8' is not built yet. Use mixed_precision='bf16' (Trainer: --bf16), or `param_dtype: "
            "bfloat16` in the hf_zero config without it."
        )
    if mixed_precision == "no":
        if config.param_dtype != AUTO:
            return f"the engine, parameters to {config.param_dtype}"
        return "nobody: parameters stay in the model's dtype"
    dtype, autocast = _AUTOCAST_DTYPES[mixed_precision], f"autocast to {mixed_precision} (accelerate)"
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


# Which parameters are not cast to 16 bits, and which stage 3 gathers in another dtype, as FSDP's MixedPrecision does.

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def float32_names(models: Iterable[object], dtype: torch.dtype) -> re.Pattern[str] | None:
    """A pattern to search for in the names of parameters: those with it stay float32 where the rest is cast to `dtype`.

    Args:
        models: or their classes.

    Returns:
        None where all parameters are cast.
    """
    names: set[str] = set()
    # What `from_pretrained` loads in float32 when it is asked for another dtype.
    for model in models if dtype in _SIXTEEN_BITS else ():
        names.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        if dtype == torch.float16:
            names.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    # Regular expressions, in which a star stands for any characters: so transformers reads them.
    return re.compile("|".join(sorted(names)).replace("*", ".*")) if names else None


def uncast_parameters(model: nn.Module, dtype: torch.dtype) -> frozenset[nn.Parameter]:
    """Parameters that stay as they are where the others are cast to `dtype`: what `float32_names` finds, and batch norms.

    A batch norm's statistics are float32 buffers, beside which torch refuses 16-bit weights.
    """
    if dtype not in _SIXTEEN_BITS:
        return frozenset()
    # Wrappers such as PEFT's do not repeat what the model inside them says.
    pattern = float32_names(model.modules(), dtype)
    named = model.named_parameters(remove_duplicate=False)
    kept = [parameter for name, parameter in named if pattern is not None and pattern.search(name)]
    norms = (module for module in model.modules() if isinstance(module, _NormBase))
    return frozenset([*kept, *(parameter for norm in norms for parameter in norm.parameters(recurse=False))])


class GatheredDtypes:
    """The dtype that a sharded parameter is cast to for forward and backward: `gather_dtype`, for float32 parameters.

    `uncast_parameters` are left as they are, by `param_dtype` too.
    """

    def __init__(self, model: nn.Module, config: ZeroConfig):
        self._config = config
        self._dtype = torch.bfloat16 if config.gather_dtype == "bfloat16" else None
        self._spared = uncast_parameters(model, self._dtype) if self._dtype else frozenset()
        auto = config.param_dtype == AUTO
        self._kept = frozenset() if auto else uncast_parameters(model, getattr(torch, config.param_dtype))

    def stays(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is kept in the model's dtype, whatever `param_dtype` says."""
        return parameter in self._kept

    def of(self, parameter: nn.Parameter, *, sharded: bool) -> torch.dtype | None:
        """None where it is not cast.

        Args:
            sharded: a rank keeps its shard of the parameter only.
        """
        wanted = wanted_dtype(parameter)
        is_cast = parameter.requires_grad and parameter not in self._kept
        kept = kept_dtype(self._config, wanted) if is_cast else wanted
        return self._dtype if sharded and kept == torch.float32 and parameter not in self._spared else None


# ---- What a collective of an accelerator's backend costs, and the size of buckets that follows from it ----
#
# [Note: the size of buckets] A collective of b bytes takes latency + b / bandwidth. A model's gradients, n bytes, are
# reduced behind backward in n / b of them. Where the links are what training waits for, all of it takes (n / b) x latency +
# n / bandwidth, and two parts more cannot hide: backward computes the first b bytes before anything can start, and the last
# b bytes start when backward has ended. With b / bandwidth for what the last one takes, the sum is least at b = sqrt(n x
# latency x bandwidth). Around there it is flat: half or twice that size costs a quarter more of the parts that depend on b,
# so that constants need not be those of the very machine.
#
# The constants are those that NCCL's own choice of algorithms is made by (NVIDIA/nccl, src/graph/tuning.cc, the tables
# baseLat and hwLat, the ring with the protocol Simple): 8.4 us a collective, 3.4 us a step between neighbours on NVLink,
# 9.6 us a step between nodes, and at most 235 GB/s that a ring moves inside a node of A100s. Between nodes each accelerator
# has a link of 200 Gbit/s, and a ring goes over all of a node's. Nobody has measured them with this package yet.

_CALL_S = 8.4e-6
_STEP_S = 3.4e-6
_STEP_BETWEEN_NODES_S = 9.6e-6
_BYTES_A_SECOND = 235e9
_LINK_BYTES_A_SECOND = 25e9


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """Of a reduce-scatter or an all-gather over a group of ranks."""

    latency_s: float
    bytes_a_second: float

    def seconds(self, nbytes: int) -> float:
        """For a collective of `nbytes` in all."""
        return self.latency_s + nbytes / self.bytes_a_second

    def bucket_bytes(self, total_bytes: int) -> int:
        """The size of a bucket at which reducing `total_bytes` of gradients ends soonest, see [Note: the size of buckets]."""
        return round(math.sqrt(total_bytes * self.latency_s * self.bytes_a_second))


def cost_of(*, ranks: int, nodes: int) -> CollectiveCost:
    """Of a ring over `ranks`, as many on each of `nodes`."""
    between = nodes - 1
    bandwidth = _BYTES_A_SECOND
    if between:
        bandwidth = min(bandwidth, _LINK_BYTES_A_SECOND * ranks / nodes)
    return CollectiveCost(
        latency_s=_CALL_S + (ranks - 1 - between) * _STEP_S + between * _STEP_BETWEEN_NODES_S,
        bytes_a_second=bandwidth,
    )


# How large buckets and units are: what `bucket_bytes` and `unit_bytes` say, or what suits model, ranks and device.

_MIB = 2**20
_SMALLEST_BYTES = 1 * _MIB
_LARGEST_BYTES = 25 * _MIB
_BUCKETS_A_MODEL = 8
_LARGEST_UNIT_BYTES = 32 * _MIB
"""On the host a unit of stage 3 is a bucket of each kind where it fits: a layer of BERT-base has 28 MiB."""

_LARGEST_QUEUED_BYTES = 256 * _MIB
"""On an accelerator, for the memory of the `GRAD_BUFFERS` that pass at a time: a 7B model in bfloat16 has 67 buckets then."""

SMALLEST_UNIT_BYTES = {"cpu": 1 * _MIB, "accelerator": 16 * _MIB}
"""[Note: the least bytes of a unit]
Two gathers and a reduction of a unit take Python about half a millisecond a step, whatever they carry. In that time gloo sends
about 1 MiB, and NVLink some 100 MB. But gathered units take memory, and two or three exist at a time: 16 MiB, less than a layer
of BERT-base in float32, is nothing that anybody would miss on a GPU, and joins the layers of smaller models.
"""

_ANY = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class BucketSizes:
    """Elements that a bucket should not pass.

    Attributes:
        layer_numel: of a layer's buckets at stage 3.
        numel: of all others.
    """

    numel: int
    layer_numel: int


def choose_sizes(model: nn.Module, config: ZeroConfig, groups: Groups, device: torch.device) -> BucketSizes:
    """The sizes for a model; those that `bucket_bytes` says are of the smallest dtype in which gradients travel.

    With `auto`, on the host: [Note: buckets on the host]. On several accelerators a layer of stage 3 is one bucket of each kind,
    whatever its size, since it is gathered and reduced as a whole; others have the size that costs least by buckets/precision.py.
    """
    trained = [p for p in model.parameters() if p.requires_grad] or list(model.parameters())
    gathered = GatheredDtypes(model, config)
    # What `persist_below_numel` keeps whole is small.
    dtypes = {p: (wanted_dtype(p), gathered.of(p, sharded=config.stage == 3)) for p in trained}
    itemsize = {of: resolve_precision(config, of[0], gathered=of[1]).reduce.itemsize for of in set(dtypes.values())}
    smallest = min(itemsize.values())
    total_bytes = sum(p.numel() * itemsize[dtypes[p]] for p in trained)
    if isinstance(config.bucket_bytes, int):
        numel = max(1, config.bucket_bytes // smallest)
        return BucketSizes(numel=numel, layer_numel=numel)
    if device.type == "cpu" or groups.world_size == 1:
        numel = (_LARGEST_UNIT_BYTES if config.stage == 3 else bytes_on_host(total_bytes)) // smallest
        return BucketSizes(numel=numel, layer_numel=numel)
    numel = bytes_on_accelerators(total_bytes, groups) // smallest
    return BucketSizes(numel=numel, layer_numel=_ANY)


def least_unit_bytes(config: ZeroConfig, device: torch.device) -> int:
    """Bytes below which layers that follow one another are one unit, see [Note: the least bytes of a unit]."""
    if isinstance(config.unit_bytes, int):
        return config.unit_bytes
    if config.unit_modules != AUTO:
        return 0
    return SMALLEST_UNIT_BYTES["cpu" if device.type == "cpu" else "accelerator"]


def bytes_on_host(total_bytes: int) -> int:
    """About eight buckets a model, none under 1 MiB (calls cost) or over 25 MiB (the last one is never overlapped).

    [Note: buckets on the host]
    Over gloo, buckets of 16 to 32 MB took DDP's CPU time a step, those of 4 MB 5 % more and those of 1 MB 7 % more (a GPT-2
    of 30 M parameters, two ranks on two cores).
    """
    return min(_LARGEST_BYTES, max(_SMALLEST_BYTES, total_bytes // _BUCKETS_A_MODEL))


def bytes_on_accelerators(total_bytes: int, groups: Groups) -> int:
    """What costs least over the group in which whole buckets are reduced, up to 256 MiB and an eighth of all.

    Beyond that `GRAD_BUFFERS` of them would be most of the gradients that stage 2 does not keep.
    """
    group = groups.shard if groups.shard.size > 1 else groups.replicate
    nodes = len({groups.nodes[rank] for rank in group.ranks})
    wanted = cost_of(ranks=group.size, nodes=nodes).bucket_bytes(total_bytes)
    return max(_SMALLEST_BYTES, min(_LARGEST_QUEUED_BYTES, total_bytes // _BUCKETS_A_MODEL, wanted))
