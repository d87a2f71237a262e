"""The optimizer in a folder of torch.distributed.checkpoint, whose state dictionary is nested or flattened by parameter."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..format.manifest import CheckpointError
from .dcp_folder import DcpFolder
from .states import ForeignGroup

_THEN = "Continue it with FSDP, or save it there with state_dict_type SHARDED_STATE_DICT."
_Path = tuple[Any, ...]


class DcpOptimizer:
    """Groups of a saved optimizer, and where each kind of its state lies.

    Args:
        key: of the optimizer in the saved dictionary.
        weights: names of the model's weights, by which flattened keys are taken apart.

    Attributes:
        saved: the folder.
        groups: in their order; flattened ones, which record no groups, by equal settings.
        kinds, scalars: of each parameter, kind → path of values an element, and of values for the whole parameter.

    Raises:
        CheckpointError: the optimizer has no groups, or these have no names.
    """

    def __init__(self, saved: DcpFolder, key: str, weights: Sequence[str]):
        self.saved = saved
        self._key = key
        self._names = set(weights)
        entries = {path[1:]: path for path in saved.entries if path[0] == key}
        is_flat = all(len(rest) == 1 for rest in entries)
        self._states = dict(self._flat("state", entries) if is_flat else _nested_states(entries))
        self.groups = self._flat_groups(entries) if is_flat else self._nested_groups(entries)
        self.kinds: dict[str, dict[str, _Path]] = {}
        self.scalars: dict[str, dict[str, _Path]] = {}
        if not self.groups:
            raise self._error(f"{key!r} has no groups of parameters. {_THEN}")

    def sort_states(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Fills `kinds` and `scalars`.

        Args:
            shapes: of the parameters.

        Raises:
            CheckpointError: state of an unknown parameter, or of another shape than its parameter.
        """
        self.kinds, self.scalars = {name: {} for name in shapes}, {name: {} for name in shapes}
        for (name, kind), path in self._states.items():
            if name not in shapes:
                raise self._error(
                    f"{self._key!r} has {kind} of {name!r}, which is in none of its groups; the checkpoint is damaged, resume "
                    "from another."
                )
            shape = self.saved.entries[path].shape
            if shape is None or (not shape and (shapes[name] or kind == "step")):
                self.scalars[name][kind] = path
            elif shape == shapes[name]:
                self.kinds[name][kind] = path
            else:
                raise self._error(
                    f"{kind} of {name!r} has shape {shape} and the parameter {shapes[name]}: either a rank's file of weights is "
                    f"missing, or the optimizer's state is no value an element, which is not covered. {_THEN}"
                )

    def _nested_groups(self, entries: Mapping[_Path, _Path]) -> tuple[ForeignGroup, ...]:
        settings: dict[int, dict[str, Any]] = {}
        for rest, path in entries.items():
            if rest[0] == "param_groups" and len(rest) == 3:
                settings.setdefault(rest[1], {})[rest[2]] = self.saved.value(path)
        groups = []
        for _, group in sorted(settings.items()):
            names = group.pop("params", None)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise self._error(f"the optimizer's groups have no names. {_THEN}")
            groups.append(ForeignGroup(settings=group, names=tuple(names)))
        return tuple(group for group in groups if group.names)

    def _flat_groups(self, entries: Mapping[_Path, _Path]) -> tuple[ForeignGroup, ...]:
        settings: dict[str, dict[str, Any]] = {}
        for (name, setting), path in self._flat("param_groups", entries):
            settings.setdefault(name, {})[setting] = self.saved.value(path)
        groups: list[tuple[dict[str, Any], list[str]]] = []
        for name, found in settings.items():
            members = next((members for known, members in groups if known == found), None)
            if members is None:
                groups.append((found, members := []))
            members.append(name)
        return tuple(ForeignGroup(settings=found, names=tuple(members)) for found, members in groups)

    def _flat(self, part: str, entries: Mapping[_Path, _Path]) -> Iterator[tuple[tuple[str, str], _Path]]:
        """((parameter, what is said of it), path), of keys such as `state.lm_head.weight.exp_avg`."""
        for (key,), path in entries.items():
            if not str(key).startswith(f"{part}."):
                continue
            rest = str(key).removeprefix(f"{part}.")
            cuts = [at for at, letter in enumerate(rest) if letter == "." and rest[:at] in self._names]
            if not cuts:
                raise self._error(
                    f"{key!r} names no weight of the model; the checkpoint is damaged, resume from another."
                )
            yield (rest[: cuts[-1]], rest[cuts[-1] + 1 :]), path

    def _error(self, fault: str) -> CheckpointError:
        return CheckpointError(f"hf_zero: {self.saved.folder}: {fault}")


def _nested_states(entries: Mapping[_Path, _Path]) -> Iterator[tuple[tuple[str, str], _Path]]:
    for rest, path in entries.items():
        if rest[0] == "state" and len(rest) >= 3:
            yield (".".join(map(str, rest[1:-1])), rest[-1]), path
