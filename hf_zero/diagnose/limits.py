"""Checks of system limits: shared memory, locked memory, open files, and the address of the host's name."""

import os
import resource
import socket
from collections.abc import Iterator

import torch

from .finding import Finding, bad, good, hint

_LEAST_SHM = 256 * 2**20
_LEAST_FILES = 1024
_LOCKED_FOR_OFFLOAD = 2**30


def limits() -> Iterator[Finding]:
    yield shared_memory("/dev/shm")
    yield _open_files()
    yield _locked_memory()
    yield _own_name()


def shared_memory(path: str) -> Finding:
    """Checks the free bytes of the folder where DataLoader workers and NCCL share memory."""
    if not os.path.isdir(path):
        return hint(path, "not there", "DataLoader workers and NCCL share memory there: mount a tmpfs.")
    state = os.statvfs(path)
    free = state.f_bavail * state.f_frsize
    if free < _LEAST_SHM:
        advice = "DataLoader workers and NCCL crash with bus errors when it is full: docker run --shm-size=8g, or --ipc=host."
        return bad(path, f"{free / 2**20:.0f} MiB free", advice)
    return good(path, f"{free / 2**30:.1f} GiB free")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        advice = f"Ranks, workers and files of shards need more: ulimit -n {max(_LEAST_FILES, min(hard, 65536))}."
        return bad("open files", f"{soft}", advice)
    return good("open files", "unlimited" if soft == resource.RLIM_INFINITY else str(soft))


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return good("locked memory", "unlimited")
    said = f"{soft / 2**20:.0f} MiB"
    if soft < _LOCKED_FOR_OFFLOAD and torch.cuda.is_available():
        advice = (
            "Offload and InfiniBand lock memory: ulimit -l unlimited, also for the container (--ulimit memlock=-1)."
        )
        return hint("locked memory", said, advice)
    return good("locked memory", said)


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        return good("host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        advice = (
            "gloo looks up its own address by this name: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo (one host)."
        )
        return bad("host name", f"{name} has no address: {error}", advice)
