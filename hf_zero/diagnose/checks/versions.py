"""Versions of Python, libraries, NCCL and the driver."""

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch

from ..finding import Finding, absent, bad, good, hint

_LEAST = {"torch": (2, 11), "transformers": (5, 17), "accelerate": (1, 15)}
_NEWEST_TORCH = (2, 14)
"""The newest release with which the tests have passed."""

_LEAST_PYTHON = (3, 10)
_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_PATIENCE_S = 10.0


def versions() -> Iterator[Finding]:
    yield _python()
    for name, least in _LEAST.items():
        yield library(name, least)
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) > _NEWEST_TORCH:
        advice = (
            f"The newest release tested with hf_zero is {_in_words(_NEWEST_TORCH)}: compare losses by `hf-zero parity`."
        )
        yield hint("newest torch", torch.__version__, advice)
    yield _optional("triton")
    yield _nccl()
    yield driver()


def _python() -> Finding:
    found = platform.python_version()
    if sys.version_info < _LEAST_PYTHON:
        return bad("python", found, f"hf_zero needs Python {_in_words(_LEAST_PYTHON)} or later.")
    return good("python", found)


def library(name: str, least: tuple[int, ...], user: str = "hf_zero") -> Finding:
    """Whether the library `name` is installed, in the release `least` or a later one, which `user` needs."""
    wanted = f"{name}>={_in_words(least)}"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return bad(name, "not installed", f"pip install '{wanted}'")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < least:
        return bad(name, found, f"{user} needs {_in_words(least)} or later: pip install -U '{wanted}'")
    return good(name, found)


def _optional(name: str) -> Finding:
    try:
        return good(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return absent(name, "not installed: fused kernels are not used")


def _nccl() -> Finding:
    if not torch.cuda.is_available():
        return absent("NCCL", "no GPU")
    if not torch.distributed.is_nccl_available():
        return bad(
            "NCCL", "this torch is built without it", "Install torch's own CUDA build: ranks on GPUs talk by NCCL."
        )
    return good("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def driver() -> Finding:
    """NVIDIA's driver, and whether this torch can use it."""
    if shutil.which(_DRIVER[0]) is None:
        return absent("driver", "no GPU")
    try:
        said = subprocess.run(_DRIVER, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return bad(
            "driver", f"nvidia-smi does not answer: {error}", "The driver hangs or is broken: restart the machine."
        )
    if said.returncode != 0:
        return bad("driver", said.stdout.strip() or said.stderr.strip(), "Mend or reinstall NVIDIA's driver.")
    found = said.stdout.strip().partition("\n")[0]
    if torch.version.cuda is None:
        advice = "pip install torch from the CUDA index that pytorch.org names: this one trains on the CPU only."
        return bad("driver", f"{found}, and torch is built without CUDA", advice)
    if not torch.cuda.is_available():
        advice = f"torch is built for CUDA {torch.version.cuda}: update the driver, and look at CUDA_VISIBLE_DEVICES."
        return bad("driver", f"{found}, and torch sees no GPU", advice)
    return good("driver", found)


def _in_words(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
