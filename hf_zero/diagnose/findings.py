"""Findings of the doctor, and checks of versions, devices, compilers and disks."""

import importlib.util
import mmap
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..device import accelerators
from ..versions import OLDEST, in_words, is_older, release_of

# ---- One thing that the doctor has looked at ----

Status = Literal["good", "hint", "bad", "absent"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding and its remedy.

    Attributes:
        status: "bad" keeps a run from working or makes it much slower than it has to be; "hint" is worth knowing; "absent" is
            of a device or a library that is not there.
        advice: what to do; empty where nothing is to be done.
    """

    subject: str
    status: Status
    value: str
    advice: str = ""


def good(subject: str, value: str) -> Finding:
    return Finding(subject=subject, status="good", value=value)


def hint(subject: str, value: str, advice: str) -> Finding:
    return Finding(subject=subject, status="hint", value=value, advice=advice)


def bad(subject: str, value: str, advice: str) -> Finding:
    return Finding(subject=subject, status="bad", value=value, advice=advice)


def absent(subject: str, value: str) -> Finding:
    return Finding(subject=subject, status="absent", value=value)


# ---- Versions of Python, libraries, NCCL and the driver ----

_NEWEST_TORCH = (2, 14)
"""The newest release with which the tests have passed."""

_LEAST_PYTHON = (3, 10)
_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_PATIENCE_S = 10.0


def versions() -> Iterator[Finding]:
    yield _python()
    for name, least in OLDEST.items():
        yield library(name, least)
    if not is_older(torch.__version__, (_NEWEST_TORCH[0], _NEWEST_TORCH[1] + 1)):
        advice = (
            f"The newest release tested with hf_zero is {in_words(_NEWEST_TORCH)}: compare losses by `hf-zero parity`."
        )
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
    """Whether the library `name` is installed, in the release `least` or a later one, which `user` needs."""
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
            "NCCL", "this torch is built without it", "Install torch's own CUDA build: ranks on GPUs talk by NCCL."
        )
    return good("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def driver() -> Finding:
    """Finds NVIDIA's driver, and whether this torch can use it."""
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


# ---- What Triton needs to compile kernels: a C compiler, Python's headers, a folder to write to ----

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


# ---- GPUs: what they are, whether they reach each other's memory, and how fast pinned memory is copied ----

_PINNED_BYTES = 64 * 2**20
_SLOW_GB = 3.0
"""1e9 bytes a second: a quarter of what PCIe 3.0 x16 moves."""


def devices() -> Iterator[Finding]:
    count = torch.cuda.device_count()
    kind, others = accelerators()
    if kind not in ("cpu", "cuda"):
        advice = "hf_zero has run on NVIDIA GPUs and CPUs only: compare the first losses with `--zero 0`."
        yield hint(f"{kind} devices", str(others), advice)
    if torch.version.hip is not None:
        yield hint(
            "ROCm", torch.version.hip, "hf_zero has not run on AMD GPUs: compare the first losses with `--zero 0`."
        )
    if not torch.cuda.is_available():
        if count:
            # NVML counts GPUs also where the driver is too old for this torch.
            advice = (
                f"torch is built for CUDA {torch.version.cuda}: update the driver, or install an older build of torch."
            )
            yield bad("GPUs", f"{count}, and CUDA does not start", advice)
        else:
            yield absent("GPUs", "no GPU")
        for subject in ("access between GPUs", "pinned memory"):
            yield absent(subject, "no GPU")
        return
    names = [torch.cuda.get_device_properties(index) for index in range(count)]
    listed = ", ".join(f"{each.name} ({each.total_memory / 2**30:.0f} GiB)" for each in names)
    if len({(each.name, each.total_memory) for each in names}) > 1:
        advice = "The slowest and the smallest one set the pace. Choose equal ones by CUDA_VISIBLE_DEVICES."
        yield hint("GPUs", f"{count} that differ: {listed}", advice)
    else:
        yield good("GPUs", f"{count}: {listed}")
    yield peer_access(count)
    yield _pinned()


def peer_access(count: int) -> Finding:
    """Whether each of some GPUs can read each other one's memory."""
    if count < 2:
        return absent("access between GPUs", "one GPU")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    closed = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if closed:
        advice = (
            "Collectives go through host memory: links of a few GB/s. Turn IOMMU/ACS off in the BIOS (or give the virtual "
            "machine pass-through); `comm.weights: int8` and `comm.gradients: int8` send less."
        )
        return bad("access between GPUs", f"PCIe without peer access: {_pairs(closed)}", advice)
    return good("access between GPUs", f"all {len(pairs) // 2} pairs")


def _pairs(pairs: list[tuple[int, int]]) -> str:
    more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
    return ", ".join(f"{a}→{b}" for a, b in pairs[:4]) + more


def _pinned() -> Finding:
    try:
        pinned = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        return bad(
            "pinned memory",
            f"64 MiB cannot be pinned: {first}",
            "Raise the limit of locked memory: ulimit -l unlimited.",
        )
    there = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device="cuda")
    there.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(4):
        there.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    gb = 4 * _PINNED_BYTES / (time.perf_counter() - began_s) / 1e9
    if gb < _SLOW_GB:
        advice = "The GPU has few PCIe lanes: look at `nvidia-smi -q -d PCI`. Offload will be slow."
        return hint("pinned memory", f"{gb:.1f} GB/s to the GPU", advice)
    return good("pinned memory", f"{gb:.1f} GB/s to the GPU")


# ---- Whether this machine can train a model that transformers splits over ranks ----

_LEAST_TRANSFORMERS = (5, 23)


def tensor_parallelism(tp_size: int) -> Iterator[Finding]:
    """Checks the requirements of `parallel_config(tp_size=...)` beyond those of every run."""
    yield library("transformers", _LEAST_TRANSFORMERS, user=f"a model that is split over {tp_size} ranks")
    yield _copies(tp_size)


def _copies(tp_size: int) -> Finding:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    subject = "copies of the model"
    if gpus == 0:
        return absent(subject, "no GPU")
    if gpus % tp_size:
        advice = f"Choose a tp_size that divides {gpus}, or hide GPUs with CUDA_VISIBLE_DEVICES."
        return bad(subject, f"{gpus} GPUs cannot be divided into sets of {tp_size}", advice)
    return good(subject, f"{gpus // tp_size}, each over {tp_size} GPUs")


# ---- How fast a folder's disk writes and reads, past the page cache where that can be ----

_BYTES = 64 * 2**20
_BLOCK = 4 * 2**20
_SLOW_MB = 100.0


def disk(folder: Path) -> Iterator[Finding]:
    """Measures a folder's disk with a small file, which is removed afterwards."""
    subject = f"disk of {folder}"
    path = folder / f".hf-zero-doctor-{uuid.uuid4().hex}"
    try:
        state = os.statvfs(folder)
        if state.f_bavail * state.f_frsize < 2 * _BYTES:
            yield bad(subject, "full", "Make room: checkpoints and offload write there.")
            return
        try:
            write_mb, way = _write(path)
            read_mb = _read(path)
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        yield bad(subject, f"cannot be written: {error}", "Give a folder that this user may write to: --folder.")
        return
    said = f"writes {write_mb:,.0f} MB/s, reads {read_mb:,.0f} MB/s ({way})"
    if min(write_mb, read_mb) < _SLOW_MB:
        yield hint(subject, said, "Slow for offload to files (`offload.nvme_path`) and for large checkpoints.")
    else:
        yield good(subject, said)


def _write(path: Path) -> tuple[float, str]:
    """Megabytes a second, and how they were written."""
    # A mapping begins at a page, as writes past the cache need it.
    with mmap.mmap(-1, _BLOCK) as block:
        block.write(os.urandom(_BLOCK))
        # New, and through no link: others may write to the folder.
        flags, way = os.O_WRONLY | os.O_CREAT | os.O_EXCL, "O_DIRECT"
        try:
            file = os.open(path, flags | os.O_DIRECT, 0o600)
        except (OSError, AttributeError):
            # tmpfs and some network disks know no such thing.
            file, way = os.open(path, flags, 0o600), "fsync"
        try:
            began_s = time.perf_counter()
            for _ in range(_BYTES // _BLOCK):
                os.write(file, block)
            os.fsync(file)
            return _BYTES / (time.perf_counter() - began_s) / 1e6, way
        finally:
            os.close(file)


def _read(path: Path) -> float:
    with mmap.mmap(-1, _BLOCK) as block:
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except (OSError, AttributeError):
            file = os.open(path, os.O_RDONLY)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            began_s = time.perf_counter()
            while os.readv(file, [block]):
                pass
            return _BYTES / (time.perf_counter() - began_s) / 1e6
        finally:
            os.close(file)
