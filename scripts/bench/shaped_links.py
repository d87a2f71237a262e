"""Engines on two "hosts" (network namespaces with a shaped link between them), next to the cost model's forecast.

    python scripts/bench/shaped_links.py                                  # the kept runs beside today's forecasts of them
    python scripts/bench/shaped_links.py --links 1gbit,0ms,30m --engines fsdp2 hf_zero2 --json links.json    # minutes
    python scripts/bench/shaped_links.py --links 1gbit,0ms,tiny --rounds 1 --steps 1                         # does it run?

A link is given by its rate, its delay one way, and the model. Measuring needs root, `ip` and `tc`, and /dev/net/tun for a delay;
without them the script prints this and ends with status 0.

A rank's work besides waiting for the link is taken from each run: the step minus the waits counted by the engine. The forecast
assumes that all of it is forward and backward and may overlap with traffic. So a forecast is too low by the work that does not
overlap: the optimizer's step, and on a busy machine the time in which sending threads wait for a core.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from compare import measure_rounds, summarize_ranks
from engines import ENGINES, USUAL_ENGINES, WORKLOADS, chosen_engines
from harness import RESULTS, describe_run, read_options, write_record
from ranks import joined_process_group
from tables import links

from hf_zero.config import ZeroConfig
from hf_zero.forecast.peak import Activations
from hf_zero.planner.layouts import Job, step_time
from hf_zero.planner.search import Machine

STAGES = {f"hf_zero{stage}": stage for stage in range(1, 4)}
"""Engines known to the cost model."""

_CALL_S = 2e-4
_MBIT = {"gbit": 1000, "mbit": 1}
_COLLECTIVE_LIMIT_S = 300

# ---- a cable with a fixed travel time per packet, without netem in the kernel ----

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
"""From linux/if_tun.h: raw packets, without Ethernet's header or the driver's own header."""


def carry(left: int, right: int, delay_s: float) -> None:
    """Carries packets between two interfaces forever. The interfaces limit the rate.

    Args:
        left, right: file descriptors; each read returns one packet.
    """
    exits = {left: right, right: left}
    under_way: dict[int, deque[tuple[float, bytes]]] = {left: deque(), right: deque()}
    while True:
        due = [packets[0][0] for packets in under_way.values() if packets]
        readable, _, _ = select.select(list(exits), [], [], max(0.0, min(due) - time.monotonic()) if due else None)
        for entry in readable:
            packet = os.read(entry, 65535)
            under_way[entry].append((time.monotonic() + delay_s, packet))
        for entry, packets in under_way.items():
            while packets and packets[0][0] <= time.monotonic():
                _deliver(exits[entry], packets.popleft()[1])


def _deliver(descriptor: int, packet: bytes) -> None:
    """Writes a packet. The packet is lost if the interface is down, as on any cable."""
    try:
        os.write(descriptor, packet)
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def make_interface(name: str) -> int:
    """Makes a TUN device, which exists as long as the file descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


# ---- two hosts ----


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def hindrance(has_delay: bool) -> str | None:
    """Returns why no link can be made here; None if nothing prevents it."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]:
        return f"no {' and no '.join(missing)} here (Debian packages iproute2 and util-linux)"
    if has_delay and not os.path.exists("/dev/net/tun"):
        return "no /dev/net/tun here, which a link with a delay is made of"
    return None


@contextmanager
def two_hosts(rate: str, delay_ms: float) -> Iterator[dict[str, str]]:
    """Yields namespace → its interface, for two hosts. Each host limits its own sends, so both directions have the full rate."""
    # The process id separates two runs on one machine. Interface names have at most 15 characters.
    hosts = {f"bench-{os.getpid()}-{host}": f"bench{os.getpid()}-{host}" for host in range(2)}
    with ExitStack() as stack:
        for space in hosts:
            ip("netns", "add", space)
            stack.callback(ip, "netns", "delete", space)
        (left_space, left), (right_space, right) = hosts.items()
        if delay_ms:
            ends = [make_interface(name) for name in hosts.values()]
            cable = get_context("fork").Process(target=carry, args=(*ends, delay_ms / 1000), daemon=True)
            cable.start()
            for end in ends:
                os.close(end)
            stack.callback(cable.terminate)
            for space, name in hosts.items():
                ip("link", "set", name, "netns", space)
                # Use the largest MTU, as a host gives its network card large packets to cut.
                ip("-n", space, "link", "set", name, "mtu", "65535")
        else:
            ip("link", "add", left, "netns", left_space, "type", "veth", "peer", "name", right, "netns", right_space)
        for host, (space, name) in enumerate(hosts.items()):
            ip("-n", space, "address", "add", f"10.99.0.{host + 1}/24", "dev", name)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", name, "up")
            limit = ["tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
            subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", name, "root", "handle", "1:", *limit], check=True)
        yield hosts


def measure(link: str, engines: list[str], rounds: int, steps: int, time_limit_s: float) -> list[dict[str, Any]]:
    """Runs engines over one link, each with its forecast."""
    rate, delay, model = link.split(",")
    delay_ms, load = _milliseconds(delay), os.getloadavg()[0]
    with two_hosts(rate, delay_ms) as hosts, tempfile.TemporaryDirectory() as folder:
        job = {"engines": engines, "workload": model, "rounds": rounds, "steps": steps}
        (Path(folder) / "job.json").write_text(json.dumps(job))
        ranks = [
            subprocess.Popen(
                [*("ip", "netns", "exec", space, "taskset", "--cpu-list", str(host % os.cpu_count())),
                 *(sys.executable, __file__, "--rank", str(host), "--folder", folder)],
                env=os.environ | {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"},
            )
            for host, (space, interface) in enumerate(hosts.items())
        ]  # fmt: skip
        try:
            _wait_for(ranks, time.monotonic() + time_limit_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        rows = summarize_ranks([json.loads((Path(folder) / "figures.json").read_text())])
    about = {"model": model, "mbit": _mbit(rate), "delay_ms": delay_ms, "date": time.strftime("%F"), "load": load}
    names = {"name": "engine", "title": "title", "wall_ms": "step_ms", "waited_ms": "wait_ms"}
    return [_with_forecast(about | {new: row[name] for name, new in names.items()}) for row in rows]


def _wait_for(ranks: list[subprocess.Popen], deadline_s: float) -> None:
    """Waits for the ranks; raises when the first one fails."""
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks) or time.monotonic() > deadline_s:
            raise RuntimeError(f"ranks ended with status {[rank.poll() for rank in ranks]}")
        time.sleep(0.1)


def run_rank(rank: int, folder: Path) -> None:
    """Runs one host's rank in its namespace. The first rank writes the figures."""
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    with joined_process_group(rank, 2, folder, _COLLECTIVE_LIMIT_S):
        figures = measure_rounds(rank, 2, **job | {"workload": WORKLOADS[job["workload"]]})
    if rank == 0:
        write_record(folder / "figures.json", figures)


# ---- forecasts ----


def _with_forecast(run: dict[str, Any]) -> dict[str, Any]:
    """Returns a run with the cost model's figure and its error; None for an engine without a forecast."""
    simulated = error = None
    if run["engine"] in STAGES and run["wait_ms"] is not None:
        simulated = simulated_ms(
            run["model"],
            ZeroConfig(stage=STAGES[run["engine"]]),
            compute_s=(run["step_ms"] - run["wait_ms"]) / 1000,
            link_bytes_a_second=run["mbit"] * 1e6 / 8,
            delay_s=run["delay_ms"] / 1000,
        )
        error = simulated / run["step_ms"] - 1
    return run | {"simulated_ms": simulated, "error": error}


def simulated_ms(
    model: str, config: ZeroConfig, *, compute_s: float, link_bytes_a_second: float, delay_s: float = 0.0
) -> float:
    """Returns the cost model's time for a step on two hosts with one rank each, in milliseconds.

    Args:
        compute_s: the time of all work except waits, including the optimizer's step; a third of it counts as forward.
        delay_s: of the link, one way.
    """
    with torch.device("meta"):
        made = WORKLOADS[model].make_model()
    optimizers = [torch.optim.AdamW(made.parameters(), fused=True)]
    hosts = {"device": torch.device("cpu"), "world_size": 2, "ranks_a_node": 1}
    job = Job(model=made, optimizers=optimizers, activations=None, **hosts)
    work = Activations(curve=(), saved_bytes=0, flops=3, forward_flops=1, tokens=1, shape="")
    link = {"link_bytes_a_second": link_bytes_a_second, "call_s": _CALL_S + delay_s, "memory_bytes_a_second": 1e15}
    machine = Machine(nodes=2, ranks_a_node=1, flops=3 / compute_s, **link)
    return 1000 * step_time(job.layout(config), machine, work, 1).step_s


def _mbit(rate: str) -> int:
    [unit] = [unit for unit in _MBIT if rate.endswith(unit)]
    return int(rate.removesuffix(unit)) * _MBIT[unit]


def _milliseconds(text: str) -> float:
    """Converts `5ms` to 5.0."""
    number = text.removesuffix("ms")
    if number == text:
        raise ValueError(f"{text!r} is no delay; write milliseconds, such as 5ms")
    return float(number)


def main() -> int:
    options = read_options(
        __doc__,
        links=(list, "to measure: rate,delay,model"),
        engines=(list(USUAL_ENGINES), ", ".join(ENGINES)),
        rounds=5,
        steps=8,
        time_limit_s=(1800.0, "for the steps over one link"),
        rank=(int, "of a host's process, which the script starts itself"),
        folder=(Path, "of those processes"),
    )
    if options.rank is not None:
        run_rank(options.rank, options.folder)
        return 0
    # On SIGTERM, exit normally, so the namespaces are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    failed: list[str] = []
    if options.links is None:
        runs = [_with_forecast(run) for run in json.loads((RESULTS / "links.json").read_text())["runs"]]
    else:
        why_not = hindrance(any(_milliseconds(link.split(",")[1]) for link in options.links))
        if why_not is not None:
            print(f"skipped: {why_not}")
            return 0
        engines, limits = chosen_engines(options.engines), (options.rounds, options.steps, options.time_limit_s)
        runs = []
        for link in options.links:
            try:
                runs += measure(link, engines, *limits)
            except RuntimeError as error:
                failed.append(f"{link}: {error}")
    print(links({"runs": runs})["links"])
    if options.json is not None:
        write_record(options.json, describe_run(options) | {"kind": "links", "runs": runs})
    print(*failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
