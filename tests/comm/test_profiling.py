"""torch.profiler around training steps: it does not crash, and shows the engine's collectives by name."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate.utils import ProfileKwargs
from accelerate_job import make_accelerator
from cells import short_of
from ranks import run_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile
from trainer_job import as_launched

from hf_zero.config import ZeroConfig
from hf_zero.engine.engine import ZeroEngine

EVERYTHING = {"record_shapes": True, "with_stack": True, "profile_memory": True}


def profiled_steps(
    rank: int, world_size: int, settings: dict, options: dict, profiles: int = 3
) -> tuple[list[str], list[float], list[float]]:
    """Names in profiles that end right behind a step, and losses under profiles and without."""
    losses = {}
    for profiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ZeroEngine(model, [optimizer], ZeroConfig.from_dict(settings))
        generator = torch.Generator().manual_seed(rank)
        losses[profiled] = []
        for _ in range(profiles):
            made = profile(activities=[ProfilerActivity.CPU], **options) if profiled else nullcontext()
            with made:
                for _ in range(3):
                    loss = model(torch.randn(4, 32, generator=generator)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses[profiled].append(loss.item())
            if profiled:
                names = sorted({event.key for event in made.key_averages()})
    return names, losses[True], losses[False]


def check_profiles(**arguments) -> None:
    for names, profiled, plain in run_ranks(
        profiled_steps, world_size=2, time_limit_s=120, keyword_arguments=arguments
    ):
        assert profiled == plain
        ours = [name for name in names if name.startswith("hf_zero: ")]
        assert any("start" in name for name in ours) and any("wait for" in name for name in ours), ours


@pytest.mark.short_cells("2")
@pytest.mark.parametrize("stage", short_of([0, 1, 2, 3], [2, 3]))
def test_profiles_end_behind_a_step_without_a_crash_and_name_collectives(stage):
    check_profiles(settings={"stage": stage, "bucket_bytes": 8192}, options={"profile_memory": True})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_profiles_with_stacks_and_shapes_end_without_a_crash(stage):
    check_profiles(settings={"stage": stage, "bucket_bytes": 8192}, options=EVERYTHING, profiles=1)


def profiled_by_accelerate(rank: int, world_size: int, door: str, folder: str) -> list[str]:
    """Names in the traces that `accelerator.profile` writes: one of a schedule's windows, one of a whole block."""
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(rank)
    window = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1, "skip_first": 0}
    for number, kwargs in enumerate(({"schedule_option": window}, {"profile_memory": True, "record_shapes": True})):
        traces = f"{folder}/{number}"
        with accelerator.profile(ProfileKwargs(output_trace_dir=traces, **kwargs)) as profiler:
            for _ in range(5):
                accelerator.backward(model(torch.randn(4, 32, generator=generator)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
    trace = json.loads(Path(folder, "0", f"profile_{rank}.json").read_text())
    accelerator.free_memory()
    return sorted({event.get("name", "") for event in trace["traceEvents"]})


@pytest.mark.parametrize("stage", short_of([1, 2], [2]))
def test_accelerator_profile_writes_its_traces(stage, tmp_path):
    arguments = {"door": f"plugin {stage}", "folder": str(tmp_path)}
    for names in run_ranks(profiled_by_accelerate, world_size=2, time_limit_s=60, keyword_arguments=arguments):
        assert any(name.startswith("hf_zero: start all-gather parameters") for name in names)
