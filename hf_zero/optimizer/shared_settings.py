"""Settings of a step that the ranks must share: compared at the start, and by a digest with each backward."""

import inspect
import marshal
import zlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

# [Note: other settings on one rank]
# Under DDP, a rank with another learning rate drifts from the others, which a checksum of the weights shows. Here each rank
# steps its own shard and sends the result, so all copies agree and nothing shows that one part of the model was trained with
# other settings. So the ranks compare them. What an optimizer computes by itself (a counter, an estimated learning rate) may
# depend on this rank's rows and is left out: only arguments of the optimizer's constructor are compared.

_PLAIN = (type(None), bool, int, float, str)
_BINARY_FLOATS = 2
"""Version of marshal's format in which equal values have equal bytes: later ones note which objects are the same."""
_DIGEST_BYTES = 4


class SharedSettings:
    """The settings of some optimizers' groups, and of the last clip.

    Attributes:
        clip: what the last clip was asked for.
        edits: how often a script has edited sharded parameters in place, outside of forwards and contexts.
        steps: optimizer steps taken. A rank takes one less if its script catches the error of a step that only this rank refused.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._read = [(optimizer, *_reader_of(optimizer)) for optimizer in optimizers]
        self.clip: tuple[float, float] | None = None
        self.edits = self.steps = 0
        self._known: list[Any] = []
        self._digest = b""

    def digest(self) -> bytes:
        """Returns bytes whose elementwise maximum over ranks equals this rank's only if all ranks have the same settings."""
        values: list[Any] = [read(group) for optimizer, _, read in self._read for group in optimizer.param_groups]
        values += (self.clip, self.edits)
        if values != self._known:
            self._known = values
            number = zlib.crc32(_packed(values)).to_bytes(_DIGEST_BYTES, "big")
            # With the complement: whichever rank has the larger byte, the other one's complement is larger.
            self._digest = number + bytes(255 - byte for byte in number)
        # Separately: the packed values are the same in most steps.
        steps = self.steps & 255
        return self._digest + bytes((steps, 255 - steps))

    def facts(self) -> dict[str, str]:
        """Returns the settings by name, as they were at the last `digest`."""
        *of_groups, clip, edits = self._known
        # First: a clip or a schedule may differ only because steps do.
        values, found = iter(of_groups), {"optimizer steps taken": repr(self.steps)}
        for index, (optimizer, names, _) in enumerate(self._read):
            for number, _ in enumerate(optimizer.param_groups):
                owner = f"of group {number} of optimizer {index} ({type(optimizer).__name__})"
                found |= {f"{name} {owner}": repr(value) for name, value in zip(names, next(values, ()))}
        return found | {
            "max_norm and norm_type of the last clip": repr(clip),
            "edits of sharded parameters": repr(edits),
        }


def _reader_of(optimizer: torch.optim.Optimizer) -> tuple[list[str], Callable[[dict[str, Any]], Sequence[Any]]]:
    """Returns the names of the compared settings, and what reads their values from a group."""
    arguments = {name for kind in type(optimizer).__mro__ for name in _arguments_of(kind)}
    names = [
        name
        for name in sorted(arguments & optimizer.defaults.keys())
        if all(name in group and _is_readable(group[name]) for group in optimizer.param_groups)
    ]
    if len(names) < 2:
        # `itemgetter` of one name returns no tuple.
        return names, lambda group: tuple(group[name] for name in names)
    return names, itemgetter(*names)


def _arguments_of(kind: type) -> Sequence[str]:
    own = vars(kind).get("__init__")
    return list(inspect.signature(own).parameters) if inspect.isfunction(own) else ()


def _is_readable(value: Any) -> bool:
    """Whether a value can be compared in each step: a tensor on an accelerator would make the host wait."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.device.type == "cpu"
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(_is_readable, value)))


def _packed(values: list[Any]) -> bytes:
    try:
        return marshal.dumps(values, _BINARY_FLOATS)
    except ValueError:
        # Numbers of numpy, tensors.
        return repr(values).encode()
