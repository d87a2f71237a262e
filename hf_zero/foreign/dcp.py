"""Reads checkpoints of torch.distributed.checkpoint, in FSDP's layout."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.faults import CheckpointError
from ..checkpoint.files import is_inside
from ..checkpoint.origin import METADATA_NAME, MODEL_FOLDER, OPTIMIZER_FOLDER, weight_shards_of
from ..layout.boxes import Box
from ..layout.intervals import Interval
from .pickles import Record, load_dcp_metadata, load_stream
from .states import MASTER, Chunk, ChunkedFolder, ForeignCheckpoint, ForeignGroup, SavedEntry, WeightShards

# ---- A folder of torch.distributed.checkpoint: tensors by their path in the saved dictionary, read in chunks ----

_VERSIONS = (None, "1.0.0")


class DcpFolder(ChunkedFolder):
    """A folder of torch.distributed.checkpoint.

    Raises:
        CheckpointError: the folder is unfinished, damaged, or written with settings that are not supported.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        metadata = load_dcp_metadata(folder / ".metadata").fields
        if metadata.get("version") not in _VERSIONS:
            raise CheckpointError(
                f"hf_zero: {folder} has DCP version {metadata['version']!r}; supported: {_VERSIONS[-1]}. Continue the run with "
                "FSDP."
            )
        paths = metadata.get("planner_data") or {}
        records = self._records(metadata.get("storage_data") or {})
        self._ends: dict[str, int] = {}
        for key, entry in metadata["state_dict_metadata"].items():
            path = paths.get(key)
            if not isinstance(path, tuple):
                raise CheckpointError(
                    f"hf_zero: {folder} was not written with DefaultSavePlanner ({key!r} has no path), which is not supported. "
                    "Continue the run with FSDP."
                )
            self.entries[path] = self._entry(key, entry, records)
        self._refuse_short_files()

    def value(self, path: tuple[Any, ...]) -> Any:
        """Returns a plain value, or a tensor of one element with its saved shape."""
        [chunk] = self.entries[path].chunks
        return chunk.load()

    def _records(self, storage: dict[Record, Record]) -> dict[tuple[str, tuple[int, ...] | None], Record]:
        records = {}
        for index, info in storage.items():
            offset = index.fields.get("offset")
            records[index.fields["fqn"], None if offset is None else tuple(offset)] = info
        return records

    def _entry(self, key: str, entry: Record, records: dict[Any, Record]) -> SavedEntry:
        if "chunks" not in entry.fields:
            record = records.get((key, None))
            return SavedEntry(shape=None, dtype=None, chunks=(self._chunk(key, (), (), record),))
        boxes = [(tuple(box.fields["offsets"]), tuple(box.fields["sizes"])) for box in entry.fields["chunks"]]
        return SavedEntry(
            shape=tuple(entry.fields["size"]),
            dtype=_dtype_of(entry),
            chunks=tuple(self._chunk(key, offsets, sizes, records.get((key, offsets))) for offsets, sizes in boxes),
        )

    def _chunk(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], record: Record | None) -> Chunk:
        if record is None:
            raise CheckpointError(
                f"hf_zero: {self.folder}/.metadata does not state where {key!r} is stored; it is damaged, resume from another "
                "checkpoint."
            )
        fields = record.fields
        if fields.get("transform_descriptors"):
            raise CheckpointError(
                f"hf_zero: {self.folder} was written with transforms ({fields['transform_descriptors']}), which are not "
                "supported. Continue the run with FSDP."
            )
        file = fields["relative_path"]
        if not is_inside(file):
            raise CheckpointError(
                f"hf_zero: {self.folder}/.metadata names {file!r}, which is not a file of that folder."
            )
        start, length = fields["offset"], fields["length"]
        self._ends[file] = max(self._ends.get(file, 0), start + length)
        return Chunk(offsets=offsets, sizes=sizes, file=file, load=partial(self._load, file, start, length))

    def _refuse_short_files(self) -> None:
        for file, end in self._ends.items():
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(
                    f"hf_zero: {path} is missing. Each rank writes its own file: copy all of them into one folder."
                )
            if path.stat().st_size < end:
                raise CheckpointError(
                    f"hf_zero: {path} is truncated: it has {path.stat().st_size} of {end} bytes. Resume from another "
                    "checkpoint."
                )

    def _load(self, name: str, start: int, length: int) -> Any:
        path = self.folder / name
        try:
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(length)
        except OSError as error:
            raise CheckpointError(
                f"hf_zero: {path} cannot be read ({error}). Resume from another checkpoint."
            ) from error
        return load_stream(content, path)


def _dtype_of(entry: Record) -> torch.dtype | None:
    properties = entry.fields.get("properties")
    if not isinstance(properties, Record):
        return None
    values = (*properties.unnamed, *properties.fields.values())
    return next((value for value in values if isinstance(value, torch.dtype)), None)


# ---- The optimizer in such a folder, nested or flattened by parameter ----

_THEN = "Continue the run with FSDP, or save it with FSDP and state_dict_type SHARDED_STATE_DICT."
_Path = tuple[Any, ...]


class DcpOptimizer:
    """Groups of a saved optimizer, and the locations of its state.

    Args:
        key: key of the optimizer in the saved dictionary.
        weights: names of the model's weights, with which flattened keys are split.

    Attributes:
        saved: the folder.
        groups: groups in their order. Flattened optimizers record no groups; parameters with equal settings form one.
        kinds, scalars: for each parameter, kind → path of values for each element, and of a value for the whole parameter.

    Raises:
        CheckpointError: the optimizer has no groups, or the groups have no names.
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
            shapes: shapes of the parameters.

        Raises:
            CheckpointError: there is state of an unknown parameter, or its shape differs from the parameter's.
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
                    f"{kind} of {name!r} has shape {shape}, but the parameter has {shapes[name]}: either a rank's weights file "
                    f"is missing, or the optimizer's state does not have one value per element, which is not supported. {_THEN}"
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
        """Yields ((parameter, name), path) for keys such as `state.lm_head.weight.exp_avg`."""
        for (key,), path in entries.items():
            if not str(key).startswith(f"{part}."):
                continue
            rest = str(key).removeprefix(f"{part}.")
            cuts = [at for at, letter in enumerate(rest) if letter == "." and rest[:at] in self._names]
            if not cuts:
                raise self._error(
                    f"{key!r} does not name a weight of the model; the checkpoint is damaged, resume from another."
                )
            yield (rest[: cuts[-1]], rest[cuts[-1] + 1 :]), path

    def _error(self, fault: str) -> CheckpointError:
        return CheckpointError(f"hf_zero: {self.saved.folder}: {fault}")


def _nested_states(entries: Mapping[_Path, _Path]) -> Iterator[tuple[tuple[str, str], _Path]]:
    for rest, path in entries.items():
        if rest[0] == "state" and len(rest) >= 3:
            yield (".".join(map(str, rest[1:-1])), rest[-1]), path


# ---- FSDP runs saved by torch.distributed.checkpoint, in the formats of accelerate, Trainer and plain loops ----

_MODEL_KEY = "model"
_OPTIMIZER_KEYS = ("optimizer", "optim")


class DcpCheckpoint(ForeignCheckpoint):
    """Parameters and optimizer state by name, sharded over any mesh. A rank opens only the chunks with its rows.

    Args:
        folder: a folder with `pytorch_model_fsdp_0/` and `optimizer_0/`; or with `.metadata` of a dictionary with the keys
            "model" and "optimizer" (or "optim"); or written by `save_pretrained(..., distributed_checkpoint=True)`, with the
            files of `save_optimizer_distributed` in the same or a separate folder.

    Raises:
        CheckpointError: the folder is unfinished, contains only the model, or was written with settings that are not supported.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._model, saved = _opened(folder)
        self._weights = {".".join(map(str, path[1:])): path for path in self._model.entries if path[0] == _MODEL_KEY}
        key = next((key for key in _OPTIMIZER_KEYS if any(path[0] == key for path in saved.entries)), None)
        if key is None or not self._weights:
            wanted = f"{_MODEL_KEY!r} and {' or '.join(map(repr, _OPTIMIZER_KEYS))}"
            found = sorted({str(path[0]) for path in (*self._model.entries, *saved.entries)})[:8]
            raise CheckpointError(f"hf_zero: {folder} holds {found}, but {wanted} are needed to resume. {_THEN}")
        self._optimizer = DcpOptimizer(saved, key, tuple(self._weights))
        self.groups = self._optimizer.groups
        trained = [name for group in self.groups for name in group.names]
        for name in trained:
            if name not in self._weights:
                raise CheckpointError(
                    f"hf_zero: {folder}: the optimizer has {name!r}, but {self._model.folder.name} does not. The two are not "
                    "from one run; resume from another checkpoint."
                )
        self.shapes = {name: self._model.entries[self._weights[name]].shape or () for name in trained}
        self._optimizer.sort_states(self.shapes)
        ranks = {chunk.file for entry in self._model.entries.values() for chunk in entry.chunks}
        self.origin = f"FSDP, torch.distributed.checkpoint of {len(ranks)} files"

    def kinds_of(self, name: str) -> tuple[str, ...]:
        return (MASTER, *self._optimizer.kinds[name])

    def scalars_of(self, name: str) -> dict[str, Any]:
        return {kind: self._optimizer.saved.value(path) for kind, path in self._optimizer.scalars[name].items()}

    def read(self, kind: str, name: str, interval: Interval) -> torch.Tensor:
        return self.read_part(kind, name, Box.whole(self.shapes[name]), interval)

    def read_part(self, kind: str, name: str, box: Box, interval: Interval) -> torch.Tensor:
        if kind == MASTER:
            return self._model.read(self._weights[name], interval, box)
        return self._optimizer.saved.read(self._optimizer.kinds[name][kind], interval, box)

    def other_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in self.weight_shapes().items():
            if name not in self.shapes:
                whole = Interval(0, torch.Size(shape).numel())
                yield name, self._model.read(self._weights[name], whole).view(shape)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: self._model.entries[path].shape for name, path in self._weights.items()}
        return self.shapes | {name: shape for name, shape in shapes.items() if shape is not None}

    def weight_dtype(self, name: str) -> torch.dtype:
        dtype = self._model.entries[self._weights[name]].dtype
        return super().weight_dtype(name) if dtype is None else dtype

    def read_weight(self, name: str, box: Box, interval: Interval) -> torch.Tensor:
        return self._model.read(self._weights[name], interval, box)


def _opened(folder: Path) -> tuple[ChunkedFolder, DcpFolder]:
    if weight_shards_of(folder):
        return WeightShards(folder, _MODEL_KEY), DcpFolder(_optimizer_next_to(folder))
    if (folder / METADATA_NAME).is_file():
        both = DcpFolder(folder)
        return both, both
    for needed in (MODEL_FOLDER, OPTIMIZER_FOLDER):
        if not (folder / needed).is_dir():
            raise CheckpointError(f"hf_zero: {folder} has no {needed}/, so the run cannot resume from it. {_THEN}")
    return DcpFolder(folder / MODEL_FOLDER), DcpFolder(folder / OPTIMIZER_FOLDER)


def _optimizer_next_to(folder: Path) -> Path:
    """Finds the folder of transformers' `save_optimizer_distributed`, next to the weights or in a folder below."""
    found = [path for path in (folder, *sorted(folder.iterdir())) if (path / METADATA_NAME).is_file()]
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(
            f"hf_zero: {folder} has weights but no optimizer, so the run cannot resume from it. Save it with "
            "transformers.distributed.save_optimizer_distributed, into the same folder or a subfolder."
        )
    raise CheckpointError(
        f"hf_zero: {folder} has several folders that may be the optimizer's: {', '.join(str(path) for path in found)}. Keep "
        "only the one that was saved with these weights."
    )
