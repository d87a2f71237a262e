"""Rows of optimizer state as checkpoints carry them, state packed in 8-bit blocks, and the code of its bytes."""

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
# Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861. A code stands for one of 256 values,
# -1 < value <= 1 for the first moment, 0 <= value <= 1 for the second, which has no sign. They are dense near zero: in each of
# the seven decades from 1e-6 to 1 they are evenly spaced, and the topmost decade has 64 a sign (128 without), the next one half
# as many, and so on. An element is its value times its block's scale. In a block with scale s no element is off by more than
# |s| / 142 (first moment) or s / 284 (second): half the spacing of the topmost decade.
#
# Two things differ from the paper.
#
# [Note: nothing drifts]
# A scale is the block's element of the largest magnitude with its sign, where the paper takes the magnitude: -1 is no value, and
# blocks whose largest element is negative would shrink by 0.7 % each time. So that element has the value 1 and comes out as it
# went in, whatever comes out goes in again to the same codes and scale, and moments can be saved as float32 and taken up again
# bit for bit.
#
# [Note: never to zero]
# An element of the second moment that is above zero gets a value above zero, however small it is in its block. The update is
# divided by its root: a zero there would make it 1 / eps times too large.
#
# A block with a NaN or an infinity comes out as NaN, all of it. One whose largest magnitude is subnormal comes out as zeros.

_DECADES = 7
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_PREFIXES = 1 << 16

_HOST_CHUNK_NUMEL = 1 << 17
"""Elements taken through all passes at a time on a CPU, so that they stay in a core's cache."""

_DEVICE_CHUNK_NUMEL = 1 << 22
"""The same elsewhere, where a pass costs a launch: 16 MiB a scratch tensor."""


@dataclass(frozen=True)
class DynamicCode:
    """Maps the codes 0 to 255 to 256 ascending values. `signed`: the first moment's, else the second's."""

    signed: bool

    @property
    def zero(self) -> int:
        return 127 if self.signed else 0

    def values(self) -> torch.Tensor:
        """(256,) float64, on the host, whatever torch's default device is."""
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
    """n elements in blocks, of which the first begins with the first element.

    Attributes:
        codes: (n,) uint8.
        scales: (ceil(n / 256),) float32.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def check(self, name: str, *, numel: int, device: torch.device) -> None:
        """Raises `ValueError` unless these are `numel` elements on `device`; `name` stands in the error."""
        check_flat(f"{name}codes", self.codes, numel=numel, device=device, dtypes=[torch.uint8])
        check_flat(f"{name}scales", self.scales, numel=blocks(numel), device=device, dtypes=[torch.float32])


@dataclass(frozen=True)
class Tables:
    """A code's values and how they are found, on one device.

    [Note: the nearest value]
    A value's code is the number of thresholds below it; these lie midway between neighbours. No two thresholds share the first
    16 bits of a float32, so those bits lead to the code of the least float that has them, and one comparison does the rest: a
    sixteenth of the time of `torch.bucketize`.

    Attributes:
        values: (256,) float32.
        first: (65536,) uint8, by the first 16 bits, negative numbers before positive ones.
        thresholds: (256,) float32; the last is infinite.
    """

    values: torch.Tensor
    first: torch.Tensor
    thresholds: torch.Tensor


@functools.cache
def tables_of(code: DynamicCode, device: torch.device) -> Tables:
    """A code's tables on a device, made once."""
    values = code.values()
    thresholds = ((values[1:] + values[:-1]) / 2).float()
    if not code.signed:
        # See [Note: never to zero].
        thresholds[0] = 0.0
    prefixes = torch.arange(_PREFIXES, dtype=torch.int64, device="cpu") - _PREFIXES // 2
    # Of a negative number, the bits behind the prefix lead away from zero.
    least = (prefixes * _PREFIXES + torch.where(prefixes < 0, _PREFIXES - 1, 0)).to(torch.int32).view(torch.float32)
    first = torch.bucketize(least.nan_to_num(nan=0.0), thresholds).to(torch.uint8)
    last = torch.tensor([float("inf")], device="cpu")
    return Tables(values.float().to(device), first.to(device), torch.cat([thresholds, last]).to(device))


def quantise_dynamic(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, code: DynamicCode) -> None:
    """Writes the nearest codes of `values` and the scales of their blocks. No host wait on a GPU.

    Args:
        values: flat, n elements, float32; what is below zero without a sign counts as zero. Only read.
        codes: (n,) uint8.
        scales: (ceil(n / 256),) float32.

    Raises:
        ValueError: a tensor does not fit.
    """
    _check(values, codes, scales)
    # A chunk is a whole number of blocks: one that ended inside a block would give the block two scales.
    tables, chunk = tables_of(code, values.device), _chunk_numel(values.device)
    padded, ratio, thresholds = values.new_empty((3, min(chunk, blocks(len(values)) * BLOCK_NUMEL)))
    for start in range(0, len(values), chunk):
        part = values[start : start + chunk]
        count, scale = blocks(len(part)), scales[blocks(start) : blocks(start + len(part))]
        x, y = padded[: count * BLOCK_NUMEL], ratio[: count * BLOCK_NUMEL]
        # The last block may be short. What lies behind the values, from an earlier chunk or of new memory, would set that
        # block's scale.
        x[len(part) :].zero_()
        x[: len(part)].copy_(part)
        rows = x.view(count, BLOCK_NUMEL)
        scale.copy_(_scales_of(rows, code))
        # Whatever is in a block of scale 0 becomes zero.
        divisors = torch.where(scale == 0, float("inf"), scale)
        torch.div(rows, divisors[:, None], out=y.view(count, BLOCK_NUMEL))
        # The padded values are no longer needed, and their memory serves for indices: a new tensor a chunk would leave the
        # cache.
        nearest = _nearest(y, x.view(torch.int32), thresholds[: len(y)], tables)
        codes[start : start + len(part)].copy_(nearest[: len(part)])


def _scales_of(rows: torch.Tensor, code: DynamicCode) -> torch.Tensor:
    """(blocks,) of (blocks, 256): the element of the largest magnitude; 0 for a subnormal one, NaN for one not finite."""
    # torch.aminmax along a dimension takes eight times as long.
    least, most = rows.amin(dim=1), rows.amax(dim=1)
    scale = torch.where(most >= -least, most, least) if code.signed else most.clamp(min=0.0)
    magnitude = torch.maximum(most, -least)
    scale = torch.where(scale.abs() < SMALLEST_NORMAL, 0.0, scale)
    # `<` is false of NaN, so that one comparison finds NaN and infinity.
    return torch.where(magnitude < float("inf"), scale, float("nan"))


def _nearest(y: torch.Tensor, scratch: torch.Tensor, thresholds: torch.Tensor, tables: Tables) -> torch.Tensor:
    """(n,) uint8 of `y`, (n,) float32. `scratch`, (n,) int32, and `thresholds`, (n,) float32, are written over."""
    torch.bitwise_right_shift(y.view(torch.int32), 16, out=scratch).add_(_PREFIXES // 2)
    nearest = tables.first.index_select(0, scratch)
    torch.index_select(tables.thresholds, 0, scratch.copy_(nearest), out=thresholds)
    return nearest.add_((y > thresholds).view(torch.uint8))


def dequantise_dynamic(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, code: DynamicCode) -> None:
    """`out` = value of the code * scale, n elements, float32. The rest as in `quantise_dynamic`."""
    _check(out, codes, scales)
    tables, chunk = tables_of(code, out.device), _chunk_numel(out.device)
    for start in range(0, len(out), chunk):
        part = out[start : start + chunk]
        torch.index_select(tables.values, 0, codes[start : start + chunk].to(torch.int32), out=part)
        scale = scales[blocks(start) : blocks(start + len(part))]
        whole = len(part) // BLOCK_NUMEL
        # Whole blocks by broadcast; a short last block has no row of 256 elements, and is multiplied below.
        part[: whole * BLOCK_NUMEL].view(whole, BLOCK_NUMEL).mul_(scale[:whole, None])
        part[whole * BLOCK_NUMEL :].mul_(scale[whole:])


def _check(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    numel, device = values.numel(), values.device
    check_flat("values", values, numel=numel, device=device, dtypes=[torch.float32])
    Coded(codes, scales).check("", numel=numel, device=device)


def _chunk_numel(device: torch.device) -> int:
    return _HOST_CHUNK_NUMEL if device.type == "cpu" else _DEVICE_CHUNK_NUMEL


# ---- A state tensor of a rank's shard in 8-bit blocks, and its parts, which become float32 when they are read ----


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
        quantise_dynamic(values, self.codes, self.scales, self._code)

    def unpack(self, out: torch.Tensor) -> None:
        """Unpacks all values into `out`, (numel,) float32."""
        dequantise_dynamic(self.codes, self.scales, out, self._code)

    def pack_part(self, interval: Interval, values: torch.Tensor) -> None:
        """Packs the elements `interval`, which begins with a block and ends with one or before padding."""
        there = self.cut(interval)
        quantise_dynamic(values, there.codes, there.scales, self._code)

    def clear_part(self, interval: Interval) -> None:
        """Zeros the elements `interval`, as in `pack_part`."""
        there = self.cut(interval)
        there.codes.fill_(self._code.zero)
        there.scales.zero_()

    def part(self, interval: Interval) -> torch.Tensor:
        """Unpacks the elements `interval`, which begins anywhere, as float32 in memory of their own."""
        # From the start of the block: a scale belongs to 256 elements counted from there.
        before = interval.start % BLOCK_NUMEL
        there = self.cut(Interval(interval.start - before, interval.stop))
        out = torch.empty(len(there.codes), dtype=torch.float32, device=there.codes.device)
        dequantise_dynamic(there.codes, there.scales, out, self._code)
        return out[before:]

    def cut(self, interval: Interval) -> Coded:
        """Returns the codes and scales of the elements `interval`, which begins with a block, without a copy."""
        scales = slice(interval.start // BLOCK_NUMEL, blocks(interval.stop))
        return Coded(self.codes[interval.start : interval.stop], self.scales[scales])


@dataclass(frozen=True, eq=False)
class PackedPart:
    """Elements of a packed state. They take no memory until `detach` makes a tensor of them.

    Its other members answer like that tensor, 1-D and float32.
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
        """Unpacks the present values."""
        return self.state.part(self.interval)


# ---- Kinds of a parameter's state in a checkpoint, and a rank's part of one ----

MASTER = "master"
"""The kind of the fp32 copy."""

RESIDUAL = "residual."
"""Prefix of the quantisation residual of a rank's gradients; the rank's number follows. Rows of whole parameters."""

OUTER = "outer."
"""Prefix of outer steps' state; their optimizer's own name follows."""

REPLICA = "replica."
"""Begins the kind of optimizer state of a model that only outer steps bring together with others, behind the first: its
number follows, and the optimizer's own name. Every other kind is such a name, of the first model's or the only one's."""

OWN = "own."
"""Prefix of state whose name in the optimizer is a word of the format; that name follows."""

NESTED = "nested."
"""Prefix of the entry that describes a list, tuple or dict of the optimizer's; its name follows."""

_WORDS = (MASTER, "weights")
_BEGINNINGS = (RESIDUAL, OUTER, REPLICA, OWN, NESTED)

Read = Callable[[str, str, Interval], torch.Tensor]
"""(kind, name, interval) → 1-D host tensor of the interval's elements of a saved parameter's state."""

KindsOf = Callable[[str], Sequence[str]]
"""Name → kinds of which a checkpoint has a tensor with one value an element."""


@dataclass(frozen=True, kw_only=True)
class StateRow:
    """One kind of state for one rank's part of one parameter.

    Attributes:
        interval: of the state tensor's elements, row-major.
        own_shape: of a state tensor that has not one value an element of the parameter (a factor of rows, say), and then lies
            on one rank; None for the others, which have the parameter's shape.
        tensor: 1-D, of `interval.numel` elements, the live state; what is packed becomes a tensor by its `detach`.
    """

    kind: str
    name: str
    interval: Interval
    own_shape: tuple[int, ...] | None
    tensor: torch.Tensor | PackedPart


def kind_of(name: str) -> str:
    """Returns the kind of the optimizer's state `name`."""
    # An optimizer may call a state `master`, say: without the prefix a resume would load that state as the parameter's master.
    return f"{OWN}{name}" if name in _WORDS or name.startswith(_BEGINNINGS) else name


def name_of(kind: str) -> str:
    """Returns the optimizer's name of this kind of state."""
    return kind.removeprefix(OWN)
