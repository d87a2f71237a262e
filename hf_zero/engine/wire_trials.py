"""`comm.gradients: auto` and `comm.weights: auto`: a bucket goes both ways before training, and the ranks take the better one."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..comm.groups import Groups
from ..comm.quantised import QuantisedAllGather, QuantisedReduceScatter
from ..comm.transport import Label, Transport
from ..comm.trial import Trial, slowest_medians
from ..config import AUTO, ZeroConfig
from ..device import allocate, wait_for_device
from ..kernels.checks import FLOAT_DTYPES
from ..kernels.quantise import BlockFormat, dequantise, dequantise_sum, quantise
from .build import bucket_numel_for, parts_of
from .loaded import wanted_dtype
from .precision import resolve_precision, untrained_precision

_IN_BLOCKS = "int8"


def settle_formats(
    config: ZeroConfig, model: nn.Module, groups: Groups, transport: Transport, device: torch.device
) -> tuple[ZeroConfig, tuple[Trial, ...]]:
    """The config with no `auto` left in which form gradients and weights travel, and the trials that were made for it.

    The same on all ranks; rank 0 prints a line for each trial. Collective where something is `auto`. Nothing is tried, and
    nothing quantised, where one rank has all the state, and for a model with float64 parameters, which are not.
    """
    wanted = [kind for kind in ("gradients", "weights") if getattr(config.comm, kind) == AUTO]
    possible = groups.shard_size > 1 and all(
        p.dtype in FLOAT_DTYPES for p in model.parameters() if p.is_floating_point()
    )
    trials = []
    for kind in wanted if possible else ():
        sizes = _sizes(kind, config, model, groups)
        if sizes is not None:
            trials.append(_try(kind, *sizes, config, groups, transport, device))
    chosen = dict.fromkeys(wanted, "none") | {trial.kind: _IN_BLOCKS for trial in trials if trial.pays}
    for trial in trials if groups.rank == 0 else ():
        text = f"hf_zero: comm.{trial.kind}: auto is {chosen[trial.kind]}: {trial}"
        print(text, file=sys.stderr, flush=True)
    return replace(config, comm=replace(config.comm, **chosen)), tuple(trials)


def _sizes(kind: str, config: ZeroConfig, model: nn.Module, groups: Groups) -> tuple[int, torch.dtype] | None:
    """Elements of the largest bucket, and the dtype in which most elements travel; None where nothing does."""
    numels: Counter[torch.dtype] = Counter()
    largest = 0
    for part in parts_of(model, config, groups):
        # Frozen parameters are gathered too (stage 3).
        travelling = [p for _, p in part.parameters if p.requires_grad or kind == "weights"]
        for parameter in travelling:
            numels[_dtype_of(kind, config, parameter)] += parameter.numel()
        largest = max(largest, sum(parameter.numel() for parameter in travelling))
    if not numels:
        return None
    return min(largest, bucket_numel_for(model, config)), numels.most_common(1)[0][0]


def _dtype_of(kind: str, config: ZeroConfig, parameter: nn.Parameter) -> torch.dtype:
    dtype = wanted_dtype(parameter)
    precision = resolve_precision(config, dtype) if parameter.requires_grad else untrained_precision(dtype)
    return precision.reduce if kind == "gradients" else precision.param


def _try(
    kind: str,
    numel: int,
    dtype: torch.dtype,
    config: ZeroConfig,
    groups: Groups,
    transport: Transport,
    device: torch.device,
) -> Trial:
    format = BlockFormat(bits=8, block_numel=config.comm.block_numel)
    unit = groups.shard_size * format.block_numel
    # With chance of its own: the run's is the script's.
    flat = allocate(-(-numel // unit) * unit, dtype, device).normal_(generator=torch.Generator(device).manual_seed(0))
    make_ways = {"gradients": _ways_of_gradients, "weights": _ways_of_weights}[kind]
    ways = make_ways(flat, format, config, groups, transport)
    seconds = slowest_medians(ways, transport, partial(wait_for_device, device))
    return Trial(
        kind=kind,
        bytes_sent=flat.nbytes * (groups.shard_size - 1) // groups.shard_size,
        exact_s=seconds["exact"],
        blocks_s=seconds["blocks"],
        arithmetic_s=seconds["arithmetic"],
    )


def _ways_of_gradients(
    flat: torch.Tensor, format: BlockFormat, config: ZeroConfig, groups: Groups, transport: Transport
) -> Mapping[str, Callable[[], None]]:
    ranks, label = groups.shard_size, Label(kind="reduce-scatter a trial", subject="gradients")
    out = allocate(flat.numel() // ranks, torch.float32, flat.device)
    residual = allocate(flat.numel(), torch.bfloat16, flat.device).zero_() if config.comm.error_feedback else None
    codes, scales = _blocks(flat, format)
    collective = QuantisedReduceScatter(transport, format)

    def arithmetic() -> None:
        quantise(flat, codes, scales, format, residual)
        dequantise_sum(codes.view(ranks, -1), scales.view(ranks, -1), out, format)

    return {
        "exact": lambda: transport.start_reduce_scatter(flat, out, label).finish(),
        "blocks": lambda: collective.start(flat, out, residual, ranks, label).finish(),
        "arithmetic": arithmetic,
    }


def _ways_of_weights(
    flat: torch.Tensor, format: BlockFormat, config: ZeroConfig, groups: Groups, transport: Transport
) -> Mapping[str, Callable[[], None]]:
    rank, label = groups.shard_rank, Label(kind="all-gather a trial", subject="weights")
    own = flat.chunk(groups.shard_size)[rank]
    codes, scales = _blocks(flat, format)
    own_codes, own_scales = (part.chunk(groups.shard_size)[rank] for part in (codes, scales))
    collective = QuantisedAllGather(transport, format)

    def arithmetic() -> None:
        quantise(own, own_codes, own_scales, format)
        dequantise(codes, scales, flat, format)

    return {
        "exact": lambda: transport.start_all_gather(flat, own, label).finish(),
        "blocks": lambda: collective.start(flat, own, rank, label).finish(),
        "arithmetic": arithmetic,
    }


def _blocks(flat: torch.Tensor, format: BlockFormat) -> Iterator[torch.Tensor]:
    """Memory for the codes and the scales of `flat`."""
    yield allocate(format.code_bytes(flat.numel()), torch.uint8, flat.device).zero_()
    yield allocate(format.blocks(flat.numel()), torch.float32, flat.device).zero_()
