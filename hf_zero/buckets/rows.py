"""Optimizer state of a rank's shards as stored in checkpoints, state packed in 8-bit blocks, and the 8-bit code."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..arithmetic.flat import check_flat
from ..layout.blocks import BLOCK_NUMEL, blocks
from ..layout.intervals import Interval
from ..offload.tiers import Tier

# ---- Optimizer moments in 8 bits: the dynamic data type, in blocks of 256 with one float32 scale each ----
#
# Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861. A code represents one of 256 values,
# -1 < value <= 1 for the first moment, and 0 <= value <= 1 for the second, which has no sign. The values are dense near zero:
# within each of the seven decades from 1e-6 to 1 they are evenly spaced; the topmost decade has 64 per sign (128 without
# sign), the next one half as many, and so on. An element is its value times its block's scale. In a block with scale s, the
# error of an element is at most |s| / 142 (first moment) or s / 284 (second): half the spacing of the topmost decade.
#
# Two things differ from the paper.
#
# [Note: nothing drifts]
# A block's scale is its element of the largest magnitude including its sign; the paper uses the magnitude. Because -1 is not a
# value, blocks whose largest element is negative would otherwise shrink by 0.7 % each time. With the sign, this element has
# the value 1 and is restored exactly. Dequantized values quantize to the same codes and scale, so moments can be saved as
# float32 and loaded bit for bit.
#
# [Note: never to zero]
# A second moment above zero always gets a value above zero, however small it is in its block. The update is divided by its
# square root, so a zero would make the update 1 / eps times too large.
#
# A block with a NaN or an infinity dequantizes to NaN as a whole. A block whose largest magnitude is subnormal becomes zeros.

_DECADES = 7
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_LARGEST_SUBNORMAL = SMALLEST_NORMAL - torch.finfo(torch.float32).smallest_normal * 2**-23
_NAN = float("nan")
_PREFIXES = 1 << 16

_HOST_CHUNK_NUMEL = 1 << 17
"""Elements processed at a time on a CPU, so they stay in a core's cache."""

PACKING_BYTES = 107
"""Bytes that the operators of `dequantize_dynamic` and `quantize_dynamic` read and write for each element on the host. They need
more time than memory does: one thread of an EPYC needs as long as for 220 bytes of AdamW."""

_DEVICE_CHUNK_NUMEL = 1 << 22
"""The same on other devices, where each pass costs a kernel launch: 16 MiB per scratch tensor."""


@dataclass(frozen=True)
class DynamicCode:
    """Maps the codes 0 to 255 to 256 ascending values. `signed`: for the first moment; otherwise for the second."""

    signed: bool

    @property
    def zero(self) -> int:
        return 127 if self.signed else 0

    def values(self) -> torch.Tensor:
        """Returns the values, (256,) float64, on the host regardless of torch's default device."""
        found = [torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu")]
        for decade in range(_DECADES):
            count = 2 ** (decade + (0 if self.signed else 1))
            ends = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64, device="cpu")
            means = (ends[:-1] + ends[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)
            found += [means, -means] if self.signed else [means]
        return torch.cat(found).sort().values


SIGNED = DynamicCode(signed=True)
UNSIGNED = DynamicCode(signed=False)


@dataclass(frozen=True)
class Coded:
    """n elements in blocks; the first block begins with the first element.

    Attributes:
        codes: (n,) uint8.
        scales: (ceil(n / 256),) float32.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def check(self, name: str, *, numel: int, device: torch.device) -> None:
        """Raises `ValueError` unless these are `numel` elements on `device`. `name`: prefix in the error."""
        check_flat(f"{name}codes", self.codes, numel=numel, device=device, dtypes=[torch.uint8])
        check_flat(f"{name}scales", self.scales, numel=blocks(numel), device=device, dtypes=[torch.float32])


@dataclass(frozen=True)
class Tables:
    """A code's values and lookup tables on one device.

    [Note: the nearest value]
    A value's code is the number of thresholds below it; thresholds lie midway between neighboring values. No two thresholds
    share the first 16 bits of a float32. So a table maps these bits to the code of the smallest float with the bits, and one
    comparison finishes the search, in a sixteenth of the time of `torch.bucketize`.

    Attributes:
        values: (256,) float32.
        first: (65536,) uint8, indexed by the first 16 bits, negative numbers before positive ones.
        thresholds: (256,) float32; the last is infinite.
    """

    values: torch.Tensor
    first: torch.Tensor
    thresholds: torch.Tensor


@functools.cache
def tables_of(code: DynamicCode, device: torch.device) -> Tables:
    """Returns a code's tables on a device, cached."""
    values = code.values()
    thresholds = ((values[1:] + values[:-1]) / 2).float()
    if not code.signed:
        # See [Note: never to zero].
        thresholds[0] = 0.0
    prefixes = torch.arange(_PREFIXES, dtype=torch.int64, device="cpu") - _PREFIXES // 2
    # For negative numbers, the bits after the prefix increase the magnitude.
    least = (prefixes * _PREFIXES + torch.where(prefixes < 0, _PREFIXES - 1, 0)).to(torch.int32).view(torch.float32)
    first = torch.bucketize(least.nan_to_num(nan=0.0), thresholds).to(torch.uint8)
    last = torch.tensor([float("inf")], device="cpu")
    return Tables(values.float().to(device), first.to(device), torch.cat([thresholds, last]).to(device))


def quantize_dynamic(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, code: DynamicCode) -> None:
    """Writes the nearest codes of `values` and the scales of their blocks. Does not synchronize with a GPU.

    Args:
        values: (n,) float32, not modified. Without a sign, negative values count as zero.
        codes: (n,) uint8, written.
        scales: (ceil(n / 256),) float32, written.
        code: the code.

    Raises:
        ValueError: a tensor does not fit.
    """
    _check(values, codes, scales)
    # A chunk is a whole number of blocks, because a block split over two chunks would get two scales.
    tables, chunk = tables_of(code, values.device), _chunk_numel(values.device)
    ratio, thresholds, padded = values.new_empty((3, min(chunk, blocks(len(values)) * BLOCK_NUMEL)))
    for start in range(0, len(values), chunk):
        part = values[start : start + chunk]
        count, scale = blocks(len(part)), scales[blocks(start) : blocks(start + len(part))]
        x, y = part, ratio[: count * BLOCK_NUMEL]
        if len(part) % BLOCK_NUMEL:
            # Old memory after the values of the short last block would otherwise determine the block's scale.
            x = padded[: count * BLOCK_NUMEL]
            x[len(part) :].zero_()
            x[: len(part)].copy_(part)
        rows = x.view(count, BLOCK_NUMEL)
        _write_scales(rows, scale, code)
        # Dividing by infinity sets all elements of a block with scale 0 to zero.
        torch.div(rows, torch.where(scale == 0, float("inf"), scale)[:, None], out=y.view(count, BLOCK_NUMEL))
        _write_nearest(
            y[: len(part)],
            codes[start : start + len(part)],
            padded[: len(part)].view(torch.int32),
            thresholds[: len(part)],
            tables,
        )


def _write_scales(rows: torch.Tensor, scales: torch.Tensor, code: DynamicCode) -> None:
    """Reduces (blocks, 256) to (blocks,): the largest magnitude with sign; 0 if subnormal, NaN if not finite.

    A launch costs a GPU's host more than a small kernel costs the GPU, so these are as few operators as possible.
    """
    # torch.aminmax along a dimension is eight times slower.
    least, most = rows.amin(dim=1), rows.amax(dim=1)
    # The product of the unsigned form is 0, or NaN for an infinity, which the clamp would hide.
    found = torch.where(most >= -least, most, least) if code.signed else most.clamp(min=0.0).add_(least.mul_(0.0))
    found = torch.nn.functional.hardshrink(found, _LARGEST_SUBNORMAL)
    torch.nan_to_num(found, nan=_NAN, posinf=_NAN, neginf=_NAN, out=scales)


def _write_nearest(
    y: torch.Tensor, codes: torch.Tensor, scratch: torch.Tensor, thresholds: torch.Tensor, tables: Tables
) -> None:
    """Writes the codes, (n,) uint8, of `y`, (n,) float32. Overwrites `scratch`, (n,) int32, and `thresholds`, (n,) float32."""
    torch.bitwise_right_shift(y.view(torch.int32), 16, out=scratch).add_(_PREFIXES // 2)
    torch.index_select(tables.first, 0, scratch, out=codes)
    torch.index_select(tables.thresholds, 0, scratch.copy_(codes), out=thresholds)
    codes.add_((y > thresholds).view(torch.uint8))


def dequantize_dynamic(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, code: DynamicCode) -> None:
    """Writes value of the code * scale to `out`, (n,) float32. Other arguments and errors as in `quantize_dynamic`."""
    _check(out, codes, scales)
    tables, chunk = tables_of(code, out.device), _chunk_numel(out.device)
    for start in range(0, len(out), chunk):
        part = out[start : start + chunk]
        torch.index_select(tables.values, 0, codes[start : start + chunk].to(torch.int32), out=part)
        scale = scales[blocks(start) : blocks(start + len(part))]
        whole = len(part) // BLOCK_NUMEL
        # Whole blocks are scaled by broadcasting; a short last block is multiplied below.
        part[: whole * BLOCK_NUMEL].view(whole, BLOCK_NUMEL).mul_(scale[:whole, None])
        if len(part) % BLOCK_NUMEL:
            part[whole * BLOCK_NUMEL :].mul_(scale[whole:])


def _check(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    numel, device = values.numel(), values.device
    check_flat("values", values, numel=numel, device=device, dtypes=[torch.float32])
    Coded(codes, scales).check("", numel=numel, device=device)


def _chunk_numel(device: torch.device) -> int:
    return _HOST_CHUNK_NUMEL if device.type == "cpu" else _DEVICE_CHUNK_NUMEL


# ---- A state tensor of a rank's shard in 8-bit blocks, and parts of it, which become float32 when read ----


class PackedState:
    """Codes and scales of a flat float32 tensor of a shard's layout.

    Attributes:
        codes: (numel,) uint8.
        scales: (blocks,) float32.
    """

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, code: DynamicCode):
        self.codes = codes
        self.scales = scales
        self._code = code

    @classmethod
    def zeros(cls, numel: int, code: DynamicCode, tier: Tier) -> "PackedState":
        codes = tier.empty(numel, torch.uint8).fill_(code.zero)
        return cls(codes, tier.empty(blocks(numel), torch.float32).zero_(), code)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def pack(self, values: torch.Tensor) -> None:
        """Packs all values, (numel,) float32."""
        quantize_dynamic(values, self.codes, self.scales, self._code)

    def unpack(self, out: torch.Tensor) -> None:
        """Unpacks all values into `out`, (numel,) float32."""
        dequantize_dynamic(self.codes, self.scales, out, self._code)

    def pack_part(self, interval: Interval, values: torch.Tensor) -> None:
        """Packs the elements `interval`, which starts at a block and ends at a block or before padding."""
        there = self.cut(interval)
        quantize_dynamic(values, there.codes, there.scales, self._code)

    def clear_part(self, interval: Interval) -> None:
        """Sets the elements `interval` to zero; limits of the interval as in `pack_part`."""
        there = self.cut(interval)
        there.codes.fill_(self._code.zero)
        there.scales.zero_()

    def part(self, interval: Interval) -> torch.Tensor:
        """Unpacks the elements `interval`, which may start anywhere, as float32 in new memory."""
        # Start at the block's start, because a scale belongs to 256 elements counted from there.
        before = interval.start % BLOCK_NUMEL
        there = self.cut(Interval(interval.start - before, interval.stop))
        out = torch.empty(len(there.codes), dtype=torch.float32, device=there.codes.device)
        dequantize_dynamic(there.codes, there.scales, out, self._code)
        return out[before:]

    def cut(self, interval: Interval) -> Coded:
        """Returns the codes and scales of the elements `interval`, which starts at a block, without a copy."""
        scales = slice(interval.start // BLOCK_NUMEL, blocks(interval.stop))
        return Coded(self.codes[interval.start : interval.stop], self.scales[scales])


@dataclass(frozen=True, eq=False)
class PackedPart:
    """Elements of a packed state, without float32 memory until `detach` unpacks them.

    All other members behave like those of the unpacked tensor, 1-D and float32.
    """

    state: PackedState
    interval: Interval

    dtype = torch.float32
    itemsize = torch.float32.itemsize

    @property
    def device(self) -> torch.device:
        return self.state.codes.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size([self.interval.numel])

    @property
    def nbytes(self) -> int:
        return self.interval.numel * self.itemsize

    def numel(self) -> int:
        return self.interval.numel

    def __getitem__(self, part: slice) -> "PackedPart":
        start, stop, _ = part.indices(self.interval.numel)
        return replace(self, interval=Interval(start, stop).shift(self.interval.start))

    def detach(self) -> torch.Tensor:
        """Unpacks the current values."""
        return self.state.part(self.interval)


# ---- Kinds of a parameter's state in a checkpoint, and a rank's part of one kind ----

MASTER = "master"
"""The kind of the fp32 master weights."""

RESIDUAL = "residual."
"""Prefix of quantization residuals."""

OUTER = "outer."
"""Prefix of outer steps' state, followed by their optimizer's own name."""

REPLICA = "replica."
"""Prefix of optimizer state of models averaged only by outer steps, for every model after the first, followed by the model's
number and the optimizer's own name. Kinds without a prefix belong to the first or only model."""

OWN = "own."
"""Prefix of optimizer state whose name is reserved by the format; the name follows."""

NESTED = "nested."
"""Prefix of the entry describing a list, tuple or dict of the optimizer's; its name follows."""

_WORDS = (MASTER, "weights")
_BEGINNINGS = (RESIDUAL, OUTER, REPLICA, OWN, NESTED)

Read = Callable[[str, str, Interval], torch.Tensor]
"""(kind, name, interval) → the interval's elements of a saved parameter's state, as a 1-D host tensor."""

KindsOf = Callable[[str], Sequence[str]]
"""Name → the kinds for which a checkpoint has a tensor with one value per element."""


@dataclass(frozen=True, kw_only=True)
class StateRow:
    """One kind of state for one rank's part of one parameter.

    Attributes:
        kind: the kind of state.
        name: the parameter's name.
        interval: interval of the state tensor's elements, row-major.
        own_shape: shape of a state tensor without one value per element of the parameter (for example a factor of rows), which
            is stored on one rank; None for state with the parameter's shape.
        tensor: the live state, 1-D with `interval.numel` elements; packed state is unpacked by its `detach`.
        of_each: index and number, if several ranks or groups each have a tensor of this kind for the same elements.
    """

    kind: str
    name: str
    interval: Interval
    own_shape: tuple[int, ...] | None
    tensor: torch.Tensor | PackedPart
    of_each: tuple[int, int] | None = None


def kind_of(name: str) -> str:
    """Returns the kind for the optimizer's state `name`."""
    # An optimizer may name a state `master`. Without the prefix, a resume would load it as the parameter's master weights.
    return f"{OWN}{name}" if name in _WORDS or name.startswith(_BEGINNINGS) else name


def name_of(kind: str) -> str:
    """Returns the optimizer's name for this kind of state."""
    return kind.removeprefix(OWN)
