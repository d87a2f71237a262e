"""Pickled files of other engines, opened so that nothing in them can run.

`torch.load(weights_only=True)` makes tensors and plain values only. DeepSpeed puts a few objects of its own classes beside
them; each stands here under its full name, with something plain that takes its place. DeepSpeed is not imported.

The `.metadata` of torch.distributed.checkpoint is a bare pickle of protocol 4, which `weights_only` does not read, and
torch's own reader would unpickle whatever it names. Here it goes through an unpickler that knows the names below and
raises at any other.
"""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..format.manifest import CheckpointError


class Unread:
    """In the place of an object that nobody asks for: takes its state and forgets it."""

    def __init__(self, *_args: object):
        pass

    def __setstate__(self, _state: object) -> None:
        pass


class Record:
    """In the place of a dataclass: its fields are in `fields`, and nothing of the class itself is there.

    Those of a class that pickles them without names are in `unnamed`.
    """

    fields: dict[str, Any]
    unnamed: tuple[Any, ...] = ()

    def __new__(cls, *_args: object) -> "Record":
        # An unpickler makes objects without __init__, and those without a state it leaves so.
        record = super().__new__(cls)
        record.fields = {}
        return record

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.fields = {str(name): value for name, value in state.items()}
        elif isinstance(state, tuple):
            self.unnamed = state


_OF_DEEPSPEED = (
    # (what takes its place, full name in the file)
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Unread, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Unread, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Unread, "deepspeed.utils.tensor_fragment.fragment_address"),
)


def load_deepspeed_file(path: Path) -> dict[str, Any]:
    """A `.pt` file that DeepSpeed wrote, memory-mapped: tensors are read where they are looked at.

    Raises:
        CheckpointError: missing, cut off, or with a class that is not among the known ones.
    """
    try:
        with torch.serialization.safe_globals(list(_OF_DEEPSPEED)):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"hf_zero: {path} is missing; the checkpoint is not whole. Copy the files of all ranks into one folder, or resume "
            "from another."
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"hf_zero: {path} cannot be read ({reason}): it is cut off or damaged, or holds objects of classes that hf_zero "
            "does not know. Resume from another checkpoint."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"hf_zero: {path} holds a {type(content).__name__}, and DeepSpeed writes a dictionary.")
    return content


_LARGEST_METADATA_BYTES = 2**30


def _layout_of(name: object) -> str:
    return str(name)


def _joined(*parts: str) -> str:
    return "/".join(parts)


_OF_DCP: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch.distributed.checkpoint.metadata", "Metadata"): Record,
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): Record,
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): Record,
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"): Record,
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"): Record,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): Record,
    ("torch.distributed.checkpoint.metadata", "StorageMeta"): Record,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): int,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Record,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _layout_of,
    ("pathlib", "PosixPath"): _joined,
    ("pathlib", "WindowsPath"): _joined,
    ("pathlib", "PurePosixPath"): _joined,
    ("pathlib._local", "PosixPath"): _joined,
    ("pathlib._local", "WindowsPath"): _joined,
    ("collections", "OrderedDict"): dict,
}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _PlainUnpickler(pickle.Unpickler):
    """Makes what `_OF_DCP` says and dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OF_DCP:
            return _OF_DCP[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is none of the classes of a DCP checkpoint")

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError(f"it refers to an outside object, {pid!r}")


def load_dcp_metadata(path: Path) -> Record:
    """The `.metadata` of a torch.distributed.checkpoint folder, as records of plain values.

    Raises:
        CheckpointError: missing, cut off, or with a class that is not among the known ones.
    """
    try:
        if path.stat().st_size > _LARGEST_METADATA_BYTES:
            raise CheckpointError(
                f"hf_zero: {path} has {path.stat().st_size} bytes, and at most {_LARGEST_METADATA_BYTES} are read."
            )
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"hf_zero: {path} cannot be read ({error}); it is written last, so the checkpoint was not finished. Resume from "
            "another."
        ) from error
    try:
        metadata = _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        # A damaged pickle may raise anything.
        raise CheckpointError(
            f"hf_zero: {path} is not a DCP checkpoint's metadata, or is damaged ({error}). Resume from another checkpoint."
        ) from error
    if not isinstance(metadata, Record) or "state_dict_metadata" not in metadata.fields:
        raise CheckpointError(f"hf_zero: {path} is not a DCP checkpoint's metadata. Resume from another checkpoint.")
    return metadata


def load_stream(content: bytes, path: Path) -> Any:
    """A tensor or plain value that `torch.save` wrote into a part of a file.

    Raises:
        CheckpointError: cut off or damaged.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"hf_zero: {path} is cut off or damaged ({reason}). Resume from another checkpoint."
        ) from error
