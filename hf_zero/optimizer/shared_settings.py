"""Step settings that must be equal on all ranks: compared at the start, and by a digest in each backward."""

import inspect
import marshal
import zlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

# [Note: other settings on one rank]
# Under DDP, a rank with a different learning rate drifts away from the others, which a checksum of the weights shows. Here
# each rank steps its own shard and sends the result, so all copies stay equal, although a part of the model was trained with
# different settings. So the ranks compare their settings. Values computed by an optimizer (a counter, an estimated learning
# rate) may depend on this rank's shards, so only arguments of the optimizer's constructor are compared.

_PLAIN = (type(None), bool, int, float, str)
_BINARY_FLOATS = 2
"""Version of marshal's format in which equal values have equal bytes; later versions also encode object identity."""
_DIGEST_BYTES = 4


class SharedSettings:
    """The settings of the optimizers' groups, and of the last clip.

    Attributes:
        clip: (max_norm, norm_type) of the last clip; None before.
        edits: how often a script has edited sharded parameters in place, outside of forwards and contexts.
        steps: number of optimizer steps. A rank counts one fewer if its script catches the error of a step refused on this
            rank only.
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
            # Append the complement: whichever rank has the larger byte, the other one's complement is larger.
            self._digest = number + bytes(255 - byte for byte in number)
        # The steps are appended separately, because the packed values stay the same in most steps.
        steps = self.steps & 255
        return self._digest + bytes((steps, 255 - steps))

    def facts(self) -> dict[str, str]:
        """Returns the settings by name, with their values at the last `digest`."""
        *of_groups, clip, edits = self._known
        # The steps first, because a clip or a schedule may differ only because of them.
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
    """Returns the names of the compared settings, and a function that reads their values from a group."""
    arguments = {name for kind in type(optimizer).__mro__ for name in _arguments_of(kind)}
    names = [
        name
        for name in sorted(arguments & optimizer.defaults.keys())
        if all(name in group and _is_readable(group[name]) for group in optimizer.param_groups)
    ]
    if len(names) < 2:
        # `itemgetter` with a single name does not return a tuple.
        return names, lambda group: tuple(group[name] for name in names)
    return names, itemgetter(*names)


def _arguments_of(kind: type) -> Sequence[str]:
    own = vars(kind).get("__init__")
    return list(inspect.signature(own).parameters) if inspect.isfunction(own) else ()


def _is_readable(value: Any) -> bool:
    """Whether a value can be compared in each step; a tensor on an accelerator would make the host wait."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.device.type == "cpu"
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(_is_readable, value)))


def _packed(values: list[Any]) -> bytes:
    try:
        return marshal.dumps(values, _BINARY_FLOATS)
    except ValueError:
        # numpy numbers and tensors.
        return repr(values).encode()
