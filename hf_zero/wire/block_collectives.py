"""Reduce-scatter and all-gather of quantized blocks.

The sender quantizes once and the receiver dequantizes once, as in ZeRO++ (Wang et al. 2023, arXiv 2306.10209). Parts are summed
in float32 in rank order. A rank's own part is quantized as well, so the sum is the one that every other rank would compute. Codes
and scales are sent as two messages.
"""

from dataclasses import replace

import torch

from ..comm.groups import RankGroup
from ..comm.transport import Handle, Transport
from ..comm.waits import Label
from .quantize import BlockFormat, dequantize, dequantize_sum, quantize

_SCALES_CHANNEL = 0x8000
"""Added to a bucket's channel, so that scales and codes have different channels."""


def reduce_scatter_blocks(
    transport: Transport,
    format: BlockFormat,
    flat: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    group: RankGroup,
    label: Label,
) -> Handle:
    """Sums `flat` (ranks x n elements, float32 or 16 bits) over a group; this rank's n elements are written to `out`.

    Args:
        transport: sends codes and scales.
        format: the parts must consist of whole blocks.
        out: may be this rank's part of `flat`, which is not needed after this call returns.
        residual: same shape as `flat`, float32 or bfloat16. Contains the rounding error of earlier calls, which is sent as well,
            and receives the error of this call. None drops the error.
    """
    numel, device = flat.numel(), flat.device
    codes, received_codes = torch.empty((2, format.code_bytes(numel)), dtype=torch.uint8, device=device)
    scales, received_scales = torch.empty((2, format.blocks(numel)), dtype=torch.float32, device=device)
    quantize(flat, codes, scales, format, residual)
    handles = [
        transport.start_all_to_all(codes, received_codes, label, group),
        transport.start_all_to_all(scales, received_scales, _of_scales(label), group),
    ]

    def complete() -> None:
        for handle in handles:
            handle.finish()
        dequantize_sum(received_codes.view(group.size, -1), received_scales.view(group.size, -1), out, format)

    return Handle(label, transport.ledger, complete)


def all_gather_blocks(
    transport: Transport,
    format: BlockFormat,
    flat: torch.Tensor,
    own: torch.Tensor,
    group: RankGroup,
    label: Label,
    residual: torch.Tensor | None = None,
) -> Handle:
    """Fills `flat` (ranks x n elements) with the dequantized n elements `own` of each rank, in the order of the group.

    The owner of a part also uses the dequantized values, so that all ranks have the same bits.

    Args:
        transport, format, residual: see `reduce_scatter_blocks`; `residual` has the shape of `own`.
        own: may be this rank's part of `flat`, which is overwritten.
    """
    device = flat.device
    codes = torch.empty(format.code_bytes(flat.numel()), dtype=torch.uint8, device=device)
    scales = torch.empty(format.blocks(flat.numel()), dtype=torch.float32, device=device)
    own_codes, own_scales = (part.view(group.size, -1)[group.index] for part in (codes, scales))
    quantize(own, own_codes, own_scales, format, residual)
    handles = [
        transport.start_all_gather(codes, own_codes, label, group),
        transport.start_all_gather(scales, own_scales, _of_scales(label), group),
    ]

    def complete() -> None:
        for handle in handles:
            handle.finish()
        dequantize(codes, scales, flat, format)

    return Handle(label, transport.ledger, complete)


def _of_scales(label: Label) -> Label:
    return replace(label, channel=label.channel + _SCALES_CHANNEL)
