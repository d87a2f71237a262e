"""Ranks that make process groups: one that ends, or does not come, is named by the others at once."""

import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faulty_ranks import Namespaces, why_no_namespaces
from shared_ranks import on_ranks, run_on_ranks
from torch.distributed.distributed_c10d import _get_default_store

from hf_zero.comm import own_groups
from hf_zero.comm.groups import Groups, with_time_limits
from hf_zero.comm.waits import Wait
from hf_zero.config import CommConfig
from hf_zero.presence import arrivals, barrier
from hf_zero.presence.arrivals import CommunicationError, RankProcess, RankProcesses, register_process
from hf_zero.presence.barrier import Barrier, await_all_ranks
from hf_zero.presence.store import CALL_S, opened_store
from hf_zero.presence.watchdog import Watchdog
from hf_zero.presence.watched_barrier import hold_barrier

pytestmark = pytest.mark.timeout(120)


def refusal(timeout_s: float = 1800.0) -> tuple[CommunicationError, float]:
    """The error with which groups are refused, and the seconds until then."""
    began_s = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        Groups.create(stage=2, device_type="cpu", comm=CommConfig(timeout_s=timeout_s))
    return caught.value, time.monotonic() - began_s


@on_ranks(2)
def test_a_store_that_needs_some_seconds_to_answer_does_not_end_a_run_at_its_start(rank, world_size, monkeypatch):
    # 20 s pass in each second, so the store answers after eight.
    slow, began_s, now = RankProcesses.register, time.monotonic(), time.monotonic
    monkeypatch.setattr(RankProcesses, "register", lambda processes: (time.sleep(0.4), slow(processes)))
    with mock.patch("hf_zero.presence.store.time", SimpleNamespace(monotonic=lambda: began_s + 20 * (now() - began_s))):
        watchdog = Watchdog(rank, world_size, "slow")
    dist.barrier()
    with mock.patch.multiple("hf_zero.presence.watchdog", _REGISTER_S=0.1):
        with pytest.raises(CommunicationError, match=r"hf_zero: .*store.* has not answered for .*Look at that process"):
            Watchdog(rank, world_size, "silent")
    watchdog.leave(10)


@pytest.mark.parametrize(
    ("victim", "when"), [(0, "before it comes"), (1, "before it comes"), (1, "once all are there")]
)
@on_ranks(3)
def test_a_rank_that_ends_while_groups_are_made_ends_the_others_with_its_name(rank, world_size, victim, when):
    register_process()
    dist.barrier()
    if rank == victim:
        if when == "once all are there":
            await_all_ranks(60, 0)
        return
    with mock.patch.multiple(own_groups, _MAKING_S=2.0, _MAKING_S_A_RANK=0.0):
        error, seconds = refusal()
    assert seconds < 10
    # One of the survivors may be the first to end for it.
    assert victim in error.culprits
    assert re.search(rf"ranks? .*\b{victim}\b.* ended", str(error)), error


@on_ranks(2)
def test_no_rank_goes_on_before_all_are_connected(rank, world_size):
    """Processes of one host have one monotonic clock."""
    make, connected_s = dist.new_group, []

    def new_group(*arguments, **options):
        group = make(*arguments, **options)
        time.sleep(0.3 * rank)
        connected_s.append(time.monotonic())
        return group

    with mock.patch.object(dist, "new_group", new_group):
        own_groups.own_group([(0, 1)], timedelta(seconds=60))
    ended_s, last_s = time.monotonic(), torch.tensor(connected_s[-1], dtype=torch.float64)
    dist.all_reduce(last_s, dist.ReduceOp.MAX)
    assert ended_s >= last_s.item()


@pytest.mark.short_cells("0")
@pytest.mark.parametrize("late", [0, 2])
@on_ranks(3)
def test_a_rank_that_does_not_come_in_time_is_named_on_all_others(rank, world_size, late):
    if rank == late:
        # Not by a message: the one that gives up closes its connections.
        time.sleep(2)
        return
    seconds = {"NOTICES_S": (0.2,), "_LOOK_S": 0.1, "_WORD_S": 1.0}
    with mock.patch.multiple(barrier, **seconds), mock.patch("sys.stderr") as said:
        error, _ = refusal(timeout_s=1.0)
    assert error.culprits == (late,)
    assert f"rank {late} did not arrive within 1 s (`comm.timeout_s`)" in str(error)
    if rank == (1 if late == 0 else 0):
        assert f"waited 0 s for rank {late}." in said.write.call_args_list[0].args[0]


def leave_traces_of_an_earlier_start() -> None:
    store = _get_default_store()
    ended = subprocess.Popen(["true"])
    ended.wait()
    process = RankProcess(pid=ended.pid, began_s=0.0, told_s=0.0)
    for rank in range(3):
        store.set(f"hf_zero/processes/process {rank}", json.dumps(asdict(process)))
        store.set(f"hf_zero/processes/left {rank}", process.name)
        for number in range(3):
            store.set(f"hf_zero/barrier/group {number}/a call came {rank}", "")
    for number, word in enumerate(["", json.dumps(["a reason to give up", [1]]), None]):
        store.set(f"hf_zero/barrier/group {number}/call", "a call")
        # Rank 0 of the last one ended while it waited for rank 2.
        store.add(f"hf_zero/barrier/group {number}/a call came", 2 if word is not None else 1)
        store.set(f"hf_zero/barrier/group {number}/given up", "")
        if word is not None:
            store.set(f"hf_zero/barrier/group {number}/a call word", word)


@on_ranks(3)
def test_ranks_that_are_started_again_take_nothing_of_their_predecessors_in_the_store_for_each_other(rank, world_size):
    if rank == 0:
        leave_traces_of_an_earlier_start()
    dist.barrier()
    with opened_store(CALL_S) as store:
        processes = RankProcesses(store)
        for other in range(world_size):
            assert processes.known(other) is None and not processes.has_gone(other)
    dist.barrier()
    for number in range(3):
        # Each in turn is the one that the others wait for, longer than until they look for it.
        if rank == number:
            time.sleep(1)
        await_all_ranks(20, number)
        dist.barrier()


class CountingStore:
    """Stands in for the ranks' store, and counts requests."""

    def __init__(self):
        self._values: dict[str, str] = {}
        self.requests = 0

    def below(self, prefix: str) -> "CountingStore":
        return self

    def check(self, key: str) -> bool:
        self.requests += 1
        return key in self._values

    def find(self, key: str) -> str | None:
        self.requests += 1 + (key in self._values)
        return self._values.get(key)

    def set(self, key: str, value: str) -> None:
        self.requests += 1
        self._values[key] = value

    def add(self, key: str, amount: int) -> int:
        self.set(key, str(int(self._values.get(key, "0")) + amount))
        return int(self._values[key])

    def delete(self, key: str) -> None:
        self.requests += 1
        del self._values[key]


def test_ranks_that_have_finished_ask_the_store_as_much_with_many_ranks():
    ended = subprocess.Popen(["true"])
    ended.wait()
    requests = []

    @contextmanager
    def rank_of(start: int, rank: int):
        """This process as a rank of a host with eight ranks, in one of several starts of the run."""
        host, pid = f"host {rank // 8}", ended.pid if rank == 3 else os.getpid()
        process = functools.partial(RankProcess, namespace=host, pid=pid, began_s=rank + start / 10)
        with (
            mock.patch.multiple(arrivals, RankProcess=process, _pid_namespace=lambda: host),
            mock.patch.object(dist, "get_rank", lambda: rank),
        ):
            yield

    for size in (8, 64):
        store = CountingStore()
        for start in range(2):
            # The second start has the store of the first.
            for rank in range(size):
                with rank_of(start, rank):
                    RankProcesses(store).register()
            with rank_of(start, 1):
                first = RankProcesses(store)
                first.announce_end()
                before = store.requests
                assert not first.all_have_gone(size) and not first.all_have_gone(size)
                requests.append(store.requests - before)
            # Rank 3 has ended without a word. Rank 1 announces its end again, as with two engines.
            for rank in (*range(2), *range(4, size), 2):
                with rank_of(start, rank):
                    assert not RankProcesses(store).all_have_gone(size)
                    RankProcesses(store).announce_end()
            for rank in (0, size - 1):
                with rank_of(start, rank):
                    assert RankProcesses(store).all_have_gone(size)
        with rank_of(1, 2):
            again = RankProcesses(store)
            again.register()
            assert not again.all_have_gone(size)
            again.announce_end()
            assert again.all_have_gone(size)
    assert requests[:2] == requests[2:] and requests[0] < 50, requests


def test_a_rank_that_comes_back_hangs_no_rank_that_looks_it_up():
    """torch's `get` waits for a missing key, so a key found by one rank must not be deleted by another."""
    store, deleted = CountingStore(), []
    with mock.patch.object(store, "delete", deleted.append), mock.patch.object(dist, "get_rank", lambda: 0):
        for _ in range(2):
            processes = RankProcesses(store)
            processes.register()
            processes.announce_end()
            assert processes.has_left(0)
        RankProcesses(store).register()
        assert not RankProcesses(store).has_left(0)
    assert not [key for key in deleted if key.startswith("left")]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_after_others_have_given_up_hears_so_at_once(late):
    reasons: list[list[int]] = []
    watchdog = SimpleNamespace(
        store=CountingStore(),
        inside=lambda what: nullcontext(Wait(what)),
        look_for=lambda wait, enough=None: ([], "  lines"),
        leave_reason=lambda words, culprits: reasons.append([*culprits]),
    )
    for rank, limit_s, said in (
        (1 - late, 0.1, rf"reached a save; waited 0 s for ranks \[{late}\]\.\n  lines\nIt is collective"),
        (late, 5.0, r"reached a save; the other ranks gave up waiting for this rank\. It is collective"),
    ):
        with mock.patch.object(dist, "get_rank", lambda rank=rank: rank), mock.patch.object(barrier, "_WORD_S", 0.0):
            with pytest.raises(CommunicationError, match=said) as caught:
                hold_barrier(watchdog, range(2), "one", "a save", limit_s)
        assert not caught.value.culprits
    assert reasons == [[late]]


def test_ranks_that_wait_for_each_other_ask_the_store_as_much_with_many_ranks():
    requests = []
    for size in (8, 64):
        stores = [CountingStore() for _ in range(size)]
        for store in stores:
            store._values = stores[0]._values

        def barrier_of(rank: int, stores=stores) -> Barrier:
            with mock.patch.object(dist, "get_rank", lambda: rank):
                return Barrier(stores[rank], range(len(stores)), "one", is_unique=True)

        first, *others = map(barrier_of, range(size))
        with mock.patch.object(barrier, "_LOOK_S", 1000.0), ThreadPoolExecutor(1) as pool:
            passed = pool.submit(first.wait, 20.0, lambda *_: CommunicationError("late"))
            while "call" not in stores[0]._values:
                time.sleep(0.01)
            for each in others[:-1]:
                assert not each._has_word()
            others[-1]._has_word()
            passed.result(60)
        assert all(each._has_word() for each in others)
        requests.append(max(store.requests for store in stores[1:-1]))
    assert requests[0] == requests[1] < 10, requests


def test_of_the_ranks_that_have_finished_one_asks_who_still_waits_and_the_others_read_its_answer():
    surveys, store = [], CountingStore()
    where = SimpleNamespace(torch_call="barrier", line="a line", kind="a gather", begun={"a gather": 3})

    def survey() -> dict[int, SimpleNamespace]:
        surveys.append(1)
        return {5: SimpleNamespace(where=where, is_waiting=True), 6: SimpleNamespace(where=None, is_waiting=False)}

    for now_s in (10.0, 11.0):
        for begun in (2, 3):
            rank = SimpleNamespace(_keys=store, _survey=survey, begun={"a gather": begun})
            with mock.patch.object(time, "time", lambda now_s=now_s: now_s):
                assert Watchdog._missed_by(rank) == (begun == 2, [(5, "barrier", "a line")], now_s)
    assert len(surveys) == 2


def is_slow_in_training(rank: int, world_size: int) -> float:
    with mock.patch.multiple(own_groups, _MAKING_S=1.0, _MAKING_S_A_RANK=0.0):
        group = Groups.create(stage=2, device_type="cpu", comm=CommConfig(timeout_s=30.0)).world.handle
    if rank == 1:
        time.sleep(2)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item()


def test_the_limit_of_making_a_group_is_not_that_of_its_collectives():
    assert run_on_ranks(is_slow_in_training) == [2.0, 2.0]


def waits_for_a_late_one(rank: int, world_size: int) -> bool:
    group = Groups.create(stage=2, device_type="cpu", comm=CommConfig(timeout_s=1.0)).world.handle
    if rank == 1:
        time.sleep(3)
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError:
        return True
    return False


@pytest.mark.slow
def test_the_limit_of_a_groups_collectives_is_the_configs():
    assert run_on_ranks(waits_for_a_late_one) == [True, True]


RANK_OF_A_HOST = """
import os
import sys

import torch
import torch.distributed as dist

# The default group connects as NCCL does, without the host's name.
os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[1]
dist.init_process_group("gloo")
del os.environ["GLOO_SOCKET_IFNAME"]
from hf_zero import ZeroEngine

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ZeroEngine(model, [optimizer], 2)
model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
optimizer.step()
assert "GLOO_SOCKET_IFNAME" not in os.environ
dist.barrier()
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_namespaces()), reason=str(why_no_namespaces()))
@pytest.mark.parametrize("master", ["10.231.7.1", "first"])
def test_ranks_connect_between_hosts_whose_names_stand_for_the_loopback(master, tmp_path):
    networks, ranks = Namespaces(), []
    try:
        for rank, (space, name) in enumerate(zip(networks.names, ("first", "second"))):
            # Debian gives a host's own name this address.
            hosts = tmp_path / f"hosts {rank}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n" + "10.231.7.1 first\n" * (name != "first"))
            as_host = f'hostname {name} && mount --bind "{hosts}" /etc/hosts && exec "$@"'
            inside = ["ip", "netns", "exec", space, "unshare", "--uts", "--mount", "sh", "-c", as_host, "sh"]
            here = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            meeting = {"MASTER_ADDR": master, "MASTER_PORT": "29511"}
            call = [*inside, sys.executable, "-c", RANK_OF_A_HOST, networks.links[rank]]
            ranks.append(subprocess.Popen(call, env=os.environ | here | meeting, stderr=subprocess.PIPE, text=True))
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], said
    finally:
        for rank in ranks:
            rank.kill()
        networks.remove()


@on_ranks(2)
def test_the_host_interface_is_the_one_that_reaches_the_first_rank(rank, world_size):
    """Of hosts with a loopback, a bridge of containers and two cards; gloo is what NCCL's default group would be."""
    stats = dict.fromkeys(["lo", "docker0", "eth0", "ib0"], SimpleNamespace(isup=True))
    addresses = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    cards = {name: [SimpleNamespace(family=socket.AF_INET, address=each)] for name, each in addresses.items()}
    os.environ.pop("GLOO_SOCKET_IFNAME")
    to_master = {"10.0.0.9": "10.0.0.1", "10.1.0.9": "10.1.0.1", "own name": "127.0.1.1"}
    of = mock.patch.multiple(own_groups, _address_of=lambda host, is_route=False: to_master.get(host, "127.0.1.1"))
    with of, mock.patch("psutil.net_if_stats", lambda: stats), mock.patch("psutil.net_if_addrs", lambda: cards):
        for more, wanted in (
            ({"MASTER_ADDR": "10.0.0.9"}, "eth0"),
            ({"MASTER_ADDR": "10.1.0.9"}, "ib0"),
            ({"MASTER_ADDR": "own name", "LOCAL_WORLD_SIZE": "1"}, "eth0"),
            ({"MASTER_ADDR": "10.0.0.9", "NCCL_SOCKET_IFNAME": "ib"}, "ib0"),
            ({"MASTER_ADDR": "10.0.0.9", "NCCL_SOCKET_IFNAME": "=ib"}, "eth0"),
            ({"MASTER_ADDR": "10.0.0.9", "NCCL_SOCKET_IFNAME": "^docker"}, "eth0"),
            ({"MASTER_ADDR": "10.0.0.9", "GLOO_SOCKET_IFNAME": "chosen"}, "chosen"),
        ):
            with mock.patch.dict(os.environ, more):
                with own_groups._reachable() as interface:
                    assert interface == wanted == os.environ["GLOO_SOCKET_IFNAME"], more
                assert os.environ.get("GLOO_SOCKET_IFNAME") == more.get("GLOO_SOCKET_IFNAME")
        # A default group that has connected by the host's name needs nothing else.
        to_master[socket.gethostname()] = "10.0.0.1"
        with own_groups._reachable() as interface:
            assert interface is None


def limits(rank: int, world_size: int) -> list[tuple[float, float]]:
    settings = (CommConfig(), CommConfig(timeout_s=30.0), CommConfig(timeout_s=90.0, late_s=80.0), CommConfig(late_s=0))
    made = [Groups.create(stage=2, device_type="cpu", comm=comm) for comm in settings]
    return [(groups.timeout_s, groups.late_s) for groups in made]


def test_ranks_are_waited_for_as_long_as_the_process_group_says_unless_a_setting_does():
    # The ranks give their limit to the process group.
    for found in run_on_ranks(limits, time_limit_s=50):
        assert found == [(50, 50), (30, 30), (90, 80), (50, 0)]
    assert limits(0, 1) == [(1800, 120), (30, 30), (90, 80), (1800, 0)]
    on_gpus = with_time_limits(CommConfig(), "cuda"), with_time_limits(CommConfig(late_s=80.0), "cuda")
    assert [comm.late_s for comm in on_gpus] == [600, 80]
