"""Process groups that only engines use.

What a script does in the default group, a barrier on one rank alone for instance, is never taken for ours there, and the time
limit is ours too.

[Note: a lock and a core]
gloo's thread may not touch a connection while another thread starts a send or receive on it, and asks again at once until it
may. A message that arrives just then wakes gloo's thread, and where all cores are busy the system gives it the core of the
very thread that it waits for. It then asks for milliseconds, for a call that takes microseconds: with two ranks on two cores
that was most of what a small collective cost. A batch thread takes no core from a thread that runs. It takes a free one as
before, and else has its turn when the other waits or has used up its own.
"""

import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import cast

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .arrivals import await_all_ranks, ended_ranks, in_words
from .failures import CommunicationError

_MADE: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, dist.ProcessGroup | None]]" = (
    weakref.WeakKeyDictionary()
)
"""By the default group that they belong to. torch keeps each group that it ever made, with its connections and threads, until
the default group goes; so engines that are built one after the other take the same ones."""

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_GLOO_THREAD = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")

_MAKING_S, _MAKING_S_A_RANK = 30.0, 0.2
"""What ranks that are all there may take to connect to each other. One that dies just then is waited for that long."""


def own_group(
    ranks: Sequence[int], timeout: timedelta, backend: str | None = None, *, is_urgent: bool = False
) -> dist.ProcessGroup | None:
    """A group of some ranks. Every rank asks for every group, in the same order; those that are not in it get None.

    Args:
        backend: None for that of the default group.
        is_urgent: on an accelerator, its collectives go before kernels that wait for room.

    Raises:
        CommunicationError: a rank did not come, or ended before it was connected.
    """
    made = _MADE.setdefault(cast(dist.ProcessGroup, dist.group.WORLD), {})
    key = (tuple(ranks), timeout, backend, is_urgent)
    if key not in made:
        if dist.get_backend() != "fake":
            await_all_ranks(timeout.total_seconds(), len(made))
        options = urgent_options(backend, timeout) if is_urgent else None
        with _in_batch():
            made[key] = _connected(list(ranks), timeout, backend, options)
    return made[key]


def _connected(
    ranks: list[int], timeout: timedelta, backend: str | None, options: object | None
) -> dist.ProcessGroup | None:
    """A new group. gloo's ranks connect to each other inside, for which they have less time than for a collective."""
    limit = timeout
    has_gloo = "gloo" in (backend or str(dist.get_backend_config()))
    if has_gloo:
        limit = min(timeout, timedelta(seconds=_MAKING_S + _MAKING_S_A_RANK * len(ranks)))
    with _reachable() if has_gloo else nullcontext(os.environ.get(_GLOO_INTERFACE)) as interface:
        try:
            group = dist.new_group(ranks, limit, backend, options)
        except RuntimeError as error:
            ended = ended_ranks(ranks)
            why = f"torch says: {error}"
            if ended:
                why = f"{in_words(ended)} ended: look at what was said there last"
            elif has_gloo:
                place = f"interface {interface}" if interface else f"the address of {socket.gethostname()}"
                why = f"gloo listens at {place}; set {_GLOO_INTERFACE} to an interface that other hosts reach. {why}"
            raise CommunicationError(f"hf_zero: {in_words(ranks)} could not connect. {why}", ended) from error
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if limit < timeout:
        # The private name warns from torch 2.14 on, and the public one is not there before.
        set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
        set_timeout(timeout, group)
    return group


@contextmanager
def _reachable() -> Iterator[str | None]:
    """Has gloo listen at the interface that reaches the other hosts; yields the interface, None for gloo's own choice.

    gloo listens at the address of the host's name. In many containers and clusters the name stands for the loopback address, and
    ranks of other hosts connect in vain, while NCCL finds an interface without the name. GLOO_SOCKET_IFNAME goes first. A default
    group of gloo that has connected by an address beyond the loopback stands, too.
    """
    chosen = os.environ.get(_GLOO_INTERFACE)
    is_connected = "gloo" in str(dist.get_backend_config()) and not _is_loopback(_address_of(socket.gethostname()))
    interface = None if chosen or is_connected else _interface_of_nccl() or _interface_to_master()
    if interface is None:
        yield chosen
        return
    os.environ[_GLOO_INTERFACE] = interface
    try:
        yield interface
    finally:
        # Groups that the script makes keep the choice of torch.
        os.environ.pop(_GLOO_INTERFACE)
        if chosen is not None:
            os.environ[_GLOO_INTERFACE] = chosen


def _interface_of_nccl() -> str | None:
    """The first interface that NCCL_SOCKET_IFNAME names: a list of beginnings, or after "=" of whole names; "^" leaves out."""
    words = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if not words or words.startswith("^"):
        return None
    wanted = words.lstrip("=").split(",")
    for name in _interfaces():
        if any(name == each if words.startswith("=") else name.startswith(each) for each in wanted):
            return name
    return None


def _interface_to_master() -> str | None:
    """The interface of the route to MASTER_ADDR; where the route is the loopback, the first interface that leaves this host."""
    interfaces = _interfaces()
    address = _address_of(os.environ.get("MASTER_ADDR", ""), is_route=True)
    if _is_loopback(address) and os.environ.get("LOCAL_WORLD_SIZE") != str(dist.get_world_size()):
        # As NCCL does: bridges of containers reach no other host.
        bridges = ("docker", "br-", "veth", "virbr")
        beyond = [name for name in interfaces if not name.startswith(bridges)]
        return next((name for name in beyond if not all(map(_is_loopback, interfaces[name]))), None)
    return next((name for name, all_of in interfaces.items() if address in all_of), None)


def _interfaces() -> dict[str, list[str]]:
    """The addresses of each interface that is up."""
    up = psutil.net_if_stats()
    return {
        name: [each.address.partition("%")[0] for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    }


def _address_of(host: str, *, is_route: bool = False) -> str | None:
    """The address that a host's name stands for, or this host's address on the route there; None where there is none."""
    try:
        for family, _, _, _, place in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            if not is_route:
                return str(place[0])
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                # Sends nothing: the kernel looks the route up.
                asking.connect(place)
                return str(asking.getsockname()[0])
    except OSError:
        return None
    return None


def _is_loopback(address: str | None) -> bool:
    return address is None or ip_address(address.partition("%")[0]).is_loopback


def urgent_options(backend: str | None, timeout: timedelta) -> object | None:
    """NCCL's options for a stream of high priority; None for other backends, which have none."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # `new_group` warns of any other.
    options._timeout = timeout
    return options


@contextmanager
def _in_batch() -> Iterator[None]:
    """Has the threads that gloo makes inside run as batch threads; see [Note: a lock and a core]. On Linux alone."""
    if not (hasattr(os, "SCHED_BATCH") and _THREADS.is_dir()):
        yield
        return
    before = receiving_threads()
    yield
    for thread in receiving_threads() - before:
        try:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        except PermissionError:
            # A sandbox may forbid it. Training is the same, and slower where all cores are busy.
            return
        except ProcessLookupError:
            # Its group has gone meanwhile.
            continue


def receiving_threads() -> set[int]:
    """The threads of this process in which gloo receives, by the numbers that the system has for them."""
    found = set()
    for each in _THREADS.iterdir():
        try:
            name = (each / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            # A thread that has ended since they were listed.
            continue
        if name == _GLOO_THREAD:
            found.add(int(each.name))
    return found
