"""Moments in 8-bit blocks in files: the bits of those in host memory, and a quarter of the bytes."""

import copy
from pathlib import Path

import pytest
import torch
from moments_runs import IN_8_BITS, gpt, prepared, refuse_difference, whole_states
from saved_engines import save_engine
from shared_ranks import on_ranks
from torch import nn
from training import adamw_in_two_groups, steps

from hf_zero.engine import holders
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.state_io import load_engine
from hf_zero.layout.slots import blocks, has_blocks, is_in_blocks
from hf_zero.offload.files import aligned

pytestmark = pytest.mark.timeout(180)

HOST = {"optimizer": "cpu"}


def files(path: object, **more) -> dict:
    return {"optimizer": "nvme", "nvme_path": str(path)} | more


def on(offload: dict, stage: int = 2, **more) -> dict:
    return {**IN_8_BITS, "stage": stage, "bucket_bytes": "100KiB", "offload": offload, **more}


def trained(settings: dict, count: int = 4) -> tuple[list[float], dict, dict, ZeroEngine]:
    model, optimizer, engine = prepared(settings)
    losses = steps(model, optimizer, range(count))
    states = whole_states(engine, model)
    with engine.gathered():
        weights = {name: {"": p.detach().float().clone()} for name, p in model.named_parameters()}
    return losses, weights, states, engine


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@on_ranks(time_limit_s=120)
def test_the_digits_are_those_of_moments_in_host_memory(rank, world_size, tmp_path):
    """At each stage, with masters in the files and without, in their time and early, the same digits."""
    path = str(tmp_path)
    early = {"speculate_bytes": "1GiB"}
    cases = (
        (0, {}, {}),
        (1, {"param_dtype": "bfloat16"}, early),
        (2, {}, early),
        (3, {}, {"params": "nvme"}),
        (3, {"param_dtype": "bfloat16"}, {"params": "nvme"} | early),
    )
    for stage, digits, more in cases:
        host = {**HOST, "params": "cpu"} if "params" in more else HOST
        there = trained(on(host, stage, **digits))
        here = trained(on(files(path, **more), stage, **digits))
        assert here[0] == there[0], (stage, digits, more)
        for one, other in zip(here[1:3], there[1:3]):
            refuse_difference(one, other)
        report = here[3].memory_report().early
        assert "speculate_bytes" not in more or report.kept == 3 * report.buckets > 0
        here[3].close()


def small_numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if not is_in_blocks(p.numel()))


def test_files_hold_and_move_two_bytes_an_element(tmp_path):
    model, optimizer, engine = prepared(on(files(tmp_path)))
    steps(model, optimizer, range(2))
    layouts = [bucket.layout for bucket in engine.buckets]
    moments = (
        aligned(layout.shard_numel) + aligned(4 * blocks(layout.shard_numel))
        if has_blocks(layout)
        else aligned(4 * layout.shard_numel)
        for layout in layouts
    )
    held = 2 * sum(moments)
    report = engine.memory_report()
    assert sum(path.stat().st_size for path in engine.tier.files.folder.path.glob("*.state")) == held
    assert report.traffic.held_bytes == report.traffic.written_bytes_a_step == report.traffic.read_bytes_a_step == held
    numel = sum(p.numel() for p in model.parameters())
    rows = {row.kind: row for row in report.rows}
    assert rows["optimizer state"].where == "NVMe"
    assert rows["optimizer state"].bytes <= 2.04 * sum(layout.numel for layout in layouts) + 8 * small_numel(model)
    assert rows["optimizer state"].ddp_bytes == 8 * numel
    # A bucket's moments in 32 bits, beside the window of files.
    most = 8 * max(layout.shard_numel for layout in layouts)
    assert most < report.traffic.window_bytes < 2 * most
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].untyped_storage().nbytes() == 4 or not is_in_blocks(state[name].numel())


def test_the_forecast_of_the_disk_is_a_quarter_too(monkeypatch, tmp_path):
    numel = sum(p.numel() for p in gpt().parameters())
    monkeypatch.setattr(holders, "free_disk_bytes", lambda _: int(2.2 * numel))
    prepared(on(files(tmp_path)))
    with pytest.raises(OSError, match="too little"):
        prepared(on(files(tmp_path), moments="32bit"))


def test_a_checkpoint_goes_on_from_files_and_into_them(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    model, optimizer, engine = prepared(on(files(disk)))
    steps(model, optimizer, range(3))
    save_engine(engine, tmp_path)
    states = whole_states(engine, model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    own = copy.deepcopy(optimizer.state_dict())
    assert all(value.isfinite().all() for each in own["state"].values() for value in each.values())
    expected = steps(model, optimizer, range(3, 5))
    end = whole_states(engine, model)
    for offload in (files(disk), files(disk, speculate_bytes="1GiB"), HOST, {"optimizer": "none"}):
        model, optimizer, engine = prepared(on(offload))
        model.load_state_dict(weights)
        load_engine(engine, tmp_path / "zero")
        refuse_difference(whole_states(engine, model), states)
        assert steps(model, optimizer, range(3, 5)) == expected
        refuse_difference(whole_states(engine, model), end)
    model, optimizer, engine = prepared(on(files(disk)))
    model.load_state_dict(weights)
    optimizer.load_state_dict(own)
    refuse_difference(whole_states(engine, model), states)
    assert steps(model, optimizer, range(3, 5)) == expected


def test_state_from_before_and_after_the_engine_is_the_optimizers(tmp_path):
    runs = []
    for offload in (HOST, files(tmp_path)):
        torch.manual_seed(0)
        model = gpt()
        optimizer = adamw_in_two_groups(model)
        steps(model, optimizer, range(2))
        engine = ZeroEngine(model, [optimizer], on(offload))
        runs.append((steps(model, optimizer, range(2, 4)), whole_states(engine, model)))
        engine.close()
    assert runs[0][0] == runs[1][0]
    refuse_difference(runs[0][1], runs[1][1])
    assert not list(Path(tmp_path).glob("hf_zero-run-*"))
