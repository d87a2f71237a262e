"""Steps of state in files that are taken while backward goes on: the bits of steps in their time, and what a fault leaves."""

import errno
import tempfile
import threading

import pytest
import torch
from cells import examples, slow
from early_courses import EARLY, IN_TIME, OPTIMIZERS, STEPS, WIDTH, built, course, one_step, random_courses, same
from hypothesis import given
from hypothesis import strategies as st
from offload_cells import assert_equal, in_pairs
from ranks import run_ranks
from torch import nn

from hf_zero.config import OffloadConfig, ZeroConfig
from hf_zero.engine import holders
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import announce
from hf_zero.layout import slots
from hf_zero.offload.files import ALIGNMENT, OffloadError, aligned

pytestmark = pytest.mark.timeout(180)


def in_time(path: object) -> dict:
    return {"optimizer": "nvme", "nvme_path": str(path)}


def early(path: object, **more) -> dict:
    return in_time(path) | {"speculate_bytes": EARLY["speculate_bytes"]} | more


def state_of(engine: ZeroEngine) -> dict[tuple[str, str], torch.Tensor]:
    return {(row.kind, row.name): row.tensor.clone() for row in engine.state.rows()}


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def backward(model: nn.Module) -> None:
    model(torch.ones(4, WIDTH)).square().sum().backward()


PLACES = ({}, {"params": "nvme"}, {"optimizer": "cpu", "params": "nvme"}, {"ratio": 0.5})


@examples(20)
@given(name=st.sampled_from(sorted(OPTIMIZERS)), stage=st.integers(0, 3), place=st.sampled_from(PLACES), plan=STEPS)
def test_whatever_comes_between_backward_and_step_the_bits_are_the_same(name, stage, place, plan):
    stage = 3 if "params" in place else stage
    with tempfile.TemporaryDirectory() as path:
        # Parameters in files come in other buckets, and so in another order; rows that are whole parameters add gradients in
        # another order, too.
        expected, other = course(0, (in_time(path) if "params" in place else IN_TIME) | place, name, stage, plan)
        found, engine = course(0, early(path) | place, name, stage, plan)
        assert same(found, expected)
        report = engine.memory_report().early
        assert report.buckets == report.all_buckets or "ratio" in place
        if all(between == "clip" for between, _, _ in plan):
            assert report.kept == 0
        if all((between, end, backwards) == ("nothing", "step", "one") for between, end, backwards in plan):
            assert report.forgotten == 0
        engine.close()
        other.close()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_forget_and_keep_together_bit_for_bit(world_size, tmp_path):
    arguments = {"count": 2 if world_size == 2 else 3, "early": early(tmp_path)}
    for found in run_ranks(random_courses, world_size=world_size, time_limit_s=150, keyword_arguments=arguments):
        for what, is_same, kept, forgotten in found:
            assert is_same, what
            assert kept > 0 < forgotten, what


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_no_offload_has_the_same_trajectory_bit_for_bit(world_size, tmp_path):
    stages = (0, 2, 3) if world_size == 1 else (1, 2, 3)
    cells = [(name, stage) for name in ("plain", "clip and accumulation") for stage in stages]
    arguments = {"cells": cells, "offload": {"offload": early(tmp_path)}}
    for found in run_ranks(in_pairs, world_size=world_size, time_limit_s=120, keyword_arguments=arguments):
        assert len(found) == len(cells)
        assert_equal(found)


def test_a_bucket_is_read_stepped_and_written_while_backward_goes_on_and_nothing_has_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(slots, "GRAD_BUFFERS", 1)
    model, optimizer, engine = built(early(tmp_path), OPTIMIZERS["adamw"])
    one_step(model, optimizer)
    weights, state = weights_of(model), state_of(engine)
    written, waited = threading.Event(), []
    shard = engine.tier.files.shards[0]
    stock = shard.write_aside
    monkeypatch.setattr(shard, "write_aside", lambda buffer: (stock(buffer), written.set()))
    model[0][0].weight.register_hook(lambda _: waited.append(written.wait(20)))
    backward(model)
    assert waited == [True], "no bucket was written before the first layer's gradient"
    assert same(weights_of(model), weights), "a forward would read a step that nobody asked for"
    assert same(list(state_of(engine).values()), list(state.values())), "a save would have a step that nobody asked for"
    optimizer.step()
    assert not same(weights_of(model), weights)
    assert engine.memory_report().early.kept == 2 * len(engine.buckets)


def test_a_backward_that_fails_leaves_what_it_found(tmp_path):
    runs = []
    for offload in (in_time(tmp_path), early(tmp_path)):
        model, optimizer, engine = built(offload, OPTIMIZERS["adamw"])
        one_step(model, optimizer)
        weights, state = weights_of(model), state_of(engine)

        def fail(_):
            raise ArithmeticError("the script's own hook")

        handle = model[0][0].weight.register_hook(fail)
        with pytest.raises(ArithmeticError, match="the script's own hook"):
            backward(model)
        handle.remove()
        assert same(weights_of(model), weights)
        assert same(list(state_of(engine).values()), list(state.values()))
        optimizer.zero_grad()
        one_step(model, optimizer)
        runs.append([*weights_of(model), *state_of(engine).values()])
        engine.close()
    assert same(*runs)


def with_a_disk_that_fails_behind_one_rank(rank: int, world_size: int, path: str) -> tuple[list[str], bool]:
    model, optimizer, engine = built(early(path), OPTIMIZERS["adamw"])
    one_step(model, optimizer)
    weights, state = weights_of(model), state_of(engine)
    if rank == 1:

        def fail(_):
            raise OffloadError(errno.EIO, "hf_zero: the disk of one rank is broken")

        engine.tier.files.shards[1].write_aside = fail
    backward(model)
    is_whole = same(weights_of(model), weights) and same(list(state_of(engine).values()), list(state.values()))
    said = []
    for _ in range(2):
        with pytest.raises(OffloadError) as caught:
            optimizer.step()
        said.append(str(caught.value))
    engine.close()
    return said, is_whole


def test_a_disk_that_fails_during_backward_ends_the_step_on_all_ranks_with_its_reason(tmp_path):
    found = run_ranks(
        with_a_disk_that_fails_behind_one_rank,
        world_size=2,
        time_limit_s=60,
        keyword_arguments={"path": str(tmp_path)},
    )
    assert all(is_whole for _, is_whole in found)
    (here, later_here), (there, later_there) = (said for said, _ in found)
    assert "on rank 1: hf_zero: the disk of one rank is broken" in here
    assert "hf_zero: the disk of one rank is broken" in there
    assert "an earlier step of this run failed" in later_here
    assert "an earlier step of this run failed" in later_there


def test_second_sides_are_made_as_far_as_asked_and_reported(tmp_path, capsys):
    model, optimizer, engine = built(in_time(tmp_path) | {"speculate_bytes": "40KiB"}, OPTIMIZERS["adamw"])
    for _ in range(4):
        one_step(model, optimizer)
    report = engine.memory_report()
    assert 0 < report.early.buckets < report.early.all_buckets == len(engine.buckets)
    assert report.early.kept == report.early.buckets * 3, "the first step is watched"
    one = sum(3 * aligned(4 * bucket.layout.shard_numel) for bucket in engine.buckets)
    copies = {row.kind: row for row in report.rows}["copies of the state"]
    assert 0 < copies.bytes <= 40 * 2**10
    assert copies.where == "NVMe"
    assert report.traffic.held_bytes == one + copies.bytes
    assert sum(path.stat().st_size for path in engine.tier.files.folder.path.glob("*.state")) == one + copies.bytes
    # What was stepped early is read once more: masters, for their parameters.
    assert report.traffic.written_bytes_a_step == one
    assert one < report.traffic.read_bytes_a_step <= 4 * one // 3 + ALIGNMENT * len(engine.buckets)
    announce(engine, "nobody")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "are stepped during backward, on copies in files" in said


def test_a_disk_without_room_for_second_sides_is_refused_before_the_first_step(monkeypatch, tmp_path):
    needed = 3 * 4 * sum(p.numel() for p in built({}, OPTIMIZERS["adamw"])[0].parameters())
    monkeypatch.setattr(holders, "free_disk_bytes", lambda _: needed + ALIGNMENT)
    built(in_time(tmp_path), OPTIMIZERS["adamw"])
    with pytest.raises(OSError, match=rf"\({needed - ALIGNMENT} bytes\) too little"):
        built(early(tmp_path), OPTIMIZERS["adamw"])


def test_beside_an_accelerator_half_of_the_free_disk_is_for_second_sides(monkeypatch, tmp_path):
    monkeypatch.setattr(holders, "free_disk_bytes", lambda path: 1000 if path == tmp_path else 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = ZeroConfig(offload=OffloadConfig(**in_time(tmp_path))).offload
    needed = holders.Elsewhere(host=0, disk=100)
    assert holders.speculate_bytes(config, torch.device("cuda"), needed) == (1000 // 2 - 100) // 2
    assert holders.speculate_bytes(config, torch.device("cpu"), needed) == 0
