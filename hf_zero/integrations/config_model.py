"""Builds the model of a folder's config.json for names, shapes and ties, without trusting the file.

A config may request a million layers, a class that is not a model, or foreign code and weights. So the model is built in a
separate process, on the meta device, offline, and with limits on tensors, memory and time. Only transformers' own model
classes are called.
"""

import gc
import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import huggingface_hub.constants
import torch
from torch import nn

from ..checkpoint.faults import CheckpointError, reason
from ..checkpoint.files import refuse_links
from ..checkpoint.json_files import read_mapping

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


CONFIG_NAME = "config.json"

TIME_LIMIT_S = 60.0
"""Time limit for building a model of shapes only; the largest ones need a few seconds."""

_MOST_BYTES = 4 * 2**30
"""Limit of memory in addition to this process's own."""

_MANY = 2000
"""Tensors or modules allowed in addition to the number expected from the weights."""

_MODULES_A_TENSOR = 20

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class ExpectedTensor:
    """A tensor saved by the config's model.

    Attributes:
        shape: its whole shape.
        is_floating: whether its values are floating-point numbers.
        names: all names of the tied tensor, including this one.
    """

    shape: tuple[int, ...]
    is_floating: bool
    names: frozenset[str]


def expected_tensors(folder: Path, saved: int, *, as_in_files: bool = True) -> dict[str, ExpectedTensor]:
    """Returns all tensors saved by the model of a folder's config, by name.

    Args:
        folder: the folder with the config.
        saved: number of tensors in the folder; a config whose model has many more is refused early.
        as_in_files: True for names and splits as in `save_pretrained`'s files; False for the model's own.

    Raises:
        CheckpointError: the config cannot be read, names no model class of transformers, or needs too many resources.
    """
    return _in_a_child(folder, partial(_expected, folder, saved, as_in_files))


def is_taken(folder: Path, saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bool:
    """Whether `from_pretrained` finds each tensor of the config's model among the saved ones.

    transformers itself handles old names, names without the model's prefix, and tensors that many models omit.

    Args:
        folder: the folder with the config.
        saved: shape and dtype by name.

    Raises:
        CheckpointError: like `expected_tensors`.
    """
    return _in_a_child(folder, partial(_is_taken, folder, saved))


def _in_a_child(folder: Path, find: Callable[[], Answer]) -> Answer:
    """Runs `find` in a separate process with limits, and returns its result."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    # A separate process, because a config from the Hub may need any amount of memory and time. Not a multiprocessing one,
    # because daemonic processes may not start such children.
    child = os.fork()
    if child == 0:
        try:
            _tell(folder, find, sending)
        finally:
            # Not an exception or sys.exit: the child is a copy of this process, and would also run its callers, exit handlers
            # and buffers to the end.
            os._exit(0)
    # Close the parent's copy: while it is open, a dead child causes no EOFError, and the parent waits for the time limit.
    sending.close()
    path = folder / CONFIG_NAME
    try:
        if not receiving.poll(TIME_LIMIT_S):
            raise CheckpointError(
                f"hf_zero: {path}: its model could not be built within {TIME_LIMIT_S:g} s, even without weights. The config "
                "describes a larger model than these weights have; use the config that belongs to them."
            )
        answer = receiving.recv()
    except EOFError:
        answer = (
            f"hf_zero: {path}: the process that built its model crashed. Use the config that belongs to these weights."
        )
    finally:
        # Also after an answer, because the child may still be in transformers' clean-up.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        receiving.close()
    # A string is a reason, because no `find` returns a string.
    if isinstance(answer, str):
        raise CheckpointError(answer)
    return answer


def read_config(folder: Path) -> "PretrainedConfig":
    """Reads a folder's config with transformers' own classes only.

    Raises:
        CheckpointError: the config cannot be read, or transformers does not know its type.
    """
    from transformers import AutoConfig

    path = folder / CONFIG_NAME
    refuse_links(folder, [path])
    # Check the size first, because transformers would read a file of any size.
    read_mapping(path)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # A config may name an attention implementation of a foreign repository. The public argument `attn_implementation` does
        # not help, because `_attn_implementation` in the file takes precedence.
        config._attn_implementation = "eager"
    except Exception as error:
        # Catch all, because the errors depend on the class named in the file and its handling of the values.
        raise CheckpointError(f"hf_zero: {path} cannot be read ({reason(error)}).") from error
    return config


def model_class(config: "PretrainedConfig", folder: Path) -> type["PreTrainedModel"]:
    """Returns the class named in a config. Raises `CheckpointError` unless it is a model class of transformers."""
    import transformers
    from transformers import PreTrainedModel

    named = config.architectures
    name = named[0] if isinstance(named, list) and named else None
    found = None
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z]\w{0,199}", name) is not None:
        found = getattr(transformers, name, None)
    if found is None:
        raise CheckpointError(
            f"hf_zero: {folder / CONFIG_NAME} names the architecture {str(named)[:200]}, which transformers does not have."
        )
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise CheckpointError(
            f"hf_zero: {folder / CONFIG_NAME} names the architecture {name}, which is not a subclass of PreTrainedModel."
        )
    return found


def meta_model(folder: Path, saved: int) -> "PreTrainedModel":
    """Returns the model of a folder's config on the meta device. Raises `CheckpointError` like `expected_tensors`."""
    config = read_config(folder)
    kind = model_class(config, folder)
    try:
        with torch.device("meta"), _at_most(saved, folder):
            model = kind(config)
        model.tie_weights()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"hf_zero: {folder / CONFIG_NAME}: its model, {kind.__name__}, cannot be built ({reason(error)})."
        ) from error
    return model


@contextmanager
def _at_most(saved: int, folder: Path) -> Iterator[None]:
    """Refuses a model with far more tensors or modules than in the files, as soon as they are created."""
    counts = {"tensors": 0, "modules": 0}
    most = {"tensors": 4 * saved + _MANY, "modules": _MODULES_A_TENSOR * saved + _MANY}

    def count(what: str) -> None:
        counts[what] += 1
        if counts[what] > most[what]:
            raise CheckpointError(
                f"hf_zero: {folder / CONFIG_NAME} describes a model with more than {most[what]} {what}, but the folder has "
                f"{saved} tensors. Use the config that belongs to the weights."
            )

    hooks = nn.modules.module
    handles = [
        hooks.register_module_parameter_registration_hook(lambda module, name, value: count("tensors")),
        hooks.register_module_module_registration_hook(lambda module, name, value: count("modules")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tell(folder: Path, find: Callable[[], object], sending: Connection) -> None:
    """Sends the result, or the reason for a failure. Runs in the separate process."""
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    torch.set_num_threads(1)
    # Without garbage collection, an endlessly growing dictionary reaches the memory limit before the time limit.
    gc.disable()
    _limit_memory()
    try:
        answer = find()
    except CheckpointError as error:
        answer = str(error)
    except Exception as error:
        answer = f"hf_zero: {folder / CONFIG_NAME}: its model cannot be built ({reason(error)})."
    sending.send(answer)


def _expected(folder: Path, saved: int, as_in_files: bool) -> dict[str, ExpectedTensor]:
    from transformers.core_model_loading import revert_weight_conversion

    model = meta_model(folder, saved)
    state = model.state_dict(keep_vars=True)
    if as_in_files:
        # A layer's experts are one tensor in the model but many in its files.
        state = revert_weight_conversion(model, state)
    names_of: dict[int, set[str]] = {}
    for name, value in state.items():
        names_of.setdefault(id(value), set()).add(name)
    return {
        name: ExpectedTensor(
            shape=tuple(value.shape),
            is_floating=value.is_floating_point(),
            names=frozenset(names_of[id(value)]),
        )
        for name, value in state.items()
    }


def _is_taken(folder: Path, saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bool:
    import transformers

    config = read_config(folder)
    kind = model_class(config, folder)
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in saved.items()}
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    with _at_most(len(saved), folder):
        _, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    return not (found["missing_keys"] or found["mismatched_keys"] or found["error_msgs"])


def _limit_memory() -> None:
    """Limits this process's further memory, if the system reports the current one; otherwise only the time is limited."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        pages = int(statm.read_text().split()[0])
        most = pages * resource.getpagesize() + _MOST_BYTES
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
