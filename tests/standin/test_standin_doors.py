"""Trainer and accelerate on accelerators, as far as a stand-in shows it: models come from host memory, and train as with DDP."""

import json
from pathlib import Path
from unittest import mock

import accelerate_job
import gpus
import pytest
import standin_device
import trainer_job
from accelerate.state import AcceleratorState
from ranks import run_ranks
from shared_ranks import run_on_ranks
from torch import nn

pytestmark = [pytest.mark.timeout(600), standin_device.needs_compiler]

STEPS = 3
SETTINGS = {"max_steps": STEPS, "warmup_steps": 2, "dropout": 0.0}


def with_adapters(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    names = [name.rpartition(".")[2] for name, _ in model.named_modules()]
    target = next(name for name in ("c_attn", "query", "q_proj") if name in names)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[target], fan_in_fan_out=target == "c_attn"))


def on_devices(rank: int, world_size: int, library: Path, folder: str, jobs: list[tuple[str, dict]]) -> list[dict]:
    """What each job returns: ("trainer" or "accelerate", its arguments)."""
    compiled = standin_device.register_known(library)
    with standin_device.process_group(rank, world_size, folder, standin_device.KNOWN_BACKEND):
        trainer_job.as_launched(rank, world_size)
        compiled.keep_to(rank)
        found = [_run(rank, world_size, door, arguments, cpu=False) for door, arguments in jobs]
    assert compiled.hazards() == compiled.crossings() == []
    assert compiled.contexts() == {rank}
    return found


def on_the_host(rank: int, world_size: int, jobs: list[tuple[str, dict]]) -> list[dict]:
    trainer_job.as_launched(rank, world_size)
    return [_run(rank, world_size, door, arguments, cpu=True) for door, arguments in jobs]


def _run(rank: int, world_size: int, door: str, arguments: dict, *, cpu: bool) -> dict:
    AcceleratorState._reset_state(reset_partial_state=True)
    if door == "trainer":
        return trainer_job.run(rank, world_size, use_cpu=cpu, **arguments)
    return accelerate_job.run(rank, world_size, cpu=cpu, **arguments)


def compared(
    library: Path, folder: Path, jobs: list[tuple[str, dict]], *, world_size: int = 2, within: float = 1e-5
) -> None:
    """Each job's losses on devices are those of DDP on the host."""
    here = [(door, arguments | {"door": "ddp"}) for door, arguments in jobs]
    limits = {"world_size": world_size, "time_limit_s": 400}
    expected = run_ranks(on_the_host, **limits, keyword_arguments={"jobs": here})
    arguments = {"library": library, "folder": str(folder), "jobs": jobs}
    found = run_ranks(on_devices, **limits, keyword_arguments=arguments)
    for rank in range(world_size):
        for (door, arguments), ours, theirs in zip(jobs, found[rank], expected[rank], strict=True):
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=within), (rank, door, arguments)


def trainer(door: str, model: str, folder: Path, **overrides) -> tuple[str, dict]:
    return "trainer", {"door": door, "model": model, "output_dir": str(folder), **SETTINGS, **overrides}


@pytest.mark.slow
def test_trainer_trains_a_bert_from_host_memory_at_stage_3(library, tmp_path):
    compared(library, tmp_path, [trainer("flag 3", "bert", tmp_path)])


@pytest.mark.slow
def test_accelerate_trains_at_stage_2(library, tmp_path):
    compared(library, tmp_path, [("accelerate", {"door": "plugin 2", "steps": STEPS})])


@pytest.mark.slow
def test_four_ranks_train_a_bert_with_buffers_from_host_memory(library, tmp_path):
    compared(library, tmp_path, [accelerate_with_bert("plugin 3", steps=2)], world_size=4)


def accelerate_with_bert(door: str, steps: int = STEPS) -> tuple[str, dict]:
    return "accelerate", {"door": door, "steps": steps, "model": "bert"}


def trained_by_the_gpu_script(rank: int, world_size: int, library: Path, folder: str, arguments: list[str]) -> int:
    """The status that scripts/bench/gpus.py ends with, on stand-in devices.

    Without DDP, whose reducer wants futures of a process group: the stand-in's has none. FSDP2 is the reference then.
    """
    compiled = standin_device.register_known(library)
    ways = [way for way in gpus.ways(world_size, folder) if way.name != "DDP"]
    with standin_device.process_group(rank, world_size, folder, standin_device.KNOWN_BACKEND):
        trainer_job.as_launched(rank, world_size)
        compiled.keep_to(rank)
        with mock.patch.object(gpus.dist, "destroy_process_group"), mock.patch.object(gpus, "ways", lambda *_: ways):
            status = gpus.main(["--device", standin_device.KNOWN_NAME, "--models", "bert-tiny", *arguments])
    assert compiled.hazards() == compiled.crossings() == []
    return status


def ways_of_the_gpu_script(library: Path, folder: Path, world_size: int, *chosen: str) -> list[dict]:
    arguments = ["--steps", "1", "--rounds", "1", "--json", str(folder / "gpus.json"), "--nvme-path", str(folder)]
    ways = ["--ways", *chosen] if chosen else []
    statuses = run_on_ranks(
        trained_by_the_gpu_script,
        world_size=world_size,
        time_limit_s=400,
        library=library,
        folder=str(folder),
        arguments=[*arguments, *ways],
    )
    found = json.loads((folder / "gpus.json").read_text())["ways"]
    assert statuses == [0] * world_size, found
    return found


@pytest.mark.slow
def test_the_script_for_several_gpus_runs_on_devices(library, tmp_path):
    ways = ways_of_the_gpu_script(library, tmp_path, 2, "stage 3")
    assert [way["way"] for way in ways] == ["FSDP2", "FSDP2, again", "stage 3"]
    assert all(way["peak_mib"] > 0 for way in ways)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gpu_script_runs_every_way_on_devices(world_size, library, tmp_path):
    ways = ways_of_the_gpu_script(library, tmp_path, world_size)
    # The first way, against which the losses of the others are held, runs twice.
    assert len(ways) == {1: 13, 2: 15}[world_size]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "world_size"), [("bert", 2), ("gpt2", 2), ("llama", 2), ("gpt2", 4)])
def test_trainer_at_each_stage(model, world_size, library, tmp_path):
    jobs = [trainer(f"flag {stage}", model, tmp_path) for stage in range(4)]
    compared(library, tmp_path, [*jobs, trainer("callback 3", model, tmp_path)], world_size=world_size)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "gpt2", "llama"])
def test_trainer_with_adapters(model, library, tmp_path):
    jobs = [trainer(f"flag {stage}", model, tmp_path, adapt=with_adapters) for stage in range(4)]
    compared(library, tmp_path, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_accelerate_at_each_stage(world_size, library, tmp_path):
    jobs = [("accelerate", {"door": f"plugin {stage}", "steps": STEPS}) for stage in range(4)]
    jobs += [accelerate_with_bert(f"plugin {stage}") for stage in range(4)]
    compared(library, tmp_path, jobs, world_size=world_size)


@pytest.mark.slow
def test_bf16(library, tmp_path):
    jobs = [trainer(f"flag {stage}", "bert", tmp_path, bf16=True) for stage in range(4)]
    jobs += [("accelerate", {"door": "plugin 3", "steps": STEPS, "mixed_precision": "bf16"})]
    compared(library, tmp_path, jobs, within=0.02)


@pytest.mark.slow
def test_offload(library, tmp_path):
    files = f"offload.nvme_path={tmp_path},offload.optimizer=nvme"
    settings = [
        "stage=2,offload.optimizer=cpu",
        f"stage=2,{files}",
        "stage=3,offload.optimizer=cpu,offload.params=cpu",
        f"stage=3,{files},offload.params=nvme",
        "stage=3,offload.activations=cpu",
    ]
    compared(library, tmp_path, [trainer(f"flag {each}", "bert", tmp_path) for each in settings])


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_a_resumed_run_goes_on(stage, library, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
    whole = trainer(f"flag {stage}", "bert", tmp_path / "run", **saving)
    resumed = trainer(
        f"flag {stage}", "bert", tmp_path / "run", **saving, resume=str(tmp_path / "run" / f"checkpoint-{STEPS // 2}")
    )
    for first, second in run_on_ranks(
        on_devices, time_limit_s=300, library=library, folder=str(tmp_path), jobs=[whole, resumed]
    ):
        assert second["losses"] == first["losses"]
        assert second["state"] == first["state"]


@pytest.mark.slow
def test_a_state_of_accelerate_goes_on(library, tmp_path):
    common = {"door": "plugin 3", "steps": STEPS}
    saving = ("accelerate", common | {"save_to": str(tmp_path / "state")})
    loading = ("accelerate", common | {"load_from": str(tmp_path / "state")})
    for whole, rest in run_on_ranks(
        on_devices, time_limit_s=300, library=library, folder=str(tmp_path), jobs=[saving, loading]
    ):
        assert rest["losses"] == whole["losses"][STEPS // 2 :]
