"""The table of dtypes: of parameters, gradients as they travel, masters and moments."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import torch

from ..buckets.bucket import Bucket
from ..buckets.precision import Precision
from ..config import ZeroConfig
from ..layout.blocks import is_in_blocks
from ..optimizer.state.state_kinds import state_kinds
from .report_tables import render


@dataclass(frozen=True, kw_only=True)
class DtypeRow:
    """The dtypes of parameters that go the same way, as torch spells them, such as "float32"; "none" where there is nothing.

    Attributes:
        parameter: in forward and backward.
        gradient: as autograd makes it.
        reduce: in which it travels between the ranks.
        accumulation: of a gradient that waits for further micro-batches.
        step: of the reduced gradient, and of the tensors that the optimizer updates.
        master: of the copy that is kept from step to step; the shard itself where stage 3 casts what it gathers.
        moments: of the optimizer's state with one value an element, between steps.
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
    """One row for each way that trained parameters go."""

    rows: tuple[DtypeRow, ...]

    def table(self) -> str:
        return render("Dtypes", tuple(DtypeRow.__dataclass_fields__), [astuple(row) for row in self.rows])


def dtypes_of(precision: Precision, config: ZeroConfig, moments: Iterable[torch.dtype]) -> DtypeRow:
    """The row of one bucket.

    Args:
        moments: of the optimizer's state tensors.
    """
    accumulation = precision.param if config.accumulates_locally else precision.master
    return DtypeRow(
        parameter=_name(precision.param),
        gradient=_name(precision.param),
        reduce=_name(precision.reduce),
        accumulation=_name(accumulation),
        step=_name(precision.master),
        master=_name(precision.master) if precision.keeps_master or precision.casts else "none",
        moments=", ".join(sorted({_name(dtype) for dtype in moments})) or "none",
    )


def report_dtypes(
    buckets: Sequence[Bucket], config: ZeroConfig, optimizers: Sequence[torch.optim.Optimizer]
) -> DtypeReport:
    """The dtypes of an engine's buckets. Moments are those of a trial step; "none" where an optimizer cannot be tried."""
    rows = []
    for bucket in buckets:
        index, group = bucket.key.optimizer, bucket.key.group
        optimizer = optimizers[index] if index >= 0 else None
        tried = state_kinds(optimizer, optimizer.param_groups[group], bucket.precision.master) if optimizer else None
        moments = {dtype for _, dtype in tried or ()}
        if config.quantises_moments and moments:
            moments = {torch.uint8 if is_in_blocks(slot.parameter.numel()) else torch.float32 for slot in bucket.slots}
        rows.append(dtypes_of(bucket.precision, config, moments))
    return DtypeReport(rows=tuple(dict.fromkeys(rows)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
