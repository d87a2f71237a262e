"""Checks of versions and of Triton's needs for compiling."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from ..versions import OLDEST, in_words, is_older, release_of
from .finding import Finding, absent, bad, good, hint

# ---- Versions of Python, libraries, NCCL and the driver ----

_NEWEST_TORCH = (2, 15)
"""The newest release that has passed the tests."""

_LEAST_PYTHON = (3, 10)
_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_PATIENCE_S = 10.0


def versions() -> Iterator[Finding]:
    yield _python()
    for name, least in OLDEST.items():
        yield library(name, least)
    if not is_older(torch.__version__, (_NEWEST_TORCH[0], _NEWEST_TORCH[1] + 1)):
        advice = f"The newest release tested with hf_zero is {in_words(_NEWEST_TORCH)}: compare losses with `hf-zero parity`."
        yield hint("newest torch", torch.__version__, advice)
    yield _optional("triton")
    yield _nccl()
    yield driver()


def _python() -> Finding:
    found = platform.python_version()
    if sys.version_info < _LEAST_PYTHON:
        return bad("python", found, f"hf_zero needs Python {in_words(_LEAST_PYTHON)} or later.")
    return good("python", found)


def library(name: str, least: tuple[int, ...], user: str = "hf_zero") -> Finding:
    """Checks whether the library `name` is installed with at least the release `least`, as `user` needs."""
    wanted = f"{name}>={in_words(least)}"
    found = release_of(name)
    if found is None:
        return bad(name, "not installed", f"pip install '{wanted}'")
    if is_older(found, least):
        return bad(name, found, f"{user} needs {in_words(least)} or later: pip install -U '{wanted}'")
    return good(name, found)


def _optional(name: str) -> Finding:
    found = release_of(name)
    return absent(name, "not installed: fused kernels are not used") if found is None else good(name, found)


def _nccl() -> Finding:
    if not torch.cuda.is_available():
        return absent("NCCL", "no GPU")
    if not torch.distributed.is_nccl_available():
        return bad(
            "NCCL",
            "this torch is built without it",
            "Install torch's own CUDA build: ranks on GPUs communicate through NCCL.",
        )
    return good("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def driver() -> Finding:
    """Checks NVIDIA's driver, and whether this torch works with the driver."""
    if shutil.which(_DRIVER[0]) is None:
        return absent("driver", "no GPU")
    try:
        said = subprocess.run(_DRIVER, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return bad(
            "driver", f"nvidia-smi does not answer: {error}", "The driver hangs or is broken: restart the machine."
        )
    if said.returncode != 0:
        return bad("driver", said.stdout.strip() or said.stderr.strip(), "Repair or reinstall NVIDIA's driver.")
    found = said.stdout.strip().partition("\n")[0]
    if torch.version.cuda is None:
        advice = "pip install torch from the CUDA index that pytorch.org names: this build trains on the CPU only."
        return bad("driver", f"{found}, and torch is built without CUDA", advice)
    if not torch.cuda.is_available():
        advice = f"torch is built for CUDA {torch.version.cuda}: update the driver, and check CUDA_VISIBLE_DEVICES."
        return bad("driver", f"{found}, and torch sees no GPU", advice)
    return good("driver", found)


# ---- Requirements of Triton's compiler: a C compiler, Python's headers, a writable folder ----

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
        value = f"CC is {wanted!r}, which was not found" if wanted else "none of " + ", ".join(_COMPILERS)
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
        yield fault("Python headers for Triton", f"{header} was not found", advice)
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
