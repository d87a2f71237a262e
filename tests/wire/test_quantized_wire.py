"""Gradients and weights that travel in blocks: what arrives, what stays exact, what is carried on."""

import hashlib
import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import short_of, slow
from hostile_folders import list_rows, resign, with_header
from ranks import run_ranks
from shared_ranks import on_ranks
from torch import nn
from training import Job, train
from wire_runs import go_on, resume, save, setting, start

from hf_zero.checkpoint.manifest import row_file
from hf_zero.checkpoint.verify import checkpoint_faults
from hf_zero.comm.collective import CollectiveTransport
from hf_zero.comm.groups import Groups
from hf_zero.comm.point_to_point import PointToPointTransport
from hf_zero.comm.waits import Label
from hf_zero.config import CommConfig, ConfigError, ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import state_plan
from hf_zero.integrations.state_io import ZERO_FOLDER
from hf_zero.step.nonfinite import NonFiniteGradientError
from hf_zero.wire.block_collectives import all_gather_blocks, reduce_scatter_blocks
from hf_zero.wire.quantize import BlockFormat, round_to_blocks

pytestmark = pytest.mark.timeout(180)

BOTH = {"gradients": "int8", "weights": "int8"}
LABEL = Label(kind="reduce-scatter of gradients", subject="bucket 0")


def rounded(values: torch.Tensor, format: BlockFormat) -> torch.Tensor:
    out = torch.empty_like(values)
    round_to_blocks(values, out, format)
    return out


def of_rank(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 3.0**rank


@pytest.mark.parametrize("world_size", short_of([2, 3, 4], [3]))
@on_ranks()
def test_sums_and_gathers_are_those_of_what_went_through_blocks(rank, world_size):
    groups = Groups.create(stage=2, device_type="cpu", comm=CommConfig())
    for transport, format, dtype in itertools.product(
        (PointToPointTransport(groups, 30), CollectiveTransport(groups)),
        (BlockFormat(), BlockFormat(block_numel=64)),
        (torch.float32, torch.bfloat16),
    ):
        numel = 768 * world_size
        parts = [rounded(of_rank(r, numel).to(dtype), format).float() for r in range(world_size)]
        if dtype == torch.float32:
            expected = sum(parts[1:], parts[0]).chunk(world_size)[rank]
            for out in (torch.empty(768), None):
                flat = of_rank(rank, numel)
                out = flat.chunk(world_size)[rank] if out is None else out
                residual = torch.zeros(numel)
                reduce_scatter_blocks(transport, format, flat, out, residual, groups.shard, LABEL).finish()
                assert torch.equal(out, expected)
                assert torch.allclose(residual, of_rank(rank, numel) - parts[rank], atol=1e-6 * 3.0**rank)
        for in_place in (True, False):
            gathered = torch.zeros(numel, dtype=dtype)
            own = gathered.chunk(world_size)[rank] if in_place else torch.empty(768, dtype=dtype)
            own.copy_(of_rank(rank, 768))
            all_gather_blocks(transport, format, gathered, own, groups.shard, LABEL).finish()
            everyone = [rounded(of_rank(r, 768).to(dtype), format) for r in range(world_size)]
            assert torch.equal(gathered, torch.cat(everyone))
        rows = transport.ledger.rows()
        assert sum(row.bytes_sent for row in rows) > 0


def weights_in_forward(model: nn.Module, digests: list[str]) -> None:
    """Hashes every weight as a forward reads it."""

    def look(module: nn.Module, _args: tuple) -> None:
        values = (parameter.detach().contiguous().numpy() for parameter in module.parameters(recurse=False))
        digests.extend(hashlib.sha256(value.tobytes()).hexdigest() for value in values)

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(look)


def watched(rank: int, world_size: int, jobs: list[Job]) -> list[tuple[list[str], list[float], dict[str, np.ndarray]]]:
    outcomes = []
    for job in jobs:
        digests: list[str] = []
        outcome = train(
            rank, world_size, replace(job, prepare=lambda model, seen=digests: weights_in_forward(model, seen))
        )
        outcomes.append((digests, outcome.losses, outcome.tensors))
    return outcomes


# Each way to accumulate once; the others in the long run.
SOME = [
    setting(2, {"gradients": "int8"}),
    setting(3, BOTH, grad_accumulation="local"),
]
OTHERS = [
    setting(1, BOTH),
    setting(2, BOTH),
    setting(3, BOTH),
    setting(2, BOTH, grad_accumulation="local"),
]


@pytest.mark.parametrize(
    ("world_size", "variants"),
    [(2, SOME), slow(2, OTHERS), slow(3, SOME + OTHERS), slow(4, SOME + OTHERS)],
    ids=["2", "2-others", "3", "4"],
)
def test_all_ranks_compute_with_the_same_weights_at_every_step(world_size, variants):
    exact = Job(steps=3, accumulation=2, settings=setting(2, {}, grad_accumulation="local"))
    arguments = {"jobs": [exact, *(replace(exact, settings=settings) for settings in variants)]}
    by_rank = run_ranks(watched, world_size=world_size, time_limit_s=150, keyword_arguments=arguments)
    for index, settings in enumerate([{}, *variants]):
        digests = [outcomes[index][0] for outcomes in by_rank]
        assert len(digests[0]) > 100 and all(other == digests[0] for other in digests[1:]), settings
    for outcomes in by_rank:
        for settings, (_, losses, _) in zip(variants, outcomes[1:]):
            # Without learning the losses of these batches differ by 1 %.
            assert losses == pytest.approx(outcomes[0][1], rel=3e-3), settings


class Slope(nn.Module):
    """A loss whose gradient is 1, up and down by turns, in the first element and 0.003 in all others."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256))

    def forward(self, sign: float) -> torch.Tensor:
        return sign * self.weight[0] + 0.003 * self.weight[1:].sum()


STEPS_DOWN = 40


def went_down(rank: int, world_size: int) -> float:
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ZeroEngine(model, [optimizer], {"stage": 2, "comm": {"gradients": "int8"}})
    for step in range(STEPS_DOWN):
        model(1.0 if step % 2 else -1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight[1:].mean().item()


def test_what_is_small_in_its_block_is_learned_by_error_feedback():
    """40 steps of 0.1 on a slope of 0.003 go down by 0.012. In a block with a 1, 8 bits have no 0.003."""
    for depth in run_ranks(went_down, world_size=2, time_limit_s=60):
        assert depth == pytest.approx(-0.0003 * STEPS_DOWN, abs=0.0008)


@on_ranks(2)
def test_a_gradient_that_is_not_finite_is_seen_by_all_ranks(rank, world_size):
    for strange in (math.nan, math.inf):
        model = Slope()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ZeroEngine(model, [optimizer], {"stage": 2, "comm": {"gradients": "int8"}})
        before = model.weight.detach().clone()
        model(strange if rank == 1 else 1.0).backward()
        with pytest.raises(NonFiniteGradientError, match="weight"):
            optimizer.step()
        assert torch.equal(model.weight, before)
        optimizer.zero_grad()
        model(1.0).backward()
        optimizer.step()
        # No residual has kept anything of it.
        assert model.weight[0].item() == pytest.approx(-0.1, rel=1e-3)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@on_ranks(2)
def test_what_is_read_saved_and_edited_is_exact(rank, world_size):
    for stage, dtype in itertools.product((1, 2, 3), (torch.float32, torch.bfloat16)):
        model, _, engine, _ = start(setting(stage, BOTH), dtype=dtype)
        masters = {
            row.slot.name: (row.layout.in_parameter, row.of(row.slot.bucket.master))
            for row in engine._parts.row_of.values()
        }
        # At stage 3 nothing shows values outside of a gather.
        shown = values_of(model) if stage < 3 else {}
        with engine.gathered():
            exact = values_of(model)
        for name, (interval, master) in masters.items():
            # What can be read, saved and edited is the master, and what is trained on is not.
            assert torch.equal(exact[name].reshape(-1)[interval.start : interval.stop], master.reshape(-1).to(dtype)), (
                name
            )
        saved = engine.whole_state_dict(wanted=True)
        assert all(torch.equal(saved[name], exact[name]) for name in exact)
        for own in engine.state.own_weights():
            name = next(n for n, p in model.named_parameters() if p is own.parameter)
            assert torch.equal(exact[name].reshape(-1)[own.interval.start : own.interval.stop], own.values)
        if stage < 3:
            again = values_of(model)
            assert all(torch.equal(shown[name], again[name]) for name in shown)
            if dtype == torch.float32:
                assert any(not torch.equal(shown[name], exact[name]) for name in shown)
        before = {name: master.clone() for name, (_, master) in masters.items()}
        with engine.gathered(model.transformer.wpe, writeback=True), torch.no_grad():
            model.transformer.wpe.weight[0] = 7.0
        with engine.gathered(model.transformer.wpe):
            assert bool((model.transformer.wpe.weight[0] == 7.0).all())
        untouched = [name for name in masters if name != "transformer.wpe.weight"]
        assert all(torch.equal(before[name], masters[name][1]) for name in untouched)
        engine.close()
        whole = values_of(model)
        assert all(torch.equal(whole[name], exact[name]) for name in exact if name != "transformer.wpe.weight")


def clamped(rank: int, world_size: int) -> list[float]:
    """How far a weight gets in 20 steps each far smaller than a block's step, if a script clamps it after each."""
    depths = []
    for settings in (setting(2, {"weights": "int8"}), setting(3, {"weights": "int8"})):
        model = Slope()
        model.weight.data[1] = 1.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        engine = ZeroEngine(model, [optimizer], settings)
        for _ in range(20):
            model(0.0).backward()
            optimizer.step()
            optimizer.zero_grad()
            if settings["stage"] == 2:
                with torch.no_grad():
                    model.weight.clamp_(-10, 10)
        with engine.gathered():
            depths.append(model.weight[2:].mean().item())
    return depths


def test_weights_move_by_less_than_a_step_of_their_block():
    for depths in run_ranks(clamped, world_size=2, time_limit_s=60):
        assert depths == pytest.approx([-6e-5, -6e-5], rel=1e-3)


def saves_and_resumes(rank: int, world_size: int, root: str, cells: list[tuple[int, dict]]) -> None:
    for stage, comm in cells:
        settings = setting(stage, comm)
        folder = Path(root) / f"stage{stage}"
        model, optimizer, engine, _ = start(settings)
        save(engine, model, folder)
        expected = go_on(model, optimizer, range(3, 5))
        model, optimizer, engine = resume(settings, folder)
        assert go_on(model, optimizer, range(3, 5)) == expected, stage
        # Others read it too, at another stage and without blocks.
        model, optimizer, engine = resume(setting(3 if stage == 1 else 1, {}), folder)
        assert go_on(model, optimizer, range(3, 5)) == pytest.approx(expected, rel=3e-3)
        assert engine.memory_report().total_bytes > 0 and not list(engine.state.residual_rows())


def residuals_of(rank: int, world_size: int, folder: str, again: str | None) -> dict[str, np.ndarray]:
    """Returns this rank's residuals after a resume; saves them to `again`."""
    model, _, engine = resume(setting(2, {"gradients": "int8"}), Path(folder))
    if again is not None:
        save(engine, model, Path(again))
    return {row.name: row.tensor.double().numpy() for row in engine.state.residual_rows()}


def saves_residuals(rank: int, world_size: int, folder: str) -> None:
    model, _, engine, _ = start(setting(2, {"gradients": "int8"}))
    save(engine, model, Path(folder))


def summed_residuals(world_size: int, folder: Path, again: Path | None = None) -> dict[str, np.ndarray]:
    arguments = {"folder": str(folder), "again": None if again is None else str(again)}
    by_rank = run_ranks(residuals_of, world_size=world_size, time_limit_s=60, keyword_arguments=arguments)
    names = dict.fromkeys(name for theirs in by_rank for name in theirs)
    return {name: sum(theirs[name] for theirs in by_rank if name in theirs) for name in names}


@pytest.mark.slow
def test_a_run_in_blocks_goes_on_bit_for_bit_at_other_stages_and_in_other_codes(tmp_path):
    arguments = {"root": str(tmp_path), "cells": [(1, BOTH), (3, BOTH)]}
    run_ranks(saves_and_resumes, world_size=2, time_limit_s=120, keyword_arguments=arguments)


@pytest.mark.slow
@on_ranks(2)
def test_a_run_goes_on_in_blocks_where_it_was_exact_and_the_other_way_round(rank, world_size, tmp_path):
    root = str(tmp_path)
    for stage, before, after in ((2, BOTH, {}), (3, {}, BOTH)):
        folder = Path(root) / str(stage)
        model, optimizer, engine, _ = start(setting(stage, before))
        save(engine, model, folder)
        expected = go_on(model, optimizer, range(3, 6))
        model, optimizer, engine = resume(setting(stage, after), folder)
        assert go_on(model, optimizer, range(3, 6)) == pytest.approx(expected, rel=3e-3)
        assert bool(list(engine.state.residual_rows())) == (after == BOTH)


def test_residuals_are_saved_and_their_sum_goes_on_at_a_larger_world_size(tmp_path):
    arguments = {"root": str(tmp_path), "cells": [(2, BOTH)]}
    run_ranks(saves_and_resumes, world_size=2, time_limit_s=120, keyword_arguments=arguments)
    saved = summed_residuals(2, tmp_path / "stage2")
    # Two ranks have saved residuals, so the third rank loads none. It saves before its first step, without a residual.
    resumed = summed_residuals(3, tmp_path / "stage2", again=tmp_path / "again")
    assert checkpoint_faults(tmp_path / "again", ZERO_FOLDER) == []
    for others in (resumed, summed_residuals(2, tmp_path / "again")):
        assert saved and saved.keys() == others.keys()
        assert any(values.any() for values in saved.values())
        assert all(np.array_equal(saved[name], others[name]) for name in saved)


def test_residuals_of_formats_with_a_kind_for_each_rank_go_on(tmp_path):
    run_ranks(saves_residuals, world_size=3, time_limit_s=60, keyword_arguments={"folder": str(tmp_path)})
    saved = [summed_residuals(2, tmp_path)]
    for number in range(3):
        path = tmp_path / ZERO_FOLDER / row_file(number, 3)

        def rename(header: dict, number: int = number) -> None:
            for key in [key for key in header if key.startswith("residual.*/")]:
                header[key.replace("*", str(number), 1)] = header.pop(key)

        with_header(path, rename)
    resign(tmp_path, list_rows)
    assert checkpoint_faults(tmp_path, ZERO_FOLDER) == []
    saved.append(summed_residuals(2, tmp_path))
    assert saved[0] and all(np.array_equal(values, saved[1][name]) for name, values in saved[0].items())


def test_residuals_of_several_ranks_add_up_on_one(tmp_path):
    run_ranks(saves_residuals, world_size=3, time_limit_s=60, keyword_arguments={"folder": str(tmp_path)})
    saved, resumed = (summed_residuals(world_size, tmp_path) for world_size in (3, 2))
    assert saved and saved.keys() == resumed.keys()
    for name, values in saved.items():
        # The sum of two is rounded to bfloat16.
        assert np.abs(values - resumed[name]).max() <= 2**-8 * np.abs(values).max(), name


def moved_away(rank: int, world_size: int, nvme: str) -> list[list[float]]:
    places = [{}, {"optimizer": "cpu"}, {"optimizer": "nvme", "nvme_path": nvme}]
    return [start(setting(stage, BOTH, offload=place), steps=3)[3] for stage in (1, 2, 3) for place in places]


@pytest.mark.slow
def test_offload_changes_no_loss(tmp_path):
    for losses in run_ranks(moved_away, world_size=2, time_limit_s=100, keyword_arguments={"nvme": str(tmp_path)}):
        for here, host, files in (
            itertools.batched(losses, 3) if hasattr(itertools, "batched") else zip(*[iter(losses)] * 3)
        ):
            assert here == host == files


def measured(rank: int, world_size: int) -> list[tuple[float | None, int, int, int]]:
    found = []
    for comm in ({}, {"gradients": "int8"}):
        _, _, engine, _ = start(setting(2, comm), steps=2)
        rows = {row.kind: row.bytes for row in engine.memory_report().rows}
        padded = sum(bucket.layout.numel for bucket in engine.buckets)
        found.append(
            (
                engine.comm_report().gradient_error,
                rows.get("gradient residuals", 0),
                state_plan(engine).residuals,
                padded,
            )
        )
    return found


def test_error_and_residuals_are_reported():
    for exact, eight in run_ranks(measured, world_size=2, time_limit_s=60):
        assert exact[:3] == (None, 0, 0)
        # A uniform error of half a step of 1 / 127 of a block's largest of 256, which is about 2.8 deviations.
        assert eight[0] == pytest.approx(2.8 / 127 / 12**0.5, rel=0.5)
        assert eight[1] == eight[2] == 2 * eight[3]


def test_what_cannot_be_quantized_is_refused():
    with pytest.raises(ConfigError, match=r"`comm.gradients: int8` needs stages 1 to 3"):
        ZeroConfig.of({"stage": 0, "comm": {"gradients": "int8"}})
    with pytest.raises(ConfigError, match=r"`comm.weights: int8` needs stages 1 to 3"):
        ZeroConfig.of("stage=0,comm.weights=int8")
    with pytest.raises(ConfigError, match=r"`comm.weights` is 'int4'; allowed: none, int8"):
        ZeroConfig.of("comm.weights=int4")
    with pytest.raises(ConfigError, match=r"`comm.gradients` is 'e4m3'; allowed: none, int8\."):
        ZeroConfig.of("comm.gradients=e4m3")
    with pytest.raises(
        ConfigError, match=r"`comm.weights: int8` rounds values of fp32 masters, but `rounding: stochastic`"
    ):
        ZeroConfig.of("stage=2,comm.weights=int8,param_dtype=bfloat16,rounding=stochastic")
    with pytest.raises(ConfigError, match=r"`comm.gradients: int8` cannot be combined with `comm.sync_every: 4`"):
        ZeroConfig.of("comm.gradients=int8,comm.sync_every=4")
    model = nn.Linear(4, 4).double()
    with pytest.raises(ConfigError, match=r"quantize float32 and 16-bit parameters, but 'weight' is torch.float64"):
        ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], "stage=2,comm.gradients=int8")
