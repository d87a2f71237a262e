"""Kinds of state that a checkpoint keeps for each parameter, and one rank's part of one of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..layout.intervals import Interval
from .packed_state import PackedPart

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
