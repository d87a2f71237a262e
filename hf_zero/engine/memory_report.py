"""What this rank holds, counted from what is there."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..device import peak_bytes
from ..offload.tier import Tier
from .buckets import Bucket
from .optimizer import ShardedOptimizer
from .reports import MemoryReport, MemoryRow, TrafficReport
from .sharded_model import ShardedModel
from .state_rows import state_of


def report_memory(
    model: nn.Module,
    buckets: Sequence[Bucket],
    gradient_bytes: Mapping[str, int],
    optimizers: Sequence[ShardedOptimizer],
    sharded: ShardedModel,
    tier: Tier,
    traffic: TrafficReport | None,
    device: torch.device,
) -> MemoryReport:
    """Bytes of state by kind, and what DDP holds of the same kind.

    Args:
        buckets: of trained parameters.
        gradient_bytes: of the gradient store, by kind.
        tier: where masters and optimizer state are.
        traffic: of state in files.
    """
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
    state = sum(optimizer.state_bytes() for optimizer in optimizers)
    rows = [row for bucket in buckets for row in bucket.rows if state_of(optimizers, row)]
    own_numel = sum(row.tensor.numel() for row in rows)
    # Where whole gradients last, they are on the device, and their reduced shards are copied from there.
    gradients_in = (
        tier.name if gradient_bytes["gradient buffers"] else f"device, {tier.name}" if tier.is_apart else "device"
    )
    return MemoryReport(
        rows=(
            MemoryRow(kind="parameters", bytes=parameter_bytes - kept_whole, ddp_bytes=trained_bytes - kept_whole),
            MemoryRow(kind="parameters kept whole", bytes=kept_whole, ddp_bytes=kept_whole),
            MemoryRow(
                kind="frozen parameters and buffers",
                bytes=frozen_here + buffer_bytes,
                ddp_bytes=sum(p.nbytes for p in frozen) + buffer_bytes,
            ),
            MemoryRow(
                kind="fp32 master",
                bytes=sum(b.master.nbytes for b in buckets if b.precision.has_master),
                ddp_bytes=0,
                where=tier.name,
            ),
            MemoryRow(
                kind="gradients",
                bytes=gradient_bytes["gradients"],
                ddp_bytes=trained_bytes,
                where=gradients_in,
            ),
            MemoryRow(kind="gradient buffers", bytes=gradient_bytes["gradient buffers"], ddp_bytes=trained_bytes),
            MemoryRow(
                kind="optimizer state",
                bytes=state,
                ddp_bytes=state * trained_numel // own_numel if own_numel else 0,
                where=tier.name,
            ),
            *([MemoryRow(kind="window, during the step", bytes=traffic.window_bytes, ddp_bytes=0)] if traffic else []),
            MemoryRow(kind="gathered parameters, at most", bytes=sharded.schedule.peak_bytes, ddp_bytes=0),
        ),
        peak_bytes=peak_bytes(device),
        traffic=traffic,
    )
