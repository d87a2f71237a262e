"""Gathers out of peers' memory: the losses of those that send, nothing sent, no read of what its owner has begun to change."""

import gc
import io
import os
import sys
import threading
import time
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from cells import short_of
from ranks import RankFailedError, run_ranks
from told import tell, wait_until_told
from torch._C._distributed_c10d import _SymmetricMemory
from training import gpt2, gpt2_batch
from wire import tcp_bytes

from hf_zero.comm.choose import choose_peer_memory
from hf_zero.comm.groups.groups import Groups, RankGroup
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.local import LocalTransport
from hf_zero.comm.peers import device_peers, neighbours
from hf_zero.comm.peers.host_peers import HostPeers
from hf_zero.comm.point_to_point import PointToPointTransport
from hf_zero.comm.transport import CommunicationError, Label
from hf_zero.config import CommConfig, ConfigError, ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.layout.intervals import Interval

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="memory files and sockets without a name are Linux's"),
]
LABEL = Label(kind="all-gather parameters", subject="bucket 7", channel=7)


def losses(rank: int, settings: dict) -> list[float]:
    """Of a run with accumulation, a look in evaluation, and an edit of whole parameters."""
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = ZeroEngine(model, [optimizer], settings)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for step in range(3):
        with engine.no_sync():
            model(**gpt2_batch(generator, 2)).loss.backward()
        loss = model(**gpt2_batch(generator, 2)).loss
        loss.backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if step == 0:
            with torch.no_grad():
                found.append(model(**gpt2_batch(generator, 2)).loss.item())
            with engine.gathered(model.transformer.wpe, writeback=True), torch.no_grad():
                model.transformer.wpe.weight[0] = 0.5
    with engine.gathered():
        found.append(sum(p.double().sum().item() for p in model.parameters()))
    # Who has no gather under way may leave.
    dist.barrier()
    return found


def with_and_without(rank: int, world_size: int, variants: list[dict]) -> None:
    for settings in variants:
        comm = settings.get("comm", {})
        plain = losses(rank, settings)
        shared = losses(rank, settings | {"comm": comm | {"peer_memory": "always"}})
        assert shared == plain, settings


VARIANTS = {
    2: [
        {"stage": 1, "overlap_param_gather": False, "offload": {"optimizer": "cpu"}},
        {"stage": 2, "param_dtype": "bfloat16"},
        {"stage": 3, "persist_below_numel": 50, "bucket_bytes": 8192, "prefetch_units": 2},
    ],
    3: [{"stage": 2}, {"stage": 3, "param_dtype": "bfloat16"}],
    4: [
        {"stage": 3, "comm": {"sync_every": 2, "shard_group_size": 2}},
        {"stage": 1, "comm": {"shard_group_size": 2, "gradients": "int8"}},
    ],
}


@pytest.mark.short_cells("2")
@pytest.mark.parametrize("world_size", short_of(sorted(VARIANTS), [2, 4]))
def test_losses_are_those_of_gathers_that_send_bit_for_bit(world_size):
    arguments = {"variants": VARIANTS[world_size]}
    run_ranks(with_and_without, world_size=world_size, time_limit_s=100, keyword_arguments=arguments)


def named_shared_memory() -> set[str]:
    """Paths in /dev/shm that this process has mapped; other processes of the machine make and remove theirs meanwhile."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return {"/dev/shm" + mapping.partition("/dev/shm")[2] for mapping in mappings if "/dev/shm" in mapping}


def sent_by_steps(rank: int, world_size: int) -> None:
    before = named_shared_memory()
    # The engine takes the same process groups, which torch keeps.
    Groups.create(stage=3, device_type="cpu", comm=CommConfig())
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    torch.manual_seed(0)
    model = gpt2()
    # Large enough that signals and agreements vanish beside the gradients.
    model.resize_token_embeddings(10_000, mean_resizing=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ZeroEngine(model, [optimizer], {"stage": 3, "bucket_bytes": "20KiB", "comm": {"peer_memory": "always"}})
    assert named_shared_memory() <= before
    # However many buckets there are: a connection to each peer, and no descriptor of what is mapped.
    assert len(engine.buckets) > 3 * world_size
    assert len(os.listdir("/proc/self/fd")) < descriptors + 2 * world_size
    dist.barrier()
    sent = tcp_bytes().sent
    for _ in range(2):
        model(**gpt2_batch(torch.Generator().manual_seed(rank), 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    gradients = 2 * (world_size - 1) / world_size * sum(p.nbytes for p in model.parameters())
    assert tcp_bytes().sent - sent <= 1.05 * gradients
    [gathers] = [row for row in engine.comm_report().rows if row.kind == "all-gather parameters"]
    assert gathers.bytes_sent > gradients and gathers.bytes_between == 0 and gathers.gb_per_second > 0
    dist.barrier()
    connections = list(engine._parts.wire.peers._neighbours._sockets.values())
    engine.close()
    del model, optimizer, engine
    gc.collect()
    # Those that have been told to end may still be about to.
    deadline_s = time.monotonic() + 30
    while threading.active_count() > threads and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert [connection.fileno() for connection in connections] == [-1] * (world_size - 1)


def test_parameters_are_not_sent_and_nothing_is_left():
    run_ranks(sent_by_steps, world_size=2, time_limit_s=100)


def peers_of(timeout_s: float = 30.0) -> HostPeers:
    groups = Groups.create(stage=3, device_type="cpu", comm=CommConfig())
    return HostPeers(groups, PointToPointTransport(groups, timeout_s), timeout_s)


def owner_in_a_hurry(rank: int, world_size: int) -> None:
    """Rank 0 writes again as soon as its gather has ended; the others come late, to the start or to the end of it."""
    peers = peers_of()
    numel = 1 << 16
    buffers = [peers.share(numel, torch.float32, [Interval(0, numel)] * world_size) for _ in range(2)]
    flats = [torch.empty(world_size * numel) for _ in buffers]
    labels = [Label(kind="all-gather parameters", subject=f"bucket {index}", channel=index) for index in range(2)]
    for turn in range(1, 4):
        for buffer in buffers:
            buffer.own.fill_(10 * turn + rank)
        if rank == 1:
            time.sleep(0.1)
        handles = [peers.start_all_gather(*each) for each in zip(flats, buffers, labels)]
        if rank == world_size - 1:
            # The order of the ends is each rank's own.
            handles.reverse()
            time.sleep(0.1)
        for handle in handles:
            handle.finish()
        if rank == 0:
            for buffer in buffers:
                buffer.own.fill_(-1.0)
        for flat in flats:
            assert flat.view(world_size, -1).unique(dim=1).flatten().tolist() == [
                10 * turn + r for r in range(world_size)
            ]
    dist.barrier()


@pytest.mark.parametrize("world_size", short_of([2, 4], [2]))
def test_what_was_there_at_the_start_is_what_arrives_however_soon_its_owner_writes_again(world_size):
    run_ranks(owner_in_a_hurry, world_size=world_size, time_limit_s=60)


def leaves_behind_its_start(rank: int, world_size: int) -> None:
    peers = peers_of()
    shared = peers.share(64, torch.float32, [Interval(0, 64)] * world_size)
    shared.own.fill_(rank)
    flat = torch.empty(128)
    if rank == 1:
        peers.start_all_gather(flat, shared, LABEL)
        # The handle is gone, and so are connections and thread.
        del peers
        gc.collect()
    dist.barrier()
    if rank == 0:
        peers.start_all_gather(flat, shared, LABEL).finish()
        assert flat.view(2, -1).unique(dim=1).flatten().tolist() == [0, 1]
    dist.barrier()


def test_a_rank_may_leave_behind_its_last_start():
    run_ranks(leaves_behind_its_start, world_size=2, time_limit_s=60)


def dies_in_training(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ZeroEngine(model, [optimizer], {"stage": 3, "comm": {"peer_memory": "always", "timeout_s": 80}})
    if rank == 1:
        os._exit(3)
    begin = time.monotonic()
    reason = r"the all-gather parameters of bucket [0-9]+ failed for want of rank 1: .*\n  rank 1 .* has ended"
    with pytest.raises(CommunicationError, match=reason):
        model(**gpt2_batch(torch.Generator(), 1))
    assert time.monotonic() - begin < 60
    assert not engine.buckets[0].memory.is_readable
    raise LookupError("rank 0 was told")


def stays_away(rank: int, world_size: int) -> None:
    peers = peers_of(timeout_s=3.0)
    shared = peers.share(64, torch.float32, [Interval(0, 64)] * world_size)
    if rank == 1:
        wait_until_told("rank 0's error")
    else:
        with pytest.raises(
            CommunicationError, match=r"bucket 7 failed for want of rank 1: .*\n  rank 1 .* is in no collective"
        ):
            peers.start_all_gather(torch.empty(128), shared, LABEL).finish()
        tell("rank 0's error")
    dist.barrier()


def test_a_peer_that_ends_or_does_not_come_is_an_error_with_its_rank():
    with pytest.raises(RankFailedError) as error:
        run_ranks(dies_in_training, world_size=2, time_limit_s=60)
    assert "rank 1" in str(error.value) or "rank 0 was told" in str(error.value)
    run_ranks(stays_away, world_size=2, time_limit_s=60)


def elsewhere(rank: int, world_size: int) -> None:
    if rank == 1:
        neighbours._host_identity = lambda: "another host"
    reason = "ranks 0 and 1 are on different hosts"
    with pytest.raises(ConfigError, match=rf"`comm\.peer_memory: always` cannot be had \(rank 0: {reason}"):
        losses(rank, {"stage": 3, "comm": {"peer_memory": "always"}})
    said = io.StringIO()
    with redirect_stderr(said):
        found = losses(rank, {"stage": 3, "comm": {"peer_memory": "auto"}})
    assert said.getvalue().count(f"comm.peer_memory: auto is none (rank 0: {reason}") == (rank == 0)
    assert found == losses(rank, {"stage": 3})


def test_where_not_all_can_auto_says_why_not_and_always_is_an_error_on_all_ranks():
    run_ranks(elsewhere, world_size=2, time_limit_s=60)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"stage": 0}, "`stage: 0` gathers no parameters"),
        ({"stage": 2, "comm": {"weights": "int8"}}, "`comm.weights: int8`"),
        ({"stage": 3, "comm": {"secondary_shard": "node"}}, "`comm.secondary_shard: node`"),
        ({"stage": 3, "offload": {"params": "cpu"}}, "`offload.params: cpu`"),
    ],
)
def test_settings_that_leave_nothing_to_read_are_refused_with_always_and_passed_over_with_auto(settings, reason):
    comm = settings.get("comm", {})
    with pytest.raises(ConfigError, match=reason):
        ZeroConfig.of(settings | {"comm": comm | {"peer_memory": "always"}})
    assert reason in ZeroConfig.of(settings | {"comm": comm | {"peer_memory": "auto"}}).hindrance_to_peer_memory
    with pytest.raises(ConfigError, match=r"comm\.peer_memory"):
        ZeroConfig.of({"comm": {"peer_memory": True}})


# ---- GPUs: what is asked of torch, in which order. Their memory is not to be had here. ----


class Gpus:
    """Two of them in one process: torch's symmetric memory, and a device module whose side stream is done at once."""

    def __init__(self):
        self.asked: list[str] = []
        self.others = torch.full((96,), 7.0)

    # what `torch.distributed._symmetric_memory` has

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.own = torch.full(size, 3.0, dtype=dtype)
        return self.own

    def rendezvous(self, tensor: torch.Tensor, group: object) -> "Gpus":
        assert tensor is self.own and group == "gather group"
        return self

    def get_buffer(self, rank: int, sizes: tuple, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        buffer = self.own if rank == 0 else self.others
        return buffer[storage_offset : storage_offset + sizes[0]]

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        self.asked.append(f"barrier {channel}, {timeout_ms} ms")

    # what a device module and its streams have

    def Stream(self, device: torch.device, priority: int) -> "Gpus":
        return self

    def stream(self, stream: "Gpus"):
        return nullcontext()

    def current_stream(self, device: torch.device) -> "Gpus":
        return self

    def wait_stream(self, stream: "Gpus") -> None:
        self.asked.append("the side stream waits")

    def record_event(self) -> str:
        self.asked.append("event")
        return "event"

    def wait_event(self, event: str) -> None:
        self.asked.append(f"training waits for the {event}")


def test_gpus_copy_between_two_barriers_beside_training(monkeypatch):
    gpus = Gpus()
    monkeypatch.setattr(device_peers, "symmetric_memory", gpus)
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpus)
    group = RankGroup(ranks=(0, 1), place=0, handle="gather group")
    one = {"world": group, "shard": group, "replicate": group, "gather": group}
    groups = Groups(world_size=2, rank=0, backend="nccl", **one, nodes=(0, 0))
    ledger = Ledger()
    peers = device_peers.DevicePeers(groups, LocalTransport(ledger), torch.device("cuda", 0), 4.0)
    shared = peers.share(96, torch.float32, [Interval(0, 32), Interval(64, 96)])
    gpus.others[64:] = 5.0
    flat = torch.zeros(64)
    peers.start_all_gather(flat, shared, LABEL).finish()
    assert flat.tolist() == 32 * [3.0] + 32 * [5.0]
    around = "barrier 0, 4000 ms"
    assert gpus.asked == ["the side stream waits", around, around, "event", "training waits for the event"]
    assert [(row.kind, row.bytes_sent, row.bytes_between) for row in ledger.rows()] == [(LABEL.kind, 128, 0)]
    with pytest.raises(RuntimeError, match="several nodes"):
        device_peers.DevicePeers(replace(groups, nodes=(0, 1)), LocalTransport(), torch.device("cuda", 0), 4.0)


@pytest.mark.parametrize("wanted", ["auto", "always"])
def test_gpus_whose_process_group_is_gloos_have_no_peer_memory(wanted, monkeypatch, capsys):
    monkeypatch.setattr(device_peers, "symmetric_memory", None)
    group = RankGroup(ranks=(0, 1), place=0)
    groups = Groups(world_size=2, rank=0, backend="gloo", world=group, shard=group, replicate=group, gather=group)
    config, transport = ZeroConfig.of({"stage": 3, "comm": {"peer_memory": wanted}}), LocalTransport()
    arguments = config, groups, transport, transport, torch.device("cuda", 0)
    if wanted == "auto":
        assert choose_peer_memory(*arguments) is None
        assert (
            "comm.peer_memory: auto is none (rank 0: the process group of the GPUs is gloo's" in capsys.readouterr().err
        )
    else:
        with pytest.raises(ConfigError, match=r"rank 0: the process group of the GPUs is gloo's"):
            choose_peer_memory(*arguments)


def test_torch_has_what_gathers_out_of_gpus_memory_ask_of_it():
    """A private module: where one of these has moved, `hf_zero/comm/peers/device_peers.py` has to follow."""
    assert list(signature(symmetric_memory.empty).parameters) == ["size", "dtype", "device"]
    assert list(signature(symmetric_memory.rendezvous).parameters) == ["tensor", "group"]
    for method, arguments in (
        ("get_buffer", ["rank: ", "sizes: ", "dtype: ", "storage_offset: "]),
        ("barrier", ["channel: ", "timeout_ms: "]),
    ):
        documented = getattr(_SymmetricMemory, method).__doc__
        places = [documented.index(argument) for argument in arguments]
        assert places == sorted(places)
    assert "priority" in signature(torch.cuda.Stream.__new__).parameters
