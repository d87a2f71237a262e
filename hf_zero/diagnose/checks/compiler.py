"""What Triton needs to compile kernels: a C compiler, Python's headers, a folder to write to."""

import importlib.util
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from ..finding import Finding, absent, bad, good, hint

_COMPILERS = ("cc", "gcc", "clang")


def compiler() -> Iterator[Finding]:
    if importlib.util.find_spec("triton") is None:
        yield absent("C compiler for Triton", "Triton is not installed")
        return
    # Without a GPU nothing is compiled.
    fault = bad if torch.cuda.is_available() else hint
    wanted = os.environ.get("CC")
    found = shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        value = f"CC is {wanted!r}, which is not there" if wanted else "none of " + ", ".join(_COMPILERS)
        yield fault(
            "C compiler for Triton", value, "apt-get install gcc, or set CC to a compiler; or `kernels: never`."
        )
    else:
        yield good("C compiler for Triton", found)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if header.exists():
        yield good("Python headers for Triton", str(header))
    else:
        advice = "apt-get install python3-dev (of this Python's version); or `kernels: never`."
        yield fault("Python headers for Triton", f"{header} is not there", advice)
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    if _can_write_below(cache):
        yield good("Triton's cache", str(cache))
    else:
        yield fault("Triton's cache", f"{cache} cannot be written", "Set TRITON_CACHE_DIR to a folder on a local disk.")


def _can_write_below(folder: Path) -> bool:
    above = next((each for each in (folder, *folder.parents) if each.exists()), None)
    if above is None or not above.is_dir():
        return False
    try:
        with tempfile.TemporaryFile(dir=above):
            return True
    except OSError:
        return False
