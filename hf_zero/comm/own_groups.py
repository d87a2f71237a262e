"""Process groups used only by engines, and how gloo's ranks reach each other.

In the default group, the script's own collectives (such as a barrier on one rank only) would mix with the engine's, and the
default group has the script's time limit.

[Note: a lock and a core] gloo's thread may not touch a connection while another thread starts a send or receive on the
connection, and retries in a busy loop. A message arriving at this moment wakes gloo's thread. If all cores are busy, the system
may give gloo's thread the core of the very thread that holds the lock. gloo's thread then retries for milliseconds, for a call
of microseconds: with two ranks on two cores, this was most of the cost of a small collective. A batch thread does not preempt a
running thread. As before, a batch thread uses a free core, and otherwise runs when the other thread waits or has used up its
time slice.
"""

import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import cast

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..hooks.replaced import replaced
from ..presence.arrivals import CommunicationError, ended_ranks, in_words
from ..presence.barrier import await_all_ranks

_MADE: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, dist.ProcessGroup | None]]" = (
    weakref.WeakKeyDictionary()
)
"""By default group. torch keeps each group, with its connections and threads, until the default group is destroyed. Engines that
are built one after the other therefore use the same groups."""

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_GLOO_THREAD = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")

_MAKING_S, _MAKING_S_A_RANK = 30.0, 0.2
"""Time limit for connecting ranks that have all arrived. A rank that dies in this phase is waited for until the limit."""


def own_group(
    groups: Sequence[tuple[int, ...]], timeout: timedelta, backend: str | None = None, *, is_urgent: bool = False
) -> dist.ProcessGroup | None:
    """Makes the group of this rank, out of some groups. Collective: every rank passes the same groups, in the same order.

    Args:
        groups: contain each rank exactly once.
        backend: None means the backend of the default group.
        is_urgent: on an accelerator, the group's collectives run before kernels that wait for multiprocessors.

    Returns:
        None for a group of one rank.

    Raises:
        CommunicationError: a rank did not arrive, or ended before it was connected.
    """
    made = _MADE.setdefault(cast(dist.ProcessGroup, dist.group.WORLD), {})
    key = (tuple(groups), timeout, backend, is_urgent)
    if key not in made:
        # `new_group` would wait half an hour for a dead rank, so first check for dead ranks.
        if dist.get_backend() != "fake":
            await_all_ranks(timeout.total_seconds(), len(made))
        ranks = next(each for each in groups if dist.get_rank() in each)
        options = urgent_options(backend, timeout) if is_urgent else None
        with _in_batch(), _named(f"hf_zero_{len(made)}_of_{ranks[0]}"):
            made[key] = _connected(list(ranks), timeout, backend, options) if len(ranks) > 1 else None
    return made[key]


def _named(name: str) -> AbstractContextManager[None]:
    """Sets the name of torch's next group. The group's ranks share the name, and no other group has the same name."""
    # A rank only makes its own groups: with 4,096 ranks there may be a thousand others. torch names a group by its ranks and by
    # the number of this process's groups, which may differ between ranks, and then the ranks would wait for each other.
    return replaced(distributed_c10d, "_process_group_name", lambda *_args, **_options: name)


def _connected(ranks: list[int], timeout: timedelta, backend: str | None, options: object | None) -> dist.ProcessGroup:
    """Connects a new group of this rank. gloo's ranks connect inside this call, with a shorter limit than for collectives."""
    limit = timeout
    has_gloo = "gloo" in (backend or str(dist.get_backend_config()))
    if has_gloo:
        limit = min(timeout, timedelta(seconds=_MAKING_S + _MAKING_S_A_RANK * len(ranks)))
    with _reachable() if has_gloo else nullcontext(os.environ.get(_GLOO_INTERFACE)) as interface:
        try:
            group = dist.new_group(ranks, limit, backend, options, use_local_synchronization=True)
            if has_gloo:
                # Make all ranks leave together. If a rank ended at once with an error common to all ranks, the ranks still
                # connecting would report a broken connection instead of the error.
                dist.all_reduce(torch.zeros(1), group=group)
        except RuntimeError as error:
            ended = ended_ranks(ranks)
            why = f"torch says: {error}"
            if ended:
                why = f"{in_words(ended)} ended: look at the last output there"
            elif has_gloo:
                listens_at = f"interface {interface}" if interface else f"the address of {socket.gethostname()}"
                why = (
                    f"gloo listens at {listens_at}; set {_GLOO_INTERFACE} to an interface that other hosts reach. {why}"
                )
            raise CommunicationError(f"hf_zero: {in_words(ranks)} could not connect. {why}", ended) from error
    if limit < timeout:
        # The limit is short while connecting, because a rank may be gone. A collective may take longer.
        set_limit(timeout, group)
    return group


@contextmanager
def _reachable() -> Iterator[str | None]:
    """Makes gloo listen at the interface toward the other hosts. Yields the interface, or None for gloo's own choice.

    gloo listens at the address of the host's name. In many containers and clusters, the name means the loopback address, and
    ranks of other hosts fail to connect, while NCCL finds an interface without the name. GLOO_SOCKET_IFNAME has priority. If
    the default group is already connected by gloo with an address other than the loopback, nothing is changed either.
    """
    chosen = os.environ.get(_GLOO_INTERFACE)
    is_connected = "gloo" in str(dist.get_backend_config()) and not _is_loopback(_address_of(socket.gethostname()))
    interface = None if chosen or is_connected else _interface_of_nccl() or _interface_to_master()
    if interface is None:
        yield chosen
        return
    # gloo reads the variable only when a group is made.
    os.environ[_GLOO_INTERFACE] = interface
    try:
        yield interface
    finally:
        # Groups made by the script keep torch's choice.
        os.environ.pop(_GLOO_INTERFACE)
        if chosen is not None:
            os.environ[_GLOO_INTERFACE] = chosen


def _interface_of_nccl() -> str | None:
    """Returns the first interface of NCCL_SOCKET_IFNAME: a list of prefixes, or after "=" of names; "^" excludes."""
    words = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if not words or words.startswith("^"):
        return None
    wanted = words.lstrip("=").split(",")
    for name in interfaces():
        if any(name == each if words.startswith("=") else name.startswith(each) for each in wanted):
            return name
    return None


def _interface_to_master() -> str | None:
    """Returns the interface of the route to MASTER_ADDR or, if this is the loopback, the first interface leaving this host."""
    found = interfaces()
    address = _address_of(os.environ.get("MASTER_ADDR", ""), is_route=True)
    if _is_loopback(address) and os.environ.get("LOCAL_WORLD_SIZE") != str(dist.get_world_size()):
        # Like NCCL, skip bridges of containers, which reach no other host.
        bridges = ("docker", "br-", "veth", "virbr")
        beyond = [name for name in found if not name.startswith(bridges)]
        return next((name for name in beyond if not all(map(_is_loopback, found[name]))), None)
    return next((name for name, all_of in found.items() if address in all_of), None)


def interfaces() -> dict[str, list[str]]:
    """Lists the addresses of each active interface."""
    up = psutil.net_if_stats()
    return {
        name: [each.address.partition("%")[0] for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    }


def _address_of(host: str, *, is_route: bool = False) -> str | None:
    """Returns the address of a host's name, or this host's address on the route to the host; None if there is none."""
    try:
        for family, _, _, _, found in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            if not is_route:
                return str(found[0])
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                # `connect` on a datagram socket sends nothing; the kernel only looks the route up.
                asking.connect(found)
                return str(asking.getsockname()[0])
    except OSError:
        return None
    return None


def _is_loopback(address: str | None) -> bool:
    return address is None or ip_address(address.partition("%")[0]).is_loopback


def urgent_options(backend: str | None, timeout: timedelta) -> object | None:
    """Returns NCCL's options for a stream of high priority; None for other backends, which have no such options."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # Set the same limit, because `new_group` warns about a different one.
    options._timeout = timeout
    return options


@contextmanager
def _in_batch() -> Iterator[None]:
    """Makes gloo's new threads run as batch threads, on Linux only; see [Note: a lock and a core]."""
    if not (hasattr(os, "SCHED_BATCH") and _THREADS.is_dir()):
        yield
        return
    # gloo's threads have no handle. The threads new after `new_group` belong to this group.
    before = receiving_threads()
    yield
    for thread in receiving_threads() - before:
        try:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except PermissionError:
            # A sandbox may forbid this. Training gives the same results, only slower if all cores are busy.
            return
        except ProcessLookupError:
            # The thread's group was destroyed in the meantime.
            continue


def receiving_threads() -> set[int]:
    """Lists the receiving threads of gloo in this process, by the system's numbers."""
    found = set()
    for each in _THREADS.iterdir():
        try:
            name = (each / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            # The thread has ended since the listing.
            continue
        if name == _GLOO_THREAD:
            found.add(int(each.name))
    return found


def set_limit(limit: timedelta, group: dist.ProcessGroup) -> None:
    """Sets the time limit for collectives of a group."""
    # Backends from outside of torch may not support a limit.
    with suppress(RuntimeError):
        group.set_timeout(limit)
