"""What this rank holds, counted from what is there."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ..device import peak_bytes
from .buckets import Bucket
from .holder import StateHolder
from .optimizer import ShardedOptimizer
from .reports import MemoryReport, MemoryRow
from .sharded_model import ShardedModel
from .state_rows import state_of


def report_memory(
    model: nn.Module,
    buckets: Sequence[Bucket],
    gradient_bytes: Mapping[str, int],
    optimizers: Sequence[ShardedOptimizer],
    sharded: ShardedModel,
    holder: StateHolder,
    device: torch.device,
) -> MemoryReport:
    """Bytes of state by kind, and what DDP holds of the same kind.

    Args:
        buckets: of trained parameters.
        gradient_bytes: of the gradient store, by kind.
        holder: of the optimizer state.
    """
    traffic, copy_bytes = holder.report(), holder.copy_bytes()
    trained = [slot.parameter for bucket in buckets for slot in bucket.slots]
    trained_bytes = sum(parameter.nbytes for parameter in trained)
    trained_numel = sum(parameter.numel() for parameter in trained)
    parameter_bytes = sum(bucket.memory.lasting_bytes for bucket in buckets)
    # Below stage 3 all are whole, and none is kept so beside others that are not.
    small = [slot.parameter for b in buckets for slot in b.slots if slot.parameter not in sharded.unit_of]
    kept_whole = 0 if sharded.is_empty else sum(parameter.nbytes for parameter in small)
    frozen = set(model.parameters()) - set(trained)
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    frozen_here = sum(p.nbytes for p in frozen if p not in sharded.unit_of) + sharded.own_bytes(trained=False)
    state_in = _by_tier(buckets, lambda bucket: _state_bytes(bucket, optimizers))
    masters_in = _by_tier(buckets, lambda bucket: bucket.master.nbytes if bucket.precision.keeps_master else 0)
    own_numel = sum(row.tensor.numel() for b in buckets for row in b.rows if state_of(optimizers, row))
    residuals = gradient_bytes["residuals"]
    # Where whole gradients last, they are on the device, and their reduced shards are copied from there.
    gradients_in = dict.fromkeys([] if gradient_bytes["gradient buffers"] else ["device"])
    gradients_in |= dict.fromkeys(b.tier.scratch_name if b.tier.is_apart else "device" for b in buckets)
    return MemoryReport(
        rows=(
            MemoryRow(kind="parameters", bytes=parameter_bytes - kept_whole, ddp_bytes=trained_bytes - kept_whole),
            MemoryRow(kind="parameters kept whole", bytes=kept_whole, ddp_bytes=kept_whole),
            MemoryRow(
                kind="frozen parameters and buffers",
                bytes=frozen_here + buffer_bytes,
                ddp_bytes=sum(p.nbytes for p in frozen) + buffer_bytes,
            ),
            *(
                MemoryRow(kind="fp32 master", bytes=nbytes, ddp_bytes=0, where=where)
                for where, nbytes in masters_in.items()
            ),
            MemoryRow(
                kind="gradients",
                bytes=gradient_bytes["gradients"],
                ddp_bytes=trained_bytes,
                where=", ".join(gradients_in) or "device",
            ),
            *([MemoryRow(kind="gradient residuals", bytes=residuals, ddp_bytes=0)] if residuals else []),
            MemoryRow(kind="gradient buffers", bytes=gradient_bytes["gradient buffers"], ddp_bytes=trained_bytes),
            *(
                MemoryRow(
                    kind="optimizer state",
                    bytes=nbytes,
                    ddp_bytes=nbytes * trained_numel // own_numel if own_numel else 0,
                    where=where,
                )
                for where, nbytes in state_in.items()
            ),
            *([MemoryRow(kind="window, during the step", bytes=traffic.window_bytes, ddp_bytes=0)] if traffic else []),
            *(
                [MemoryRow(kind="copies of the state", bytes=copy_bytes, ddp_bytes=0, where="host memory")]
                if copy_bytes
                else []
            ),
            MemoryRow(kind="gathered parameters, at most", bytes=sharded.schedule.peak_bytes, ddp_bytes=0),
        ),
        peak_bytes=peak_bytes(device),
        traffic=traffic,
        early=holder.early_report(),
    )


def _by_tier(buckets: Sequence[Bucket], nbytes_of: Callable[[Bucket], int]) -> dict[str, int]:
    """Name of the tier → bytes of its buckets; at least one tier, and others only where they hold something."""
    found: dict[str, int] = {}
    for bucket in buckets:
        found[bucket.tier.name] = found.get(bucket.tier.name, 0) + nbytes_of(bucket)
    first = next(iter(found), "device")
    return {name: nbytes for name, nbytes in found.items() if nbytes} or {first: 0}


def _state_bytes(bucket: Bucket, optimizers: Sequence[ShardedOptimizer]) -> int:
    """Bytes of a bucket's optimizer state, without scalars such as the step count."""
    return sum(
        value.nbytes
        for row in bucket.rows
        for value in state_of(optimizers, row).values()
        if torch.is_tensor(value) and value.dim() > 0
    )
