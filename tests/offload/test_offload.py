"""State in host memory: the same trajectory as without offload, and no surprise when it does not fit."""

import re
import time
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
from cells import slow
from hypothesis import given
from hypothesis import strategies as st
from offload_cells import HOST_OF_TWO_RANKS, assert_equal, clipped_at, in_pairs, matrix, one_step, settings_of
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Outcome, adamw_in_two_groups, gpt2, gpt2_batch

from hf_zero.buckets.bucket import Bucket, Row
from hf_zero.comm.watch import LABEL, SITE, STARTED, STEP
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import announce, state_plan
from hf_zero.offload import host_memory
from hf_zero.offload.host_memory import HostCores, available_host_bytes, host_memory_fault
from hf_zero.offload.shards import Placement
from hf_zero.offload.tiers import HostTier
from hf_zero.optimizer.holder import BucketStep
from hf_zero.optimizer.state_kinds import state_kinds

pytestmark = pytest.mark.timeout(180)

CPU = {"offload": {"optimizer": "cpu"}}


@pytest.mark.parametrize(("world_size", "cells"), matrix(HOST_OF_TWO_RANKS))
def test_host_memory_is_bitwise_at_every_stage_and_optimizer(world_size, cells):
    arguments = {"cells": cells, "offload": CPU}
    for found in run_ranks(in_pairs, world_size=world_size, time_limit_s=170, keyword_arguments=arguments):
        assert len(found) == len(cells)
        assert_equal(found)


@pytest.mark.short_cells("bf16-2")
@pytest.mark.parametrize(
    ("world_size", "stages"), [(2, (2,)), slow(2, (1, 3)), slow(1, (1, 2, 3))], ids=["2", "2-others", "1"]
)
@pytest.mark.parametrize("more", [{"grad_accumulation": "local"}, {"param_dtype": "bfloat16"}], ids=["local", "bf16"])
def test_host_memory_is_bitwise_with_local_accumulation_and_bf16(more, world_size, stages):
    arguments = {"cells": clipped_at(*stages), "offload": CPU, **more}
    for found in run_ranks(in_pairs, world_size=world_size, time_limit_s=80, keyword_arguments=arguments):
        assert_equal(found)


def in_turn(rank: int, world_size: int, cases: list[dict]) -> list[tuple[str, int, Outcome, Outcome]]:
    return [found for case in cases for found in in_pairs(rank, world_size, **case)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [slow(1), 2, slow(3)])
def test_a_part_in_host_memory_or_in_files_is_bitwise_too(world_size, tmp_path):
    host = {"offload": {"optimizer": "cpu", "ratio": 0.4}}
    files = {"offload": {"optimizer": "nvme", "nvme_path": str(tmp_path), "ratio": 0.4}}
    stages = {1: (0, 2, 3), 2: (1, 3), 3: (2, 3)}[world_size]
    cases = [{"cells": clipped_at(*stages), "offload": offload} for offload in (host, files)]
    cases.append({"cells": clipped_at(stages[-1]), "offload": host, "param_dtype": "bfloat16"})
    for found in run_ranks(in_turn, world_size=world_size, time_limit_s=120, keyword_arguments={"cases": cases}):
        assert len(found) == 2 * len(stages) + 1
        assert_equal(found)


@given(
    numels=st.lists(st.integers(1, 10**9), min_size=1, max_size=20),
    ratio=st.floats(0.01, 1.0) | st.sampled_from([0.1, 0.3, 0.7, 1.0]),
)
def test_the_fewest_first_buckets_that_hold_the_ratio_move(numels, ratio):
    tier = HostTier(torch.device("cpu"), HostCores(1))
    placement = Placement(tier, torch.device("cpu"), ratio=ratio, trained_numel=sum(numels))
    moves = [placement.next_tier(numel) is tier for numel in numels]
    count = sum(moves)
    assert moves == [True] * count + [False] * (len(numels) - count)
    assert sum(numels[:count]) >= ratio * sum(numels) - 1
    assert count == 0 or sum(numels[: count - 1]) < ratio * sum(numels)
    assert ratio < 1 or count == len(numels)


def built(offload: dict, stage: int = 2, make_optimizer=adamw_in_two_groups, **more):
    torch.manual_seed(0)
    model = gpt2()
    optimizer = make_optimizer(model)
    return model, optimizer, ZeroEngine(model, [optimizer], settings_of(stage, offload, **more))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rows_are_masters_in_memory_of_their_own(stage):
    model, optimizer, engine = built(CPU, stage)
    one_step(model, optimizer)
    for bucket in engine.buckets:
        assert bucket.master.untyped_storage().data_ptr() != bucket.own.untyped_storage().data_ptr()
        assert torch.equal(bucket.master, bucket.own)
    rows = {row.kind: row for row in engine.memory_report().rows}
    assert rows["fp32 master"].where == rows["optimizer state"].where == "host memory"
    assert rows["fp32 master"].bytes == sum(bucket.own.nbytes for bucket in engine.buckets)
    assert state_plan(engine).total == pytest.approx(engine.memory_report().total_bytes, rel=0.2)
    assert {row.kind for row in engine.state.rows()} == {"exp_avg", "exp_avg_sq"}


def test_the_plan_says_what_is_held_where(capsys):
    _, _, engine = built(CPU)
    announce(engine, "nobody")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "offload" in said
    assert "in host memory" in said


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_the_report_and_the_plan_tell_the_part_that_stays(tier, stage, tmp_path, capsys):
    more = {"nvme_path": str(tmp_path)} if tier == "nvme" else {}
    model, optimizer, engine = built({"offload": {"optimizer": tier, "ratio": 0.5, **more}}, stage)
    one_step(model, optimizer)
    state = {bucket.tier.name: 0 for bucket in engine.buckets}
    for bucket in engine.buckets:
        state[bucket.tier.name] += 2 * 4 * sum(row.tensor.numel() for row in bucket.rows)
    assert list(state) == [engine.tier.name, "device"]
    rows = engine.memory_report().rows
    assert {row.where: row.bytes for row in rows if row.kind == "optimizer state"} == state
    assert 0.5 <= state[engine.tier.name] / sum(state.values()) < 1
    announce(engine, "nobody")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert re.search(r"\d+% of the state stays on the training device", said)


def test_an_edit_of_a_parameter_reaches_the_master():
    model, optimizer, engine = built(CPU)
    one_step(model, optimizer)
    with engine.gathered(writeback=True):
        model.transformer.wte.weight.data.fill_(0.25)
    slots = {slot.name: slot for bucket in engine.buckets for slot in bucket.slots}
    bucket = slots["transformer.wte.weight"].bucket
    row = next(row for row in bucket.rows if row.slot.name == "transformer.wte.weight")
    assert torch.equal(row.of(bucket.master), torch.full_like(row.tensor, 0.25))


def test_too_little_host_memory_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    with pytest.raises(MemoryError, match=r"needs 0\.00 GiB of host memory for each of 1 ranks.*`none`"):
        built(CPU)


def test_the_budget_is_for_all_ranks_of_a_host():
    assert host_memory_fault(10, 40, 4, "offload.params: cpu") is None
    assert "for each of 5 ranks" in host_memory_fault(10, 40, 5, "offload.params: cpu")


def write_group(folder, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_a_cgroup_limit_bounds_the_budget(tmp_path):
    membership = tmp_path / "cgroup"
    write_group(tmp_path / "v2", memory__max=5000, memory__current=1000)
    write_group(tmp_path / "v2" / "job" / "task", memory__max="max", memory__current=1000)
    membership.write_text("0::/job/task\n")
    assert available_host_bytes(tmp_path / "v2", membership) == 4000
    write_group(tmp_path / "v1" / "memory" / "job", memory__limit_in_bytes=900, memory__usage_in_bytes=1000)
    membership.write_text("4:memory,cpu:/job\n1:pids:/\n")
    assert available_host_bytes(tmp_path / "v1", membership) == 0
    assert available_host_bytes(tmp_path / "none", membership) > 2**20


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (partial(torch.optim.AdamW, fused=True), ["exp_avg", "exp_avg_sq"]),
        (partial(torch.optim.Adam, amsgrad=True), ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        (partial(torch.optim.SGD, lr=0.1), []),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), ["momentum_buffer"]),
    ],
)
def test_state_is_known_by_a_trial_that_leaves_the_optimizer_alone(make, expected):
    optimizer = make([nn.Parameter(torch.zeros(3))])
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    kinds = state_kinds(optimizer, optimizer.param_groups[0], torch.float32)
    assert [name for name, _ in kinds] == expected
    assert not optimizer.state
    assert not calls


def clamp_rows(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for row in group["params"]:
            row.data.clamp_(-0.05, 0.05)


class Clamping(torch.optim.AdamW):
    """Writes to all rows behind its step."""

    def step(self, closure=None):
        super().step(closure)
        clamp_rows(self)


@dataclass(frozen=True, kw_only=True)
class Sends:
    """What some steps have done.

    Attributes:
        steps, gathers: of the last step's buckets, in order: the number, and when it had been stepped or its gather was started.
        buckets: their numbers, in forward's order.
    """

    losses: list[float]
    steps: list[tuple[int, float]]
    gathers: list[tuple[int, float]]
    buckets: list[int]


def sends(rank: int, world_size: int, settings: dict | None, writes: str) -> Sends:
    """Trains under settings, or with DDP; `writes`: who writes to rows around the optimizer's own step."""
    torch.manual_seed(0)
    model, steps, losses, generator = gpt2(), [], [], torch.Generator().manual_seed(rank)
    optimizer = (Clamping if writes == "class" else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    if writes == "hook behind":
        optimizer.register_step_post_hook(clamp_rows)
    engine = None if settings is None else ZeroEngine(model, [optimizer], {"bucket_bytes": "20KiB", **settings})
    entry, own_step = DistributedDataParallel(model) if engine is None else model, BucketStep.step

    def step(own: BucketStep, bucket: Bucket, rows: list[Row]) -> None:
        own_step(own, bucket, rows)
        steps.append((bucket.layout.index, time.monotonic()))

    with mock.patch.object(BucketStep, "step", step):
        for _ in range(3):
            steps.clear()
            loss = entry(**gpt2_batch(generator, 2)).loss
            loss.backward()
            losses.append(loss.item())
            hook = optimizer.register_step_pre_hook(clamp_rows) if writes == "hook ahead" else None
            optimizer.step()
            optimizer.zero_grad()
            if hook is not None:
                hook.remove()
    if engine is None:
        return Sends(losses=losses, steps=[], gathers=[], buckets=[])
    ended = [each for each in engine.transport.watch.log.entries if (each[STEP], each[SITE]) == (2, "optimizer step")]
    gathers = [(each[LABEL].channel, each[STARTED]) for each in ended if each[LABEL].kind == "all-gather parameters"]
    of_ranks = engine.transport.exchange([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, of_ranks[0], of_ranks[1]))
    assert all(torch.equal(bucket.own, bucket.master) for bucket in engine.buckets)
    buckets = [bucket.layout.index for bucket in reversed(engine.buckets)]
    engine.close()
    return Sends(losses=losses, steps=steps, gathers=gathers, buckets=buckets)


def both_ways(rank: int, world_size: int, settings: dict, writes: str) -> tuple[Sends, Sends]:
    return sends(rank, world_size, None, writes), sends(rank, world_size, settings, writes)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bucket_is_sent_while_others_are_stepped(stage):
    arguments = {"settings": {"stage": stage, **CPU}, "writes": ""}
    for plain, found in run_ranks(both_ways, world_size=2, time_limit_s=100, keyword_arguments=arguments):
        assert [index for index, _ in found.steps] == [index for index, _ in found.gathers] == found.buckets
        assert all(sent < stepped for (_, sent), (_, stepped) in zip(found.gathers, found.steps[1:]))
        assert found.losses == plain.losses


@pytest.mark.parametrize("writes", ["class", "hook behind", "hook ahead"])
def test_a_bucket_that_may_be_written_behind_its_step_is_sent_behind_the_whole_step(writes):
    arguments = {"settings": {"stage": 2, **CPU}, "writes": writes}
    for plain, found in run_ranks(both_ways, world_size=2, time_limit_s=100, keyword_arguments=arguments):
        assert [index for index, _ in found.gathers] == found.buckets
        assert not found.steps
        assert found.losses == plain.losses
