"""Checks of GPUs, also for models split over ranks by transformers."""

import time
from collections.abc import Iterator

import torch

from ..device import accelerators
from .finding import Finding, absent, bad, good, hint
from .software import library

# ---- GPUs: their kinds, peer access between them, and the speed of copies from pinned memory ----

_PINNED_BYTES = 64 * 2**20
_SLOW_GB = 3.0
"""In 1e9 bytes per second: a quarter of the speed of PCIe 3.0 x16."""


def devices() -> Iterator[Finding]:
    count = torch.cuda.device_count()
    kind, others = accelerators()
    if kind not in ("cpu", "cuda"):
        advice = "hf_zero has run on NVIDIA GPUs and CPUs only: compare the first losses with those of `--zero 0`."
        yield hint(f"{kind} devices", str(others), advice)
    if torch.version.hip is not None:
        yield hint(
            "ROCm",
            torch.version.hip,
            "hf_zero has not run on AMD GPUs: compare the first losses with those of `--zero 0`.",
        )
    if not torch.cuda.is_available():
        if count:
            # NVML counts GPUs even if the driver is too old for this torch.
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
        advice = (
            "The slowest GPU sets the speed, and the smallest one the memory limit. Choose equal GPUs with "
            "CUDA_VISIBLE_DEVICES."
        )
        yield hint("GPUs", f"{count} that differ: {listed}", advice)
    else:
        yield good("GPUs", f"{count}: {listed}")
    yield peer_access(count)
    yield _pinned()


def peer_access(count: int) -> Finding:
    """Checks whether each GPU can read the memory of each other GPU."""
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
        advice = "The GPU has few PCIe lanes: check `nvidia-smi -q -d PCI`. Offload will be slow."
        return hint("pinned memory", f"{gb:.1f} GB/s to the GPU", advice)
    return good("pinned memory", f"{gb:.1f} GB/s to the GPU")


# ---- Whether this machine can train a model split over ranks by transformers ----

_LEAST_TRANSFORMERS = (5, 23)


def tensor_parallelism(tp_size: int) -> Iterator[Finding]:
    """Checks the additional requirements of `parallel_config(tp_size=...)`."""
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
