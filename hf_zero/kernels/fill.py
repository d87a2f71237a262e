"""Many tensors into their places in one flat buffer, cast and scaled on the way, in one launch.

For gradients or parameters that cannot be views of the buffer: a loop over `copy_` launches a kernel a tensor, and a model
of small layers then waits for launches. Here a table on the device says which program copies what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .checks import FLOAT_DTYPES, check_flat
from .choose import runs_triton
from .lazy import is_interpreted, kernel
from .rounding import rounded

if TYPE_CHECKING:
    import triton.language as tl

BLOCK_NUMEL = 2048
"""Elements that a program copies at most; it takes them `STEP_NUMEL` at a time, four a thread."""

STEP_NUMEL = 512
_TAIL_NUMEL = 16


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements `start` to `start + numel` of the flat buffer, and where they come from; None for zeros."""

    start: int
    numel: int
    source: torch.Tensor | None


def fill(flat: torch.Tensor, pieces: Sequence[Piece], factor: float = 1.0) -> None:
    """Writes `source * factor`, computed in float32 and rounded to the nearest, or zeros; what lies between stays.

    On a GPU it runs on the current stream, one launch a source dtype, and the host does not wait. Where all sources begin at
    multiples of 16 bytes and all pieces at multiples of 16 elements, accesses are 16 bytes wide.

    Args:
        flat: flat, contiguous, float32, bfloat16 or float16.
        pieces: in ascending order, not overlapping; sources of any shape, contiguous, of the same three dtypes, on the
            device of `flat`.
        factor: multiplied with every source element, rounded to float32 first.

    Raises:
        ValueError: a piece does not fit or a source is of another kind.
    """
    check_flat("flat", flat, numel=flat.numel(), device=flat.device, dtypes=FLOAT_DTYPES)
    end = 0
    for index, piece in enumerate(pieces):
        if piece.start < end or piece.start + piece.numel > flat.numel():
            raise ValueError(
                f"hf_zero: piece {index} is elements {piece.start} to {piece.start + piece.numel} of {flat.numel()}, and the one "
                f"before ends at {end}. Pass pieces in ascending order, without overlap, inside the buffer."
            )
        end = piece.start + piece.numel
        if piece.source is not None:
            if not piece.source.is_contiguous():
                raise ValueError(
                    f"hf_zero: the source of piece {index} has shape {tuple(piece.source.shape)} and strides "
                    f"{piece.source.stride()}; it must be contiguous. Call .contiguous() on it."
                )
            source = piece.source.detach().view(-1)
            check_flat(
                f"the source of piece {index}", source, numel=piece.numel, device=flat.device, dtypes=FLOAT_DTYPES
            )
    (fill_triton if runs_triton(flat.device) else fill_reference)(flat, pieces, factor)


def fill_reference(flat: torch.Tensor, pieces: Sequence[Piece], factor: float) -> None:
    """`fill` in torch, bit for bit the kernel's."""
    for piece in pieces:
        place = flat[piece.start : piece.start + piece.numel]
        if piece.source is None:
            place.zero_()
        elif factor == 1:
            place.copy_(piece.source.detach().view(-1))
        else:
            place.copy_(piece.source.detach().view(-1).float() * factor)


def fill_triton(flat: torch.Tensor, pieces: Sequence[Piece], factor: float) -> None:
    """`fill` by one launch a source dtype; zeros go with the first."""
    groups: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        if piece.source is not None:
            groups.setdefault(piece.source.dtype, []).append(piece)
    zeros = [piece for piece in pieces if piece.source is None]
    if zeros:
        groups.setdefault(next(iter(groups), flat.dtype), []).extend(zeros)
    for group in groups.values():
        _launch(flat, group, factor)


def _launch(flat: torch.Tensor, pieces: Sequence[Piece], factor: float) -> None:
    table, is_aligned = _table(pieces)
    if not len(table):
        return
    like = next((piece.source for piece in pieces if piece.source is not None), flat)
    on_host = torch.from_numpy(table)
    # From pinned memory the copy waits for nothing; torch keeps that memory until the copy is done.
    on_device = on_host if flat.device.type == "cpu" else on_host.pin_memory().to(flat.device, non_blocking=True)
    _fill[(len(table),)](
        on_device,
        flat,
        like,
        float(factor),
        ALIGN_BYTES=16 if is_aligned else 1,
        ALIGN_NUMEL=_TAIL_NUMEL if is_aligned else 1,
        BLOCK=BLOCK_NUMEL,
        STEP=STEP_NUMEL,
        TAIL=_TAIL_NUMEL,
        INTERPRETED=is_interpreted(),
    )


def _table(pieces: Sequence[Piece]) -> tuple[np.ndarray, bool]:
    """One row a program, int64: address of its first element (0 for zeros), its place in the buffer, its count; and
    whether all sources and places are aligned."""
    addresses = np.array([0 if p.source is None else p.source.data_ptr() for p in pieces], dtype=np.int64)
    sizes = np.array([0 if p.source is None else p.source.element_size() for p in pieces], dtype=np.int64)
    starts = np.array([p.start for p in pieces], dtype=np.int64)
    counts = np.array([p.numel for p in pieces], dtype=np.int64)
    blocks = -(-counts // BLOCK_NUMEL)
    of_piece: np.ndarray = np.repeat(np.arange(len(pieces)), blocks)
    first_program = np.cumsum(blocks) - blocks
    done = (np.arange(len(of_piece)) - first_program[of_piece]) * BLOCK_NUMEL
    left = np.minimum(counts[of_piece] - done, BLOCK_NUMEL)
    table = np.stack([addresses[of_piece] + done * sizes[of_piece], starts[of_piece] + done, left], axis=1)
    return table, not (addresses % 16).any() and not (starts % _TAIL_NUMEL).any()


@kernel
def _copy_step(source, place, offsets, readable, count, factor, INTERPRETED: tl.constexpr):
    x = tl.load(source + offsets, mask=offsets < readable, other=0.0).to(tl.float32) * factor
    tl.store(place + offsets, rounded(x, place.dtype.element_ty, INTERPRETED), mask=offsets < count)


@kernel
def _fill(
    table,
    flat,
    like,
    factor,
    ALIGN_BYTES: tl.constexpr,
    ALIGN_NUMEL: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TAIL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = table + tl.program_id(0) * 3
    address = tl.load(row)
    source = tl.multiple_of(address.to(like.dtype), ALIGN_BYTES)
    place = flat + tl.multiple_of(tl.load(row + 1), ALIGN_NUMEL)
    count = tl.load(row + 2)
    # Whole sixteens first: a mask that ends anywhere would make every access one element wide.
    whole = count // TAIL * TAIL
    readable = tl.where(address == 0, 0, count)
    for step in tl.static_range(BLOCK // STEP):
        offsets = step * STEP + tl.arange(0, STEP)
        _copy_step(source, place, offsets, readable // TAIL * TAIL, whole, factor, INTERPRETED)
    _copy_step(source, place, whole + tl.arange(0, TAIL), readable, count, factor, INTERPRETED)
