"""Opens pickled files of other engines without running any code in them.

`torch.load(weights_only=True)` makes only tensors and plain values. DeepSpeed's files also contain a few objects of its own
classes; each is replaced by a plain object here under its full name. DeepSpeed is not imported.

The `.metadata` of torch.distributed.checkpoint is a bare pickle of protocol 4, which `weights_only` does not read, and torch's
own reader would unpickle any class. The reader in this file knows the names below and raises for all others. Its time and memory
grow with the size of the file and not with any number in it; Python's unpickler can allocate 16 GiB for nine bytes.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from ..checkpoint.faults import CheckpointError, read_fault, shown
from ..checkpoint.torch_files import load_tensors, refuse_sizes


class Unread:
    """Replaces an unneeded object, and drops its state."""

    def __init__(self, *_args: object):
        pass

    def __setstate__(self, _state: object) -> None:
        pass


class Record:
    """Replaces a dataclass by its fields in `fields`, without its class.

    If the class pickles its fields without names, they are in `unnamed`.
    """

    fields: dict[str, Any]
    unnamed: tuple[Any, ...] = ()

    def __new__(cls, *_args: object) -> "Record":
        # An unpickler makes objects without __init__, and does not call __setstate__ if there is no state.
        record = super().__new__(cls)
        record.fields = {}
        return record

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.fields = {name: value for name, value in state.items() if isinstance(name, str)}
        elif isinstance(state, tuple):
            self.unnamed = state


_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
"""Name → value of DeepSpeed's `ZeroStageEnum`."""


def _member(enumeration: object, name: object) -> int:
    """Replaces `getattr`, by which Python 3.11.0 to 3.11.3 pickles a member of an enumeration, for the ones replaced by `int`."""
    if enumeration is not int or not isinstance(name, str):
        raise pickle.UnpicklingError("it reads an attribute of an object that is not an enumeration")
    # Other enumerations only tell memory formats, which are not read.
    return _STAGES.get(name, 0)


_GETATTR = "builtins", "getattr"
_OF_DEEPSPEED = (
    # (replacement, full name in the file)
    (_member, ".".join(_GETATTR)),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Unread, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Unread, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Unread, "deepspeed.utils.tensor_fragment.fragment_address"),
)


def load_deepspeed_file(path: Path) -> dict[str, Any]:
    """Opens a `.pt` file of DeepSpeed. The file is memory-mapped, so tensors are read on access.

    Raises:
        CheckpointError: the file is missing, truncated, or contains an unknown class.
    """
    try:
        with torch.serialization.safe_globals(list(_OF_DEEPSPEED)):
            content = load_tensors(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"hf_zero: {path} is missing; the checkpoint is incomplete. Copy the files of all ranks into one folder, or resume "
            "from another."
        ) from error
    except Exception as error:
        # A damaged pickle may raise any exception.
        raise CheckpointError(f"hf_zero: {path} {read_fault(error)}. Resume from another checkpoint.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"hf_zero: {path} holds a {type(content).__name__}, but DeepSpeed writes a dictionary.")
    return content


_LARGEST_METADATA_BYTES = 2**30


_LONGEST_PATH = 4096
_LONGEST_SHARED = 64


def _layout_of(name: object) -> str:
    if not isinstance(name, str):
        raise pickle.UnpicklingError("it has a layout without a name")
    return name


def _joined(*parts: str) -> str:
    if sum(map(len, parts)) > _LONGEST_PATH:
        raise pickle.UnpicklingError(f"it has a path of more than {_LONGEST_PATH} characters")
    return "/".join(parts)


def _no_items() -> dict:
    return {}


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
    ("collections", "OrderedDict"): _no_items,
    _GETATTR: _member,
}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_SINGLE = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


def _known(module: str, name: str) -> Any:
    if (module, name) in _OF_DCP:
        return _OF_DCP[module, name]
    if module == "torch" and name in _DTYPES:
        return _DTYPES[name]
    raise pickle.UnpicklingError(f"it names {shown(f'{module}.{name}')}, which is not a class of a DCP checkpoint")


def _again(value: Any) -> Any:
    """Returns a value at its second or later reference; refuses nested values.

    With nested values which are each used twice, a few bytes create more than any hash or text of them can process.
    """
    is_flat = isinstance(value, tuple) and len(value) <= _LONGEST_SHARED
    if isinstance(value, list | dict | tuple) and not (
        is_flat and not any(isinstance(v, tuple | list | dict) for v in value)
    ):
        raise pickle.UnpicklingError("it uses one list or mapping more than once")
    return value


def _set_items(target: dict, items: list) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int | Record):
            raise pickle.UnpicklingError(f"it has a key of {type(key).__name__}")
        target[key] = value


def _plain_values(content: bytes) -> Any:
    """Reads a pickle of plain values, whose only names are dtypes and the ones in `_OF_DCP`.

    Raises:
        Exception: of any class, for other names and for damaged pickles.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def above_the_mark() -> list[Any]:
        mark = marks.pop()
        taken = stack[mark:]
        del stack[mark:]
        return taken

    for operation, argument, _ in pickletools.genops(content):
        match operation.name:
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(_again(memo[argument]))
            case name if name in _LITERALS:
                stack.append(argument)
            case name if name in _SINGLE:
                stack.append(_SINGLE[name])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(above_the_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                count = int(name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                value = stack.pop()
                list.append(stack[-1], value)
            case "APPENDS":
                values = above_the_mark()
                list.extend(stack[-1], values)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set_items(stack[-1], [key, value])
            case "SETITEMS":
                values = above_the_mark()
                _set_items(stack[-1], values)
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_known(module, name))
            case "GLOBAL":
                stack.append(_known(*str(argument).split(" ", 1)))
            case "REDUCE" | "NEWOBJ":
                arguments, make = stack.pop(), stack.pop()
                stack.append(make(*arguments))
            case "BUILD":
                state, record = stack.pop(), stack[-1]
                if not isinstance(record, Record):
                    raise pickle.UnpicklingError("it sets the state of an object without state")
                record.__setstate__(state)
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case name:
                raise pickle.UnpicklingError(f"it has {name}, which is in no DCP checkpoint")
    raise pickle.UnpicklingError("it is truncated")


def load_dcp_metadata(path: Path) -> Record:
    """Returns the `.metadata` of a torch.distributed.checkpoint folder, as records of plain values.

    Raises:
        CheckpointError: the file is missing, truncated, or contains an unknown class.
    """
    try:
        if path.stat().st_size > _LARGEST_METADATA_BYTES:
            raise CheckpointError(
                f"hf_zero: {path} has {path.stat().st_size} bytes; allowed: at most {_LARGEST_METADATA_BYTES}."
            )
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"hf_zero: {path} cannot be read ({error}); it is written last, so the checkpoint was not finished. Resume from "
            "another."
        ) from error
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"hf_zero: {path} {read_fault(error)}. Resume from another checkpoint.") from error
    try:
        metadata = _plain_values(content)
    except MemoryError as error:
        raise CheckpointError(f"hf_zero: {path} {read_fault(error)}. Resume from another checkpoint.") from error
    except Exception as error:
        # A damaged pickle may raise any exception.
        raise CheckpointError(
            f"hf_zero: {path} is not a DCP checkpoint's metadata, or is damaged ({shown(error)}). Resume from another "
            "checkpoint."
        ) from error
    if not isinstance(metadata, Record) or "state_dict_metadata" not in metadata.fields:
        raise CheckpointError(f"hf_zero: {path} is not a DCP checkpoint's metadata. Resume from another checkpoint.")
    return metadata


def load_stream(content: bytes, path: Path) -> Any:
    """Returns a tensor or plain value written by `torch.save` to a part of a file.

    Raises:
        CheckpointError: the bytes cannot be read; the message contains the cause.
    """
    try:
        stream = io.BytesIO(content)
        if is_zipfile(stream):
            refuse_sizes(stream)
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged pickle may raise any exception.
        raise CheckpointError(f"hf_zero: {path} {read_fault(error)}. Resume from another checkpoint.") from error
