"""The error of all code for checkpoints, and the escaping of untrusted text from files in messages."""

import errno
import pickle
import re
import struct
import zipfile

from ..config.checks import SpelledError, spelled


class CheckpointError(SpelledError, ValueError):
    """A checkpoint cannot be read or written. The message names the folder or file, the fault and the remedy."""


def shown(text: object, most: int = 200) -> str:
    """Returns a value as one line of at most `most` characters. Control and unprintable characters are escaped."""
    line = spelled(str(text)[: most + 1]).replace("\n", "\\n")
    return line if len(line) <= most else f"{line[: most - 1]}…"


def in_one_line(error: BaseException) -> str:
    """Returns an error's class and the first line of its text."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


_LONGEST_REASON = 300


def reason(error: Exception | None) -> str:
    """Returns an error's first line, joined with the next if the first ends with a colon; the error's class if the text is
    empty."""
    said = []
    for line in str(error).strip().splitlines():
        said.append(line.strip())
        # transformers' config errors name a field and a colon first, and the fault on the next line.
        if not said[-1].endswith(":"):
            break
    return (" ".join(said) or type(error).__name__)[:_LONGEST_REASON].rstrip(".")


_BY_DAMAGE = (EOFError, KeyError, IndexError, ValueError, TypeError, AttributeError, struct.error, zipfile.BadZipFile)
"""Raised by readers of pickles and archives on damaged bytes. A damaged pickle may raise any of these."""


_SAYS_DAMAGE = re.compile(
    r"PytorchStreamReader|archive is corrupted|unexpected EOF|magic number|wrong byte size|unexpected pos"
)
"""Marks damage in a RuntimeError of torch, which uses that class for many other faults."""


_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module)")

_SAID_BY_UNPICKLER = re.compile(r"WeightsUnpickler error:\s*(.*)")

_SAYS_CLASS = re.compile(r"add_safe_globals|must be imported")
"""Marks an error of the unpickler about a class that it does not know."""


def read_fault(error: Exception) -> str:
    """Explains why a file cannot be read, as words to follow its name. Only damaged bytes are called damage."""
    text = str(error)
    refused = _REFUSED.search(text)
    if refused is not None:
        return f"needs {shown(refused[1])}, which is not loaded: a checkpoint may contain only tensors and plain values"
    said = _SAID_BY_UNPICKLER.search(text)
    cause = f"{type(error).__name__}: {said[1]}" if said is not None else in_one_line(error)
    if isinstance(error, pickle.UnpicklingError):
        is_damage = _SAYS_CLASS.search(cause) is None
    elif isinstance(error, OSError):
        # torch seeks before the beginning of an archive that is cut off.
        is_damage = error.errno == errno.EINVAL
    elif isinstance(error, RuntimeError):
        is_damage = _SAYS_DAMAGE.search(text) is not None
    else:
        # Compare the class by name: this module does not import safetensors.
        is_damage = isinstance(error, _BY_DAMAGE) or type(error).__name__ == "SafetensorError"
    return f"{'is cut off or damaged' if is_damage else 'cannot be read'} ({shown(cause)})"
