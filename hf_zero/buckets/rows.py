"""Rows of optimizer state as checkpoints carry them, and state packed in 8-bit blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..layout.slots import BLOCK_NUMEL, Interval, blocks
from ..offload.tiers import Tier
from .dynamic import Coded, DynamicCode, dequantise_dynamic, quantise_dynamic

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

_WORDS = (MASTER, "weights")
_BEGINNINGS = (RESIDUAL, OUTER, REPLICA, OWN)

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
