"""What travels: the right sums in one order, the bytes that a collective needs and no more, errors of one rank on all."""

import gc
import os
import pickle
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cells import short_of, slow
from harness import tcp_bytes
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankFailedError
from shared_ranks import on_ranks, run_on_ranks
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from training import gpt2, gpt2_batch

from hf_zero.arithmetic.sums import sum_in_rank_order, sum_of_squares
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.on_all_ranks import done_on_all_ranks
from hf_zero.comm import own_groups
from hf_zero.comm.all_or_none import all_or_none, all_results_or_none, raise_on_all
from hf_zero.comm.collective import CollectiveTransport
from hf_zero.comm.control import Control, GatherOrder, rounds
from hf_zero.comm.groups import Groups, RankGroup
from hf_zero.comm.ledger import Ledger
from hf_zero.comm.own_groups import urgent_options
from hf_zero.comm.point_to_point import PointToPointTransport
from hf_zero.comm.steps_in_order import StepsInOrder
from hf_zero.comm.transport import Handle
from hf_zero.comm.waits import Label, Watch
from hf_zero.config import CommConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.optimizer.shared_settings import SharedSettings
from hf_zero.presence import arrivals, barrier
from hf_zero.presence.arrivals import CommunicationError, RankProcess
from hf_zero.presence.store_exchange import StoreExchange
from hf_zero.presence.watchdog import Watchdog
from hf_zero.presence.watched_barrier import hold_barrier
from hf_zero.queues import SideQueue, queue_end

pytestmark = pytest.mark.timeout(120)
LABEL = Label(kind="reduce-scatter of gradients", subject="bucket 0")


@given(st.integers(1, 5), st.integers(0, 300), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 4))
def test_sum_in_rank_order_wherever_out_lies(ranks, numel, dtype, place):
    generator = torch.Generator().manual_seed(numel)
    parts = [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected = expected + part
    wide = parts[0].float()
    for part in parts[1:]:
        wide = wide + part.float()
    out = torch.empty(numel, dtype=torch.float32)
    sum_in_rank_order([p.clone() for p in parts], out)
    assert torch.equal(out, wide if dtype != torch.float32 else expected)
    own = place % ranks
    copies = [p.clone() for p in parts]
    sum_in_rank_order(copies, copies[own])
    assert torch.equal(copies[own], expected)


@pytest.mark.parametrize("numel", [0, 1, 127, 65536, 65537, 1_000_003])
def test_sum_of_squares_to_the_seventh_digit(numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 3
    exact = np.square(values.numpy().astype(np.float64)).sum()
    assert sum_of_squares(values).item() == pytest.approx(exact, rel=3e-7)
    if numel:
        values[numel // 2] = float("nan")
        assert torch.isnan(sum_of_squares(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", short_of([2, 3, 4], [2, 3]))
@on_ranks()
def test_both_transports_give_the_same(rank, world_size, dtype):
    groups = Groups.create(stage=2, device_type="cpu", comm=CommConfig())
    numel = 640 * world_size
    mine = torch.arange(numel, dtype=torch.float32).to(dtype) * (rank + 1)
    for transport in (PointToPointTransport(groups, 30), CollectiveTransport(groups)):
        whole = sum(torch.arange(numel, dtype=torch.float32).to(dtype).float() * (r + 1) for r in range(world_size))
        expected = whole.chunk(world_size)[rank]
        tolerance = {"rtol": 0 if dtype == torch.float32 else 2e-2, "atol": 0}
        flat, out = mine.clone(), torch.empty(numel // world_size)
        transport.start_reduce_scatter(flat, out, LABEL).finish()
        torch.testing.assert_close(out, expected, **tolerance)
        flat = mine.clone()
        transport.start_reduce_scatter(flat, flat.chunk(world_size)[rank], LABEL).finish()
        torch.testing.assert_close(flat.chunk(world_size)[rank].float(), expected, **tolerance)
        for in_place in (True, False):
            gathered = torch.zeros(numel, dtype=dtype)
            own = gathered.chunk(world_size)[rank] if in_place else torch.empty(numel // world_size, dtype=dtype)
            own.fill_(rank + 1)
            handle = transport.start_all_gather(gathered, own, LABEL)
            handle.finish()
            handle.finish()
            assert all((part == r + 1).all() for r, part in enumerate(gathered.chunk(world_size)))
        assert transport.exchange(rank) == list(range(world_size))
        # Longer than one message of gloo, which ends a send only when its receiver asks for it.
        assert transport.exchange("x" * 3000 * rank) == ["x" * 3000 * each for each in range(world_size)]
        assert transport.exchange("x" * 3000) == ["x" * 3000] * world_size
        assert transport.agree_max(torch.tensor([rank, 3]), LABEL).tolist() == [world_size - 1, max(3, world_size - 1)]


def bytes_of_steps(rank: int, world_size: int, settings: dict, accumulation: int, steps: int) -> dict:
    torch.manual_seed(0)
    model = gpt2()
    # Large enough that the agreements' bytes vanish beside the parameters'.
    model.resize_token_embeddings(40_000, mean_resizing=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ZeroEngine(model, [optimizer], settings)
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        for micro in range(accumulation):
            if micro < accumulation - 1:
                with engine.no_sync():
                    model(**gpt2_batch(generator, 1)).loss.backward()
            else:
                model(**gpt2_batch(generator, 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.finish_parameters()

    step()
    dist.barrier()
    sent, counted = tcp_bytes().sent, engine.comm_report().bytes_sent
    for _ in range(steps):
        step()
    dist.barrier()
    found = {
        "socket": (tcp_bytes().sent - sent) / steps,
        "ledger": (engine.comm_report().bytes_sent - counted) / steps,
        "parameters": sum(p.nbytes for p in model.parameters()),
    }
    # A rank that leaves closes its sockets, and what they have counted is gone on both sides.
    dist.barrier()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("settings", "accumulation", "copies"),
    [
        ({"stage": 0}, 1, 2),
        ({"stage": 1}, 1, 2),
        ({"stage": 2}, 1, 2),
        ({"stage": 1}, 3, 2),
        ({"stage": 2, "grad_accumulation": "local"}, 3, 2),
        ({"stage": 2, "grad_accumulation": "sharded"}, 3, 4),
        ({"stage": 3}, 1, 3),
        ({"stage": 3, "reshard_after_forward": False}, 1, 2),
    ],
    ids=["0", "1", "2", "1, accumulating 3", "2 local, 3", "2 sharded, 3", "3", "3 kept"],
)
@pytest.mark.short_cells("2 sharded, 3-2", "3-2")
def test_bytes_at_the_socket_are_what_the_formula_says(settings, accumulation, copies, world_size):
    """`copies` x (W-1)/W x parameter bytes: 2 for one reduction and one gather, A + 1 when every micro-batch is reduced, 3 where
    layers are gathered for forward and for backward."""
    for counted in run_on_ranks(
        bytes_of_steps, world_size=world_size, settings=settings, accumulation=accumulation, steps=3
    ):
        formula = copies * (world_size - 1) / world_size * counted["parameters"]
        print(f"{settings} W={world_size} A={accumulation}: socket / formula = {counted['socket'] / formula:.4f}")
        assert counted["socket"] <= 1.02 * formula
        assert counted["ledger"] == pytest.approx(counted["socket"], rel=0.02)


def bytes_with_and_without(rank: int, world_size: int, stage: int, comm: dict) -> tuple[dict, dict]:
    exact, quantized = ({"stage": stage, "comm": each} for each in ({}, comm))
    return bytes_of_steps(rank, world_size, exact, 1, 2), bytes_of_steps(rank, world_size, quantized, 1, 2)


@pytest.mark.extra("wire")
@pytest.mark.parametrize(
    ("stage", "comm", "share"),
    [
        (2, {"gradients": "int8", "weights": "int8"}, 0.28),
        slow(3, {"gradients": "int8", "weights": "int8"}, 0.28),
    ],
    ids=["2", "3"],
)
@pytest.mark.short_cells("2")
def test_blocks_take_a_quarter_at_the_socket(stage, comm, share):
    """1 byte in place of 4, and 4 bytes of scale for 256 elements: 0.254."""
    by_rank = run_on_ranks(bytes_with_and_without, stage=stage, comm=comm)
    for exact, quantized in by_rank:
        print(f"stage {stage}, {comm}: {quantized['socket'] / exact['socket']:.4f} of the bytes of fp32")
        assert quantized["socket"] <= share * exact["socket"]
        assert quantized["ledger"] == pytest.approx(quantized["socket"], rel=0.02)


def one_rank_stays_away(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ZeroEngine(model, [optimizer], {"stage": 2, "comm": {"timeout_s": 4}})
    if rank == 1:
        # Until the end of rank 0 ends it.
        time.sleep(100)
        return
    with pytest.raises(CommunicationError, match=r"reduce-scatter of gradients of bucket|agreement on used parameters"):
        model(**gpt2_batch(torch.Generator(), 1)).loss.backward()
    raise LookupError("rank 0 was told")


def test_a_peer_that_does_not_come_is_an_error_with_a_name_not_a_hang():
    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 0 was told"):
        run_on_ranks(one_rank_stays_away)
    assert time.monotonic() - begin < 90


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "shape",
            "parameter transformer.wte.weight: shape (211, 24), torch.float32, trained on rank 0, shape (300, 24)",
        ),
        ("frozen", "parameter transformer.wpe.weight: shape (16, 24), torch.float32, trained on rank 0"),
        ("config", "the setting `stage`: 2 on rank 0, 1 on rank 1"),
        ("optimizer", "optimizer 0: AdamW over groups"),
    ],
)
@on_ranks(2)
def test_ranks_that_differ_are_told_at_the_start(rank, world_size, how, says):
    torch.manual_seed(0)
    model = gpt2()
    settings = {"stage": 2}
    if how == "shape" and rank == 1:
        model.resize_token_embeddings(300, mean_resizing=False)
    if how == "frozen" and rank == 1:
        model.transformer.wpe.weight.requires_grad_(False)
    if how == "config" and rank == 1:
        settings = {"stage": 1}
    kind = torch.optim.SGD if how == "optimizer" and rank == 1 else torch.optim.AdamW
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(ValueError, match="do not train the same model with the same settings") as error:
        ZeroEngine(model, [optimizer], settings)
    message = str(error.value)
    assert says in message


AT_THE_START = {
    "lr of group 0 of optimizer 0 (AdamW): 0.01 on rank 0, 0.03 on rank 1": {"lr": 0.03},
    "betas of group 0 of optimizer 0 (AdamW): (0.9, 0.999) on rank 0, (0.5, 0.999) on rank 1": {"betas": (0.5, 0.999)},
    "weight_decay of group 0 of optimizer 0 (AdamW): 0.01 on rank 0, 0.5 on rank 1": {"weight_decay": 0.5},
    "p of 1 (Dropout): 0.1 on rank 0, 0.2 on rank 1": {"p": 0.2},
    "eps of 2 (LayerNorm): 1e-05 on rank 0, 0.1 on rank 1": {"eps": 0.1},
}
IN_A_STEP = {
    "lr of group 0 of optimizer 0 (AdamW): 0.01 on rank 0, 0.02 on rank 1": ("lr", 0.02),
    "betas of group 0 of optimizer 0 (AdamW): (0.9, 0.999) on rank 0, (0.5, 0.9) on rank 1": ("betas", (0.5, 0.9)),
    "max_norm and norm_type of the last clip: (1.0, 2.0) on rank 0, (2.0, 2.0) on rank 1": ("clip", 2.0),
    "edits of sharded parameters: 0 on rank 0, 1 on rank 1": ("edit", 0.1),
    "optimizer steps taken: 2 on rank 0, 3 on rank 1": ("step", None),
}


def with_settings(
    p: float = 0.1, eps: float = 1e-5, lr: float = 0.01, **settings
) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.LayerNorm(8, eps=eps))
    return model, torch.optim.AdamW(model.parameters(), lr=lr, **settings)


def test_both_of_two_ranks_with_other_settings_see_a_difference():
    digests = []
    for number in range(40):
        _, optimizer = with_settings(lr=0.01 * number)
        digests.append(np.frombuffer(SharedSettings([optimizer]).digest(), dtype=np.uint8))
    for one, other in combinations(digests, 2):
        largest = np.maximum(one, other)
        assert (largest != one).any() and (largest != other).any()


@on_ranks(2)
def test_settings_of_one_rank_are_told_at_the_start(rank, world_size):
    for says, settings in AT_THE_START.items():
        model, optimizer = with_settings(**settings if rank == 1 else {})
        with pytest.raises(ValueError, match="do not train the same model with the same settings") as error:
            ZeroEngine(model, [optimizer], 2)
        assert says in str(error.value)


def clipped_step(engine: ZeroEngine, max_norm: float) -> None:
    [sharded] = engine.optimizers
    engine.model(torch.ones(2, 8)).sum().backward()
    engine.clip_grad_norm_(max_norm)
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()


@on_ranks(2)
def test_settings_that_one_rank_changes_are_told_before_the_step(rank, world_size):
    for stage in range(4):
        for says, (name, value) in IN_A_STEP.items():
            # From stage 1 on, all ranks take part in a step.
            if (name == "edit") > (stage == 3) or (name == "step") > (stage == 0):
                continue
            model, optimizer = with_settings()
            engine = ZeroEngine(model, [optimizer], stage)
            # A schedule, the same on all ranks.
            for rate in (0.03, 0.01):
                optimizer.param_groups[0]["lr"] = rate
                clipped_step(engine, 1.0)
            if name == "clip":
                # The clip comes after the agreement: it is compared with the next step's.
                clipped_step(engine, value if rank == 1 else 1.0)
            elif rank == 1 and name == "edit":
                with torch.no_grad():
                    model[0].weight.mul_(value)
            elif rank == 1 and name == "step":
                optimizer.step()
                # The step has noted a clip by infinity. It would be told even if steps were not compared.
                engine.clip_grad_norm_(1.0)
            elif rank == 1:
                optimizer.param_groups[0][name] = value
            owned = [bucket.own.clone() for bucket in engine.buckets]
            with pytest.raises(ValueError, match="do not train the same model with the same settings") as error:
                clipped_step(engine, 1.0)
            assert says in str(error.value), (stage, says)
            assert all(map(torch.equal, owned, (bucket.own for bucket in engine.buckets)))
            engine.close()


@on_ranks(2)
def test_an_edit_that_leaves_no_trace_on_one_rank_is_refused_by_all(rank, world_size):
    for stage in range(3):
        model, optimizer = with_settings()
        engine = ZeroEngine(model, [optimizer], {"stage": stage, "param_dtype": "bfloat16"})
        # From stage 1 on, rank 0 has all rows of a model as small as this one.
        for parameter in model.parameters() if rank == 0 else ():
            parameter.data.add_(1.0)
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        with pytest.raises(RuntimeError, match=r"was edited through `\.data` or numpy") as error:
            optimizer.step()
        assert len(set(engine.transport.exchange(str(error.value)))) == 1


def seeded_apart(rank: int, world_size: int, stage: int) -> np.ndarray:
    torch.manual_seed(rank)
    model = gpt2()
    ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], stage)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


@pytest.mark.parametrize("stage", short_of([0, 1, 2], [0, 2]))
def test_every_rank_starts_from_rank_0s_parameters(stage):
    first, second = run_on_ranks(seeded_apart, stage=stage)
    assert np.array_equal(first, second)
    torch.manual_seed(0)
    assert np.array_equal(first, torch.cat([p.detach().flatten() for p in gpt2().parameters()]).numpy())


@on_ranks(2)
def test_what_is_under_way_when_an_engine_is_dropped_arrives_and_blocks_nothing(rank, world_size):
    groups = Groups.create(stage=2, device_type="cpu", comm=CommConfig())
    transport = PointToPointTransport(groups, 30)
    label = Label(kind="all-gather of parameters", subject="bucket 0")
    flat = torch.zeros(2 << 18)
    own = flat.chunk(2)[rank].fill_(rank + 1)
    if rank == 1:
        # By then, the other rank has nobody left who waits for what is sent here.
        time.sleep(1)
    handle = transport.start_all_gather(flat, own, label)
    del transport, handle
    gc.collect()
    everyone = [None, None]
    dist.all_gather_object(everyone, rank)
    assert everyone == [0, 1]
    PointToPointTransport(groups, 30)
    assert flat[0] == 1 and flat[-1] == 2


@on_ranks(2)
def test_ranks_that_gather_layers_of_equal_size_in_another_order_are_told_at_their_next_agreement(rank, world_size):
    groups = Groups.create(stage=3, device_type="cpu", comm=CommConfig())
    transport = CollectiveTransport(groups)
    labels = [Label(kind="all-gather of parameters", subject=f"bucket {number}") for number in range(2)]
    flat = torch.zeros(64)
    own = flat.chunk(world_size)[rank]
    for label in labels:
        transport.start_all_gather(flat, own, label).finish()
    transport.exchange(None)
    for label in labels if rank == 0 else reversed(labels):
        transport.start_all_gather(flat, own, label).finish()
    with pytest.raises(CommunicationError, match=rf"rank {rank} and rank {1 - rank} gathered parameters in different"):
        transport.agree_max(torch.ones(1), LABEL)


@on_ranks(2)
def test_a_gather_repeated_in_each_step_is_sent_counted_and_ordered_as_one_that_is_not(rank, world_size):
    groups = Groups.create(stage=3, device_type="cpu", comm=CommConfig())
    label = Label(kind="all-gather of parameters", subject="bucket 0")
    found, checked = [], []
    wire = SimpleNamespace(over=lambda label, *_tensors, **_options: checked.append(label) or (lambda wait: wait))
    for is_prepared in (False, True):
        transport = CollectiveTransport(groups, Ledger(is_timed=False))
        flat, larger = torch.zeros(64), torch.zeros(128)
        own = flat.chunk(world_size)[rank]
        start = partial(transport.start_all_gather, flat, own, label)
        if is_prepared:
            start = transport.prepare_all_gather(flat, own, label)
        sums = []
        for step in range(10):
            own.fill_(10 * step + rank + 1)
            transport.wire = wire if step == 5 else None
            if step == 7:
                transport.ledger.start_timing()
            if step in (2, 3):
                # The same bucket in another dtype.
                transport.start_all_gather(larger, larger.chunk(world_size)[rank], label).finish()
            handles = [start(), start()] if step == 4 else [start()]
            for handle in handles:
                handle.finish()
                handle.finish()
            sums.append(flat.sum().item())
        [row] = transport.ledger.rows()
        assert row.under_way_seconds > 0
        entries = transport.ledger.log.entries
        assert all(entry[-1] is not None for entry in entries)
        found.append((sums, row.calls, row.bytes_sent, row.timed_bytes, transport._gathers.checksum, len(entries)))
    assert found[0] == found[1]
    assert found[0][:2] == ([32 * (20 * step + 3) for step in range(10)], 13)
    assert checked == [label, label]


class Mail:
    """A process group whose ranks are threads. As in gloo, the nth receive from a rank gets the nth message of its tag, and a
    send ends once its receive has begun.

    Attributes:
        operations: sends and receives of this rank.
        most_bytes: bytes of the largest sent message.
    """

    def __init__(self, rank: int, messages: dict[tuple, tuple[Future, Future]]):
        self._rank, self._messages, self._numbers, self.operations = rank, messages, Counter(), 0
        self.most_bytes = 0

    def _next(self, *key: int | str) -> tuple[Future, Future]:
        self.operations += 1
        self._numbers[key] += 1
        return self._messages.setdefault((*key[1:], self._numbers[key]), (Future(), Future()))

    def send(self, values: list[torch.Tensor], place: int, tag: int) -> SimpleNamespace:
        message, is_wanted = self._next("send", self._rank, place, tag)
        self.most_bytes = max(self.most_bytes, values[0].nbytes)
        message.set_result(values[0].clone())
        return SimpleNamespace(wait=lambda limit: is_wanted.result(timeout=10))

    def recv(self, values: list[torch.Tensor], place: int, tag: int) -> SimpleNamespace:
        message, is_wanted = self._next("receive", place, self._rank, tag)
        is_wanted.set_result(None)
        return SimpleNamespace(wait=lambda limit: values[0].copy_(message.result(timeout=10)))


def controls_of(size: int, does: Callable[[Control, int], object], shard: int | None = None) -> tuple[list, int]:
    """Returns what each rank's thread returns or raises, and the most operations of a rank.

    Args:
        shard: ranks that gather together; by default all.
    """
    shard = shard or size
    mails = [Mail(rank, messages) for messages in [{}] for rank in range(size)]

    def run(rank: int) -> object:
        world = RankGroup(ranks=tuple(range(size)), index=rank)
        groups = SimpleNamespace(control_group=mails[rank], timeout_s=60.0, world=world)
        control = Control(groups, Watch(), GatherOrder(tuple(range(rank - rank % shard, rank - rank % shard + shard))))
        try:
            return does(control, rank)
        except CommunicationError as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size))), max(each.operations for each in mails)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 10, 64])
def test_exchanges_reach_all_ranks_in_few_messages(size):
    def agree(control: Control, rank: int) -> tuple:
        # Some ranks wait for the first one only after the others, as after an error in the reductions of a pass.
        used = torch.zeros(size, dtype=torch.uint8)
        used[rank] = rank + 1
        wait = control.start_swap(used, LABEL)
        largest = wait() if rank % 2 else None
        everyone = control.start_swap(torch.tensor([0.1 * rank, 1.0]), "a norm", stacks=True)()
        values = control.exchange("long" * 300 * (rank + 1), "exchange of texts")
        # Runs of ranks with the same value.
        assert control.exchange(rank // 3 % 2, "exchange of hosts") == [each // 3 % 2 for each in range(size)]
        largest = wait() if largest is None else largest
        return largest.tolist(), everyone.tolist(), [len(each) // 1200 for each in values]

    found, _ = controls_of(size, agree)
    counted = list(range(1, size + 1))
    norms = torch.stack([torch.tensor([0.1 * each, 1.0]) for each in range(size)]).tolist()
    assert found == [(counted, norms, counted)] * size
    # Two messages in each round, after which a rank has heard of three times as many ranks.
    _, operations = controls_of(size, lambda control, rank: control.start_swap(torch.ones(99), LABEL)().sum())
    most = next(count for count in range(9) if 3**count >= size)
    assert operations <= 4 * most
    assert sum(map(len, rounds(4096))) <= 2 * 8


def test_messages_do_not_grow_with_the_ranks_that_have_the_same_value():
    def most_bytes(control: Control, rank: int) -> int:
        control.exchange(("a save", "folder" * 20), "exchange of a folder")
        return control.group.most_bytes

    [few, *_], _ = controls_of(3, most_bytes)
    many, _ = controls_of(64, most_bytes)
    assert max(many) == few == 1024


class Heard(frozenset):
    """Numbers of ranks, merged as a set."""

    def merged(self, other: "Heard") -> "Heard":
        return Heard(self | other)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 10, 28, 64])
def test_a_merge_covers_all_ranks(size):
    found, _ = controls_of(size, lambda control, rank: control.merge(Heard([rank]), "merge of ranks"))
    assert found == [Heard(range(size))] * size


@pytest.mark.parametrize(("size", "failed"), [(3, []), (2, [1]), (9, [4, 7]), (28, [27])])
def test_a_failure_is_the_error_of_every_rank_if_outcomes_are_merged(size, failed):
    def work(rank: int) -> int:
        if rank in failed:
            raise OSError(f"disk {rank}")
        return rank

    def does(control: Control, rank: int) -> object:
        merge = partial(control.merge, purpose="a step")
        try:
            return done_on_all_ranks(merge, rank, partial(work, rank), doing="write", then="Nothing was written.")
        except CheckpointError as error:
            return str(error)

    found, _ = controls_of(size, does)
    errors = [f"hf_zero: rank {rank} could not write: OSError: disk {rank}. Nothing was written." for rank in failed]
    assert found == ([errors[0]] * size if failed else list(range(size)))


@pytest.mark.parametrize(("size", "odd"), [(3, 1), (8, 0), (8, 5), (11, 10)])
def test_a_rank_of_many_that_comes_to_a_different_call_is_named_on_all(size, odd):
    def call(control: Control, rank: int) -> None:
        control.exchange("x" * 2000, "a save" if rank == odd else "exchange of values")

    found, _ = controls_of(size, call)
    for rank, error in enumerate(found):
        other = (0 if odd else 1) if rank == odd else odd
        assert f"rank {rank} the {'a save' if rank == odd else 'exchange of values'}" in str(error)
        assert f"rank {other} the {'exchange of values' if rank == odd else 'a save'}" in str(error)


def test_orders_of_gathers_are_compared_among_the_ranks_that_gather_together():
    def agree(differs: Callable[[int], bool], control: Control, rank: int) -> int:
        control._order.note("a layer" if differs(rank) else "another layer")
        return int(control.start_swap(torch.tensor([rank]), LABEL)())

    # Each group of ranks may gather in its own order, and only the group of the odd rank ends for it.
    assert controls_of(6, partial(agree, lambda rank: rank < 3), shard=3)[0] == [5] * 6
    found, _ = controls_of(6, partial(agree, lambda rank: rank == 4), shard=3)
    assert found[:3] == [5] * 3 and all("different orders" in str(error) for error in found[3:])
    assert "rank 3 and rank 4" in str(found[3]) and "rank 5 and rank 4" in str(found[5])


GPUS = "cpu:gloo,cuda:nccl"
URGENT = "nccl, urgent"
WORLD = "gloo"
ASKED_FOR = [
    ("gloo", 3, {}, [WORLD]),
    (GPUS, 0, {}, [WORLD, "default"]),
    (GPUS, 2, {}, [WORLD, "default", URGENT]),
    (GPUS, 3, {}, [WORLD, "default", URGENT]),
    (GPUS, 3, {"secondary_shard": "node", "node_size": 2}, [WORLD, "default", *2 * [URGENT]]),
    (GPUS, 2, {"shard_group_size": 2}, [WORLD, *3 * ["default"], URGENT]),
    (GPUS, 3, {"sync_every": 4, "shard_group_size": 2}, [WORLD, *3 * ["default"], URGENT, "gloo"]),
]
"""Backends, stage, `comm`, and the groups that a rank asks torch for, its own and none of other ranks: backend, options."""


@on_ranks(4)
def test_an_accelerators_gathers_have_urgent_communicators_of_their_own_made_once(rank, world_size):
    """gloo is what is had of all of them, on a host without accelerators."""
    asked = []
    make = dist.new_group
    # A script's own group: rank 0 now has one more than the others.
    make([0])

    def new_group(ranks=None, timeout=None, backend=None, pg_options=None, **options):
        asked.append(f"{backend or 'default'}{'' if pg_options is None else ', ' + pg_options}")
        return make(ranks, timeout, "gloo", **options)

    dist.new_group = new_group
    own_groups.urgent_options = lambda backend, timeout: "urgent" if backend == "nccl" else None
    for number, (backends, stage, comm, made) in enumerate(ASKED_FOR):
        asked.clear()
        dist.get_backend_config = lambda backends=backends: backends
        device_type = "cuda" if "cuda" in backends else "cpu"
        # Of one time limit, groups that are there already are taken again.
        settings = CommConfig(**comm, timeout_s=100 + number)
        Groups.create(stage=stage, device_type=device_type, comm=settings)
        groups = Groups.create(stage=stage, device_type=device_type, comm=settings)
        assert asked == made, (backends, stage, comm)
        assert (groups.gather.handle is not groups.shard.handle) is (URGENT in made)
        for group in (groups.world, groups.gather, groups.shard, groups.replicate):
            if group.size > 1:
                assert group.handle not in (None, dist.group.WORLD)
                dist.all_reduce(torch.ones(1), group=group.handle)
    # NCCL that has run before `import hf_zero` keeps to no order over communicators.
    del os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"]
    dist.get_backend_config = lambda: GPUS
    asked.clear()
    groups = Groups.create(stage=2, device_type="cuda", comm=CommConfig(timeout_s=99))
    assert asked == [WORLD, "default"] and groups.gather.handle is groups.shard.handle


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_nccl_is_asked_for_a_stream_of_high_priority():
    timeout = timedelta(seconds=7)
    options = urgent_options("nccl", timeout)
    assert isinstance(options, dist.ProcessGroupNCCL.Options)
    # torch warns where the two differ.
    assert options.is_high_priority_stream and options._timeout == timeout


def test_other_backends_have_no_priorities():
    assert urgent_options("gloo", timedelta(seconds=7)) is None


# ---- the ranks' processes ----


def test_a_process_has_ended_once_it_has_even_before_its_parent_looks():
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    seen = RankProcess(pid=process.pid)
    assert not seen.has_ended() and not RankProcess().has_ended()
    process.kill()
    deadline_s = time.monotonic() + 20
    while not seen.has_ended():
        assert time.monotonic() < deadline_s, "a process that its parent has not taken note of seems to live"
        time.sleep(0.01)
    process.communicate()
    assert seen.has_ended()


def test_of_processes_that_cannot_be_seen_nothing_is_said():
    process = subprocess.Popen(["true"])
    process.wait()
    assert RankProcess(pid=process.pid).has_ended()
    assert not RankProcess(pid=process.pid, namespace="of another host").has_ended()


@on_ranks(2)
def test_a_meeting_without_a_store_is_an_error_that_says_so(rank, world_size):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    ports = [None] * world_size
    dist.all_gather_object(ports, store and store.port)
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    groups = Groups.create(stage=1, device_type="cpu", comm=CommConfig())
    with mock.patch("hf_zero.presence.store._get_default_store", lambda: store):
        watchdog = Watchdog(rank, world_size, "test")
    ranks = groups.world.ranks
    hold_barrier(watchdog, ranks, "first", "the first meeting", 20)
    dist.barrier()
    if rank == 0:
        del store, watchdog
        gc.collect()
    dist.barrier()
    if rank == 1:
        with pytest.raises(
            CommunicationError,
            match=r"the second meeting; the process that hosts the ranks' store \(rank 0 or the launcher\) has ended",
        ):
            hold_barrier(watchdog, ranks, "second", "the second meeting", 20)
        assert watchdog.leave(patience_s=20) == []


class QuietStore:
    """Stands in for torch's store: one method does not return before `is_over` is set."""

    def __init__(self, silent: str, is_over: threading.Event):
        self._silent, self._is_over = silent, is_over
        self._values: dict[str, bytes] = {}

    def __getattribute__(self, name: str):
        if name == object.__getattribute__(self, "_silent"):
            object.__getattribute__(self, "_is_over").wait(60)
        return object.__getattribute__(self, name)

    def clone(self) -> "QuietStore":
        return self

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values[key]

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value if isinstance(value, bytes) else value.encode()

    def add(self, key: str, amount: int) -> int:
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return int(self._values[key])

    def delete_key(self, key: str) -> None:
        self._values.pop(key, None)


@pytest.fixture(params=["clone", "set", "check", "get"])
def quiet_store(request):
    is_over = threading.Event()
    with mock.patch("hf_zero.presence.store._get_default_store", lambda: QuietStore(request.param, is_over)):
        yield
        is_over.set()


def test_an_exchange_through_a_store_that_falls_silent_ends_when_it_is_told_to_hurry(quiet_store):
    exchange, errors = StoreExchange(SimpleNamespace(rank=1, world_size=2), "one", b"s", 600.0), []
    if (quiet := exchange._thread._kept)._silent == "get":
        # The other rank's value is there.
        quiet.set("hf_zero/store_exchange/one/1/0/0", b"")

    def takes_part() -> None:
        with pytest.raises(
            CommunicationError, match=r"store \(rank 0 or the launcher\) has not answered for 0 s"
        ) as error:
            exchange.merge(Heard([1]))
        errors.append(error)

    thread = threading.Thread(target=takes_part)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    exchange.hurry(0.1)
    thread.join(10)
    assert errors


def test_ranks_that_meet_through_a_silent_store_end_with_an_error_that_says_so(quiet_store):
    as_rank = mock.patch.multiple(dist, get_rank=lambda: 1, get_world_size=lambda: 2)
    with mock.patch.object(arrivals, "CALL_S", 0.1), mock.patch.object(barrier, "CALL_S", 0.1), as_rank:
        assert arrivals.ended_ranks([0]) in ([], [0])
        with pytest.raises(CommunicationError, match=r"cannot reach their store|rank 0 did not arrive within 0 s"):
            barrier.await_all_ranks(0.1, 0)


def all_collectives(link: CollectiveTransport) -> Iterator[Callable[[], object]]:
    flat, part = torch.zeros(8), torch.zeros(4)
    yield lambda: link.start_reduce_scatter(flat, part, LABEL).finish()
    yield lambda: link.start_all_gather(flat, part, LABEL).finish()
    yield lambda: link.start_all_to_all(flat, torch.zeros(8), LABEL).finish()
    yield lambda: link.agree_sum(part, LABEL)
    yield lambda: link.agree_max(part, LABEL)
    yield lambda: link.broadcast(flat, LABEL)


@on_ranks(2)
def test_a_collective_that_a_peers_end_keeps_from_starting_has_a_name_too(rank, world_size):
    groups = Groups.create(stage=1, device_type="cpu", comm=CommConfig())
    links = [CollectiveTransport(groups), PointToPointTransport(groups, 60)]
    [_, peer] = links[0].exchange(RankProcess())
    if rank == 1:
        return
    while not peer.has_ended():
        time.sleep(0.05)
    # The first ones fail when they are waited for, later ones as they start.
    for link in links * 2:
        for call in all_collectives(link):
            with pytest.raises(
                CommunicationError,
                match=r"reduce-scatter of gradients of bucket 0 failed while waiting for rank 1: .*\n  rank 1 .*has ended",
            ):
                call()
        with pytest.raises(CommunicationError, match=r"exchange of a few values failed while waiting for rank 1"):
            link.exchange(1)


class CountingStore(QuietStore):
    """Counts the values that were read and written."""

    def __init__(self):
        super().__init__("", threading.Event())
        self.calls: list[str] = []

    def get(self, key: str) -> bytes:
        self.calls.append("get")
        return super().get(key)

    def set(self, key: str, value: str | bytes) -> None:
        self.calls.append("set")
        super().set(key, value)


def merged_through_a_store(size: int, timeout_s: float, absent: int | None = None) -> tuple[list, CountingStore]:
    """Returns what each rank has after two merges, or its error."""
    store = CountingStore()
    with mock.patch("hf_zero.presence.store._get_default_store", lambda: store):
        exchanges = [
            StoreExchange(SimpleNamespace(rank=r, world_size=size), "one", b"s", timeout_s) for r in range(size)
        ]

    def merge(rank: int) -> object:
        if rank == absent:
            return None
        try:
            return [exchanges[rank].merge(Heard([rank])) for _ in range(2)]
        except CommunicationError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(merge, range(size))), store


@pytest.mark.parametrize("size", [2, 9, 20])
def test_a_merge_through_the_store_covers_all_ranks_and_reads_few_values(size):
    found, store = merged_through_a_store(size, 60.0)
    assert found == [[Heard(range(size))] * 2] * size
    messages = sum(map(len, rounds(size)))
    assert store.calls.count("get") == 2 * size * messages
    assert store.calls.count("set") == 2 * size * len(rounds(size))
    # The values of the last merge may still be read.
    assert len(store._values) == size * len(rounds(size))


def test_all_ranks_name_the_rank_that_does_not_come_to_a_merge_through_the_store():
    found, _ = merged_through_a_store(9, 1.0, absent=5)
    assert all(
        "rank 5 did not join the other ranks to finish a checkpoint" in str(each)
        for rank, each in enumerate(found)
        if rank != 5
    )


class Planted:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def strangers_value(rank: int, world_size: int, path: str) -> None:
    groups = Groups.create(stage=2, device_type="cpu", comm=CommConfig())
    exchange = StoreExchange(groups, "one", b"s" * 32, 30.0)
    assert exchange.merge(Heard([rank])) == Heard([0, 1])
    dist.barrier()
    if rank == 1:
        store = dist.PrefixStore("hf_zero/store_exchange/one", _get_default_store())
        written = store.get("1/0/1")
        # A stranger's own value, and a rank's at another exchange.
        store.set("2/0/1", pickle.dumps(Planted(path)))
        store.set("3/0/1", written)
    dist.barrier()
    if rank == 0:
        for _ in range(2):
            with pytest.raises(CommunicationError, match="from rank 1 was not written by that rank"):
                exchange.merge(Heard([0]))
    dist.barrier()


def test_a_value_that_a_stranger_puts_into_the_launchers_store_is_never_unpickled(tmp_path):
    path = str(tmp_path / "planted")
    run_on_ranks(strangers_value, path=path)
    assert not Path(path).exists()
    pickle.loads(pickle.dumps(Planted(path)))
    assert Path(path).exists()


# ---- collectives of several steps ----


def log_of(step_counts: list[int], needed_after: list[list[int]]) -> list[tuple[str, int, int]]:
    """What a rank starts and waits for, in its order: ("start" or "wait", collective, step).

    Args:
        step_counts: of each collective.
        needed_after: which results the rank needs behind the beginning of each, by their place among those begun.
    """
    log: list[tuple[str, int, int]] = []
    ledger, order, finishes = Ledger(), StepsInOrder(), []

    def start(collective: int, step: int) -> Handle:
        log.append(("start", collective, step))
        label = Label(kind="a step", subject=str(collective))
        return Handle(label, ledger, lambda: log.append(("wait", collective, step)))

    for collective, steps in enumerate(step_counts):
        starts = [lambda step=step, collective=collective: start(collective, step) for step in range(steps)]
        finishes.append(order.begin(*starts).finish)
        for needed in needed_after[collective]:
            finishes[needed % len(finishes)]()
    for finish in finishes:
        finish()
        finish()
    return log


NEEDED = st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=8, max_size=8)


@given(step_counts=st.lists(st.integers(1, 4), min_size=1, max_size=8), mine=NEEDED, theirs=NEEDED)
def test_steps_start_in_one_order_whatever_is_needed_first(step_counts, mine, theirs):
    every = sorted((collective, step) for collective, steps in enumerate(step_counts) for step in range(steps))
    for needed in (mine, theirs):
        log = log_of(step_counts, needed)
        started = [(collective, step) for what, collective, step in log if what == "start"]
        # Nothing is left out, and first steps come as the collectives do, which is as all ranks begin them.
        assert sorted(started) == every
        assert [c for c, step in started if step == 0] == list(range(len(step_counts)))
        assert [each for each in started if each[1]] == [each for each in every if each[1]]
        waited = [(collective, step) for what, collective, step in log if what == "wait"]
        assert sorted(waited) == every
        for collective, step in every:
            if step:
                assert log.index(("wait", collective, step - 1)) < log.index(("start", collective, step))


def test_all_but_the_last_run_on_behind_what_begins_later():
    log = log_of([3, 3, 3, 3], [[], [], [], []])
    begun = log.index(("start", 3, 0))
    assert log.index(("start", 0, 2)) < begun and log.index(("start", 1, 1)) < begun
    assert ("wait", 0, 2) not in log[:begun]


class Beside(SideQueue):
    """Tells whether the host is inside `in_parallel`."""

    def __init__(self):
        self.is_inside = False

    @contextmanager
    def in_parallel(self, *, behind=None):
        self.is_inside = True
        yield
        self.is_inside = False

    def mark(self):
        return queue_end(torch.device("cpu"))


def test_later_steps_wait_in_a_queue_of_their_own_and_only_the_result_is_a_wait_that_counts():
    log: list[tuple[str, int, bool]] = []
    ledger, order, queue = Ledger(), StepsInOrder(), Beside()

    def start(step: int) -> Handle:
        log.append(("start", step, queue.is_inside))
        label = Label(kind=f"step {step}", subject="a bucket")
        ledger.count(label, 4, 0)
        return Handle(label, ledger, lambda: log.append(("wait", step, queue.is_inside)))

    order.begin(lambda: start(0), lambda: start(1), queue=queue).finish()
    assert log == [("start", 0, False), ("wait", 0, True), ("start", 1, True), ("wait", 1, False)]
    waits = {row.kind: row.wait_seconds for row in ledger.rows()}
    assert waits["step 0"] == 0.0 < waits["step 1"]
    assert all(row.under_way_seconds > 0 for row in ledger.rows())


# ---- work that succeeds on all ranks or raises on all ----

RANKS = 3


class Meeting:
    """An exchange between threads, which counts how often they met."""

    def __init__(self) -> None:
        self._values: list = [None] * RANKS
        self._passed = 0
        self._barrier = threading.Barrier(RANKS, self._pass, timeout=10)

    @property
    def times(self) -> int:
        return self._passed // 2

    def exchange_of(self, rank: int) -> Callable[[object], list]:
        def exchange(value: object) -> list:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return exchange

    def _pass(self) -> None:
        self._passed += 1


def on_threads(target: Callable) -> tuple[list, Meeting]:
    """What `target(rank, exchange)` returns or raises on each rank."""
    meeting, found = Meeting(), [None] * RANKS

    def run(rank: int) -> None:
        try:
            found[rank] = target(rank, meeting.exchange_of(rank))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found, meeting


def work_that_fails(faults: dict[int, BaseException]) -> Callable:
    def target(rank: int, exchange: Callable) -> str:
        def work() -> str:
            if rank in faults:
                raise faults[rank]
            return f"result of rank {rank}"

        return all_or_none(
            exchange, work, expected=(OSError,), error=lambda rank, reason: ValueError(f"rank {rank}: {reason}")
        )

    return target


def test_each_rank_gets_its_own_result_where_all_succeed():
    found, meeting = on_threads(work_that_fails({}))
    assert found == [f"result of rank {rank}" for rank in range(RANKS)]
    assert meeting.times == 1


def test_every_rank_raises_the_error_of_the_lowest_rank_that_failed():
    faults = {1: OSError("disk"), 2: PermissionError("folder")}
    found, meeting = on_threads(work_that_fails(faults))
    assert [type(error) for error in found] == [ValueError] * RANKS
    assert {str(error) for error in found} == {"rank 1: disk"}
    assert [error.__cause__ for error in found] == [None, faults[1], faults[2]]
    assert meeting.times == 1


def test_an_exception_that_is_not_expected_stays_itself_and_holds_up_nobody():
    faults = {1: KeyError("x"), 2: OSError("disk")}
    found, _ = on_threads(work_that_fails(faults))
    assert found[1] is faults[1]
    assert [type(found[rank]) for rank in (0, 2)] == [RuntimeError] * 2
    assert str(found[0]) == str(found[2]) == "hf_zero: rank 1 failed: KeyError: 'x'"


def test_what_is_no_exception_of_the_work_is_raised_before_the_exchange():
    def interrupted() -> None:
        raise KeyboardInterrupt

    def exchange(value: object) -> list:
        raise AssertionError("the process is ending")

    with pytest.raises(KeyboardInterrupt):
        all_or_none(exchange, interrupted, expected=(Exception,), error=lambda *_: ValueError())


def test_every_rank_gets_all_results_with_the_same_exchange():
    def target(rank: int, exchange: Callable) -> list:
        return all_results_or_none(exchange, lambda: 10 * rank, expected=(OSError,), error=lambda *_: ValueError())

    found, meeting = on_threads(target)
    assert found == [[0, 10, 20]] * RANKS
    assert meeting.times == 1


def test_all_results_are_none_where_one_rank_fails():
    def target(rank: int, exchange: Callable) -> list:
        def work() -> float:
            return 1 / (rank - 2)

        return all_results_or_none(
            exchange, work, expected=(ZeroDivisionError,), error=lambda rank, _: ValueError(f"rank {rank}")
        )

    found, _ = on_threads(target)
    assert [(type(error), str(error)) for error in found] == [(ValueError, "rank 2")] * RANKS


def test_what_is_told_of_an_exception_can_carry_more_than_its_text():
    def target(rank: int, exchange: Callable) -> None:
        fault = OSError(28, "no space") if rank == 1 else None
        raise_on_all(
            exchange,
            fault,
            expected=(OSError,),
            tell=lambda error: (error.errno, error.strerror),
            error=lambda rank, told: OSError(told[0], f"on rank {rank}: {told[1]}"),
        )

    found, _ = on_threads(target)
    assert {(error.errno, error.strerror) for error in found} == {(28, "on rank 1: no space")}
