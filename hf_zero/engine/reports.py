"""Reports of memory and dtypes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import nn

from ..buckets.bucket import Bucket
from ..buckets.packed import bytes_of_scales
from ..config import ZeroConfig
from ..device import peak_bytes
from ..layout.blocks import is_in_blocks
from ..offload.host_tiers import HostTier
from ..optimizer.nested_state import flat_state
from ..optimizer.storage import OptimizerStorage
from ..optimizer.trial_step import state_kinds
from ..stage3.sharded_model import ShardedModel
from ..step.sharded_optimizer import ShardedOptimizer
from .parts import Parts
from .report_tables import MemoryReport, MemoryRow, TrafficReport, render
from .state_rows import state_of

# ---- Bytes on this rank by kind, counted from the tensors themselves ----


def report_memory(
    model: nn.Module, parts: Parts, optimizers: Sequence[ShardedOptimizer], gradient_bytes: Mapping[str, int]
) -> MemoryReport:
    """Counts bytes of state by kind, next to DDP's bytes of the same kind.

    Args:
        gradient_bytes: bytes of the gradient store and of the wire, by kind.
    """
    buckets, sharded, storage, outer = parts.buckets, parts.sharded, parts.storage, parts.outer
    trained = [slot.parameter for bucket in buckets for slot in bucket.slots]
    moved = 0 if parts.activations is None else parts.activations.most_bytes
    return MemoryReport(
        rows=(
            *_parameter_rows(model, buckets, trained, sharded, parts.parameter_tier.name),
            *_gradient_rows(buckets, _kept_bytes(trained, sharded), gradient_bytes),
            *_state_rows(buckets, trained, optimizers, storage),
            *(
                []
                if outer is None
                else _in_memory("outer steps", {bucket: outer.held_bytes(bucket) for bucket in buckets})
            ),
            MemoryRow(kind="gathered parameters, at most", bytes=sharded.schedule.peak_bytes, ddp_bytes=0),
            *([MemoryRow(kind="activations, at most", bytes=moved, ddp_bytes=0, where="host memory")] if moved else []),
        ),
        peak_bytes=peak_bytes(parts.device),
        traffic=_traffic(parts),
        kernels=storage.choice.report(),
    )


def _traffic(parts: Parts) -> TrafficReport | None:
    """Counts the traffic of files, if there are files."""
    files = parts.tier.files or parts.parameter_tier.files
    if files is None:
        return None
    read, written = files.moved_bytes
    return TrafficReport(
        folder=files.folder.path,
        held_bytes=sum(shard.file.nbytes for shard in files.shards),
        window_bytes=parts.storage.window_bytes(),
        read_bytes_a_step=read,
        written_bytes_a_step=written,
    )


def _parameter_rows(
    model: nn.Module,
    buckets: Sequence[Bucket],
    trained: Sequence[nn.Parameter],
    sharded: ShardedModel,
    where: str,
) -> list[MemoryRow]:
    trained_bytes = _kept_bytes(trained, sharded)
    parameter_bytes = sum(bucket.memory.lasting_bytes for bucket in buckets)
    # Unsharded parameters of a sharded model. Below stage 3 there are none.
    small = [parameter for parameter in trained if parameter not in sharded.unit_of]
    kept_whole = 0 if sharded.is_empty else sum(parameter.nbytes for parameter in small)
    frozen = set(model.parameters()) - set(trained)
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers()) + bytes_of_scales(model)
    frozen_ddp = _kept_bytes(frozen, sharded) + buffer_bytes
    frozen_here = sum(p.nbytes for p in frozen if p not in sharded.unit_of) + buffer_bytes
    frozen_row = MemoryRow(kind="frozen parameters", bytes=sharded.frozen_bytes, ddp_bytes=0, where=where)
    is_elsewhere = frozen_row.where != "device" and frozen_row.bytes > 0
    return [
        MemoryRow(
            kind="parameters", bytes=parameter_bytes - kept_whole, ddp_bytes=trained_bytes - kept_whole, where=where
        ),
        MemoryRow(kind="parameters kept whole", bytes=kept_whole, ddp_bytes=kept_whole),
        MemoryRow(
            kind="frozen parameters and buffers",
            bytes=frozen_here + (0 if is_elsewhere else frozen_row.bytes),
            ddp_bytes=frozen_ddp,
        ),
        *([frozen_row] if is_elsewhere else []),
        *_in_tiers("fp32 master", {b: b.master.nbytes if b.keeps_master else 0 for b in buckets}),
    ]


def _kept_bytes(parameters: Iterable[nn.Parameter], sharded: ShardedModel) -> int:
    """Returns bytes of whole parameters in their stored dtype, as in DDP."""
    units = sharded.unit_of
    return sum(p.numel() * units[p][1].bucket.precision.kept.itemsize if p in units else p.nbytes for p in parameters)


def _gradient_rows(buckets: Sequence[Bucket], trained_bytes: int, held_bytes: Mapping[str, int]) -> list[MemoryRow]:
    kept = {kind: held_bytes[kind] for kind in ("gradient residuals", "secondary shards")}
    # If whole gradients live until the step, they are on the device, even if their reduced shards are offloaded.
    where = dict.fromkeys([] if held_bytes["gradient buffers"] else ["device"])
    where |= dict.fromkeys(b.tier.scratch_name if b.tier.is_offloaded else "device" for b in buckets)
    return [
        MemoryRow(
            kind="gradients",
            bytes=held_bytes["gradients"],
            ddp_bytes=trained_bytes,
            where=", ".join(where) or "device",
        ),
        *(MemoryRow(kind=kind, bytes=nbytes, ddp_bytes=0) for kind, nbytes in kept.items() if nbytes),
        MemoryRow(kind="gradient buffers", bytes=held_bytes["gradient buffers"], ddp_bytes=trained_bytes),
    ]


def _state_rows(
    buckets: Sequence[Bucket],
    trained: Sequence[nn.Parameter],
    optimizers: Sequence[ShardedOptimizer],
    storage: OptimizerStorage,
) -> list[MemoryRow]:
    window_bytes = storage.window_bytes()
    own_numel = sum(row.tensor.numel() for b in buckets for row in b.rows if state_of(optimizers, row))
    # DDP has the same state per element for all elements of the trained parameters, not only for this rank's rows.
    ddp_share = sum(parameter.numel() for parameter in trained) / own_numel if own_numel else 0.0
    shown = {bucket: _state_tensors(bucket, optimizers) for bucket in buckets}
    rows = _in_tiers(
        "optimizer state",
        {bucket: storage.state_bytes(bucket, tensors) for bucket, tensors in shown.items()},
        {bucket: sum(tensor.nbytes for tensor in tensors) * ddp_share for bucket, tensors in shown.items()},
    )
    # If only some buckets are offloaded, they are the first ones.
    if window_bytes:
        tier = buckets[0].tier
        # Buffers of files are in host memory, wherever the step is.
        where = HostTier.name if tier.files is not None else tier.scratch_name
        rows.append(MemoryRow(kind="window, during the step", bytes=window_bytes, ddp_bytes=0, where=where))
    return rows


def _in_tiers(
    kind: str, nbytes: Mapping[Bucket, int], ddp_bytes: Mapping[Bucket, float] | None = None
) -> list[MemoryRow]:
    """Returns a row for each tier with a nonzero number of bytes, and at least one row."""
    return _by_tier(kind, {bucket: bucket.tier.name for bucket in nbytes}, nbytes, ddp_bytes or {})


def _in_memory(kind: str, nbytes: Mapping[Bucket, int]) -> list[MemoryRow]:
    """Counts state in memory, also if the tier keeps state in files."""
    return _by_tier(kind, {bucket: bucket.tier.scratch_name for bucket in nbytes}, nbytes, {})


def _by_tier(
    kind: str, tier_of: Mapping[Bucket, str], nbytes: Mapping[Bucket, int], ddp_bytes: Mapping[Bucket, float]
) -> list[MemoryRow]:
    found: dict[str, tuple[int, float]] = {}
    for bucket, tier in tier_of.items():
        so_far, ddp_so_far = found.get(tier, (0, 0.0))
        found[tier] = (so_far + nbytes[bucket], ddp_so_far + ddp_bytes.get(bucket, 0.0))
    first = next(iter(found), "device")
    held = {name: sums for name, sums in found.items() if sums[0]} or {first: (0, 0.0)}
    return [
        MemoryRow(kind=kind, bytes=nbytes, ddp_bytes=round(ddp_bytes), where=name)
        for name, (nbytes, ddp_bytes) in held.items()
    ]


def _state_tensors(bucket: Bucket, optimizers: Sequence[ShardedOptimizer]) -> list[torch.Tensor]:
    """Returns a bucket's entries in `optimizer.state`, without scalars such as the step count."""
    states = [flat_state(state_of(optimizers, row)).values() for row in bucket.rows]
    return [value for state in states for value in state if torch.is_tensor(value) and value.dim() > 0]


# ---- The table of dtypes: parameters, gradients, masters and moments ----


@dataclass(frozen=True, kw_only=True)
class DtypeRow:
    """Dtypes shared by some of the parameters, in torch's spelling ("float32"); "none" for no tensor.

    Attributes:
        parameter: dtype in forward and backward.
        gradient: dtype of autograd's gradient.
        reduce: dtype in which the gradient is reduced.
        accumulation: dtype of a gradient that waits for further micro-batches.
        step: dtype of the reduced gradient, and of the tensors updated by the optimizer.
        master: dtype of the copy kept from step to step; of the shard itself if stage 3 casts in gathers.
        moments: dtype of the elementwise optimizer state between steps.
    """

    parameter: str
    gradient: str
    reduce: str
    accumulation: str
    step: str
    master: str
    moments: str


@dataclass(frozen=True, kw_only=True)
class DtypeReport:
    """One row for each different combination of dtypes of trained parameters."""

    rows: tuple[DtypeRow, ...]

    def table(self) -> str:
        return render("Dtypes", tuple(DtypeRow.__dataclass_fields__), [astuple(row) for row in self.rows])


def report_dtypes(
    buckets: Sequence[Bucket], config: ZeroConfig, optimizers: Sequence[torch.optim.Optimizer]
) -> DtypeReport:
    """Returns the dtypes of an engine's buckets. Moments are from a trial step; "none" if an optimizer cannot be tried."""
    rows = []
    for bucket in buckets:
        index, group, precision = bucket.key.optimizer, bucket.key.group, bucket.precision
        optimizer = optimizers[index] if index >= 0 else None
        tried = state_kinds(optimizer, optimizer.param_groups[group], precision.master) if optimizer else None
        moments = {dtype for _, dtype in tried or ()}
        if config.quantizes_moments and moments:
            moments = {torch.uint8 if is_in_blocks(slot.parameter.numel()) else torch.float32 for slot in bucket.slots}
        row = DtypeRow(
            parameter=_name(precision.param),
            gradient=_name(precision.param),
            reduce=_name(precision.reduce),
            accumulation=_name(precision.param if config.accumulates_locally else precision.master),
            step=_name(precision.master),
            master=_name(precision.master) if precision.keeps_master or precision.casts else "none",
            moments=", ".join(sorted(map(_name, moments))) or "none",
        )
        rows.append(row)
    return DtypeReport(rows=tuple(dict.fromkeys(rows)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
