"""Rows of optimizer state as checkpoints carry them, and state packed in 8-bit blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..layout.slots import BLOCK_NUMEL, Interval, blocks
from ..offload.tiers import Tier
from .dynamic import Coded, DynamicCode, dequantise_dynamic, quantise_dynamic

# One state tensor of a rank's shard in 8-bit blocks, and parts of it that become float32 when they are looked at.


class PackedState:
    """Codes and scales of a flat float32 tensor laid out as a shard.

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
        """Of zeros, in memory of `tier`."""
        codes = tier.empty(numel, torch.uint8).fill_(code.zero)
        return cls(codes, tier.empty(blocks(numel), torch.float32).zero_(), code)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def pack(self, values: torch.Tensor) -> None:
        """Takes all values, (numel,) float32."""
        quantise_dynamic(values, self.codes, self.scales, self._code)

    def unpack(self, out: torch.Tensor) -> None:
        """Gives all values, (numel,) float32."""
        dequantise_dynamic(self.codes, self.scales, out, self._code)

    def pack_part(self, interval: Interval, values: torch.Tensor) -> None:
        """Takes the elements `interval`, which begins with a block and is followed by padding up to the next one."""
        there = self.cut(interval)
        quantise_dynamic(values, there.codes, there.scales, self._code)

    def clear_part(self, interval: Interval) -> None:
        """Zeros for the elements `interval`, which is as in `pack_part`."""
        there = self.cut(interval)
        there.codes.fill_(self._code.zero)
        there.scales.zero_()

    def part(self, interval: Interval) -> torch.Tensor:
        """The elements `interval`, which begins anywhere, as float32 in memory of their own."""
        before = interval.start % BLOCK_NUMEL
        there = self.cut(Interval(interval.start - before, interval.stop))
        out = torch.empty(len(there.codes), dtype=torch.float32, device=there.codes.device)
        dequantise_dynamic(there.codes, there.scales, out, self._code)
        return out[before:]

    def cut(self, interval: Interval) -> Coded:
        """The elements `interval`, which begins with a block, as they lie here."""
        scales = slice(interval.start // BLOCK_NUMEL, blocks(interval.stop))
        return Coded(self.codes[interval.start : interval.stop], self.scales[scales])


@dataclass(frozen=True, eq=False)
class PackedPart:
    """Elements of a packed state that take no memory until `detach` makes a tensor of them.

    What else it has is named and answers as that tensor, 1-D and float32, would.
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
        """The values as they are now."""
        return self.state.part(self.interval)


# ---- Kinds of state that a checkpoint keeps for each parameter, and one rank's part of one of them ----

MASTER = "master"
"""The kind of the fp32 copy."""

RESIDUAL = "residual."
"""Begins the kind of what a rank, whose number follows, has not sent of its gradients: rows of whole parameters."""

OUTER = "outer."
"""Begins the kind of what outer steps keep; their optimizer's own name for it follows."""

REPLICA = "replica."
"""Begins the kind of optimizer state of a model that only outer steps bring together with others, behind the first: its
number follows, and the optimizer's own name. Every other kind is such a name, of the first model's or the only one's."""

OWN = "own."
"""Begins the kind of state that an optimizer calls by a word of the format's; the optimizer's own name for it follows."""

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
    """The kind of what an optimizer calls `name`."""
    return f"{OWN}{name}" if name in _WORDS or name.startswith(_BEGINNINGS) else name


def name_of(kind: str) -> str:
    """What an optimizer calls this kind of its state."""
    return kind.removeprefix(OWN)
