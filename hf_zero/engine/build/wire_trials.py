"""Resolves `comm.gradients: auto` and `comm.weights: auto`: times a bucket quantised and as it is, before training."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ...buckets.bucket_sizes import choose_sizes
from ...buckets.gathered_dtypes import GatheredDtypes
from ...buckets.mapped_parameters import wanted_dtype
from ...buckets.precision import resolve_precision, untrained_precision
from ...comm.groups.groups import Groups, RankGroup
from ...comm.quantised import QuantisedAllGather, QuantisedReduceScatter
from ...comm.transport import Label, Transport
from ...comm.trial import Trial, slowest_medians
from ...config import AUTO, ZeroConfig
from ...device import allocate, wait_for_device
from ...kernels.checks import FLOAT_DTYPES
from ...kernels.quantise import CODES, BlockFormat, dequantise, dequantise_sum, quantise
from .bucketing import parts_of

_IN_BLOCKS = "int8"


def resolve_formats(
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
        sizes = _sizes(kind, config, model, groups, device)
        if sizes is not None:
            trials.append(_try(kind, *sizes, config, groups, transport, device))
    chosen = dict.fromkeys(wanted, "none") | {trial.kind: _IN_BLOCKS for trial in trials if trial.pays}
    for trial in trials if groups.is_first_of_run else ():
        text = f"hf_zero: comm.{trial.kind}: auto is {chosen[trial.kind]}: {trial}"
        print(text, file=sys.stderr, flush=True)
    comm = config.comm
    comm = replace(comm, gradients=chosen.get("gradients", comm.gradients), weights=chosen.get("weights", comm.weights))
    return replace(config, comm=comm), tuple(trials)


def _sizes(
    kind: str, config: ZeroConfig, model: nn.Module, groups: Groups, device: torch.device
) -> tuple[int, torch.dtype] | None:
    """Elements of the largest bucket, and the dtype in which most elements travel; None where nothing does."""
    numels: Counter[torch.dtype] = Counter()
    largest, sizes = 0, choose_sizes(model, config, groups, device)
    gathered = GatheredDtypes(model, config)
    for part in parts_of(model, config, groups, device):
        # Frozen parameters are gathered too (stage 3).
        travelling = [p for _, p in part.parameters if p.requires_grad or kind == "weights"]
        for parameter in travelling:
            cast_to = gathered.of(parameter, sharded=part.sharded)
            numels[_dtype_of(kind, config, parameter, cast_to)] += parameter.numel()
        most = sizes.layer_numel if part.is_layer else sizes.numel
        largest = max(largest, min(most, sum(parameter.numel() for parameter in travelling)))
    if not numels:
        return None
    return largest, numels.most_common(1)[0][0]


def _dtype_of(kind: str, config: ZeroConfig, parameter: nn.Parameter, gathered: torch.dtype | None) -> torch.dtype:
    dtype = wanted_dtype(parameter)
    is_trained = parameter.requires_grad
    precision = (
        resolve_precision(config, dtype, gathered=gathered) if is_trained else untrained_precision(dtype, gathered)
    )
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
    format = BlockFormat(code=CODES[_IN_BLOCKS], block_numel=config.comm.block_numel)
    unit = groups.shard_size * groups.replicate.size * format.block_numel
    # With chance of its own: the run's is the script's.
    flat = allocate(-(-numel // unit) * unit, dtype, device).normal_(generator=torch.Generator(device).manual_seed(0))
    make_ways = {"gradients": _ways_of_gradients, "weights": _ways_of_weights}[kind]
    ways = make_ways(flat, format, config, groups, transport)
    seconds = slowest_medians(ways, transport, partial(wait_for_device, device))
    return Trial(
        kind=kind,
        bytes_sent=_bytes_sent(kind, flat, groups),
        exact_s=seconds["exact"],
        blocks_s=seconds["blocks"],
        arithmetic_s=seconds["arithmetic"],
    )


def _bytes_sent(kind: str, flat: torch.Tensor, groups: Groups) -> int:
    """By a rank, of a bucket as it is."""
    ranks, several = groups.shard_size, groups.replicate.size
    within = flat.nbytes * (ranks - 1) // ranks
    # Sums are float32.
    between = 2 * (several - 1) * (4 * flat.numel() // ranks) // several
    return within + between if kind == "gradients" else within


def _ways_of_gradients(
    flat: torch.Tensor, format: BlockFormat, config: ZeroConfig, groups: Groups, transport: Transport
) -> Mapping[str, Callable[[], None]]:
    label = Label(kind="reduce a trial", subject="gradients")
    out = allocate(flat.numel() // groups.shard_size, torch.float32, flat.device)
    part = out.chunk(groups.replicate.size)[groups.replicate.place]
    several = groups.replicate.size > 1
    sums = [(flat, out, groups.shard), *([(out, part, groups.replicate)] if several else [])]
    memory = [_BlockMemory(values, format, feedback=config.comm.error_feedback) for values, _, _ in sums]
    scatter, gather = QuantisedReduceScatter(transport, format), QuantisedAllGather(transport, format)

    def exact() -> None:
        transport.start_reduce_scatter(flat, out, label).finish()
        if several:
            transport.start_all_reduce(out, label).finish()

    def blocks() -> None:
        for (values, sum_, group), held in zip(sums, memory):
            scatter.start(values, sum_, held.residual, group, label).finish()
        if several:
            gather.start(out, part, groups.replicate, label).finish()

    def arithmetic() -> None:
        for (values, sum_, group), held in zip(sums, memory):
            quantise(values, held.codes, held.scales, format, held.residual)
            dequantise_sum(held.codes.view(group.size, -1), held.scales.view(group.size, -1), sum_, format)
        if several:
            held = memory[-1]
            quantise(part, *held.part_of(groups.replicate), format)
            dequantise(held.codes, held.scales, out, format)

    return {"exact": exact, "blocks": blocks, "arithmetic": arithmetic}


def _ways_of_weights(
    flat: torch.Tensor, format: BlockFormat, config: ZeroConfig, groups: Groups, transport: Transport
) -> Mapping[str, Callable[[], None]]:
    label = Label(kind="all-gather a trial", subject="weights")
    own = flat.chunk(groups.shard_size)[groups.shard_rank]
    held = _BlockMemory(flat, format, feedback=False)
    collective = QuantisedAllGather(transport, format)

    def arithmetic() -> None:
        quantise(own, *held.part_of(groups.shard), format)
        dequantise(held.codes, held.scales, flat, format)

    return {
        "exact": lambda: transport.start_all_gather(flat, own, label).finish(),
        "blocks": lambda: collective.start(flat, own, groups.gather, label).finish(),
        "arithmetic": arithmetic,
    }


class _BlockMemory:
    """Memory for the codes and scales of flat values, and for their residual."""

    def __init__(self, values: torch.Tensor, format: BlockFormat, *, feedback: bool):
        numel, device = values.numel(), values.device
        self.codes = allocate(format.code_bytes(numel), torch.uint8, device).zero_()
        self.scales = allocate(format.blocks(numel), torch.float32, device).zero_()
        self.residual = allocate(numel, torch.bfloat16, device).zero_() if feedback else None

    def part_of(self, group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of this rank's part."""
        return self.codes.chunk(group.size)[group.place], self.scales.chunk(group.size)[group.place]
