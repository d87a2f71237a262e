"""Whether what is to be held in host memory fits, before any of it is allocated."""

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def available_host_bytes(cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int:
    """Bytes that this host's processes can still take: what the system has, or less where a cgroup limits them.

    Args:
        cgroup: where the control groups are mounted.
        membership: the file that says which of them this process is in.
    """
    available = psutil.virtual_memory().available
    for folder, limit_name, used_name in _groups_of(cgroup, membership):
        limit, used = _number_in(folder / limit_name), _number_in(folder / used_name)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


def ranks_on_this_host() -> int:
    """How many ranks share this host's memory, by the launcher's word."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_memory_fault(needed_bytes: int, available_bytes: int, ranks: int, setting: str) -> str | None:
    """What is wrong with holding the `needed_bytes` of this setting for each of `ranks` ranks; None where it fits."""
    if needed_bytes * ranks <= available_bytes:
        return None
    return (
        f"hf_zero: `{setting}` needs {_gib(needed_bytes)} GiB of host memory for each of {ranks} ranks here, "
        f"{_gib(needed_bytes * ranks)} GiB together, and {_gib(available_bytes)} GiB are available (the system's, or the "
        "control group's if it is less). Give the job more memory, use more hosts, an optimizer with less state, `nvme` "
        "in place of `cpu`, or leave it at `none`."
    )


def disk_fault(needed_bytes: int, free_bytes: int, ranks: int, path: str, setting: str) -> str | None:
    """What is wrong with files of this setting's `needed_bytes` for each of `ranks` ranks below `path`; None if they fit."""
    if needed_bytes * ranks <= free_bytes:
        return None
    short = needed_bytes * ranks - free_bytes
    return (
        f"hf_zero: `{setting}` needs {_gib(needed_bytes * ranks)} GiB below {path!r} for {ranks} ranks here, and "
        f"{_gib(free_bytes)} GiB are free: {_gib(short)} GiB ({short} bytes) too little. Free space, name a larger disk in "
        "`offload.nvme_path`, or use `cpu` in place of `nvme`."
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f}"


def _groups_of(cgroup: Path, membership: Path) -> list[tuple[Path, str, str]]:
    """(folder, file of the limit, file of the usage) of each memory group above this process, version 2 and 1."""
    if not membership.is_file():
        return []
    found = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroup, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be the host's, of which only the root is seen.
        below = root / path.lstrip("/")
        found += [(folder, *names) for folder in (below, *below.parents) if folder.is_relative_to(root)]
    return found


def _number_in(path: Path) -> int | None:
    """None where there is no such file, or no limit ("max")."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None
