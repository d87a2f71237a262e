"""Checkpoints whose model lies in the ranks' own files, those kept for good, adapters alone, and `accelerator.save_state`."""

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from cells import short_of, slow
from hostile_folders import as_before_ids
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from shared_ranks import on_ranks, run_on_ranks
from trainer_job import as_launched, history, make_trainer
from training import gpt2, gpt2_batch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, Trainer, TrainerCallback
from typer.testing import CliRunner

from hf_zero import ZeroPlugin
from hf_zero.checkpoint.disks import Disk, disk_with, find_disk
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.reader import CheckpointReader
from hf_zero.checkpoint.verify import checkpoint_faults
from hf_zero.cli.app import app
from hf_zero.comm.all_or_none import exchange_between_ranks
from hf_zero.integrations import accelerator as door
from hf_zero.integrations import resume as resuming
from hf_zero.integrations.state_io import load_engine

pytestmark = pytest.mark.timeout(180)
SAVING = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "logging_steps": 1}
SHARDED = "checkpoint.layout=sharded"


def hf_zero(*arguments: object) -> str:
    """What the command prints; it has to succeed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def trains(
    rank: int,
    world_size: int,
    output_dir: str,
    settings: str,
    resume: object = None,
    model: str = "bert",
    own_disks: bool = False,
    **overrides,
) -> dict:
    """A run's losses, whole state dict at its end, and the error that ended it. `own_disks`: a folder for each rank."""
    as_launched(rank, world_size)
    folder = f"{output_dir}/host{rank}" if own_disks else output_dir
    trainer = make_trainer(f"flag {settings}", model, folder, **{**SAVING, **overrides})
    error = ""
    try:
        trainer.train(resume_from_checkpoint=resume.replace(output_dir, folder) if isinstance(resume, str) else resume)
    except ValueError as refusal:
        error = str(refusal)
    state = {} if error else in_numpy(trainer.model.state_dict())
    return {**history(trainer), "state": state, "error": error, "best": trainer.state.best_model_checkpoint}


def in_numpy(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Copies, exact: float32 has all values of the 16-bit dtypes."""
    return {name: value.float().numpy().copy() for name, value in state.items()}


def assert_same(state: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert state.keys() == expected.keys()
    assert all(np.array_equal(state[name], expected[name]) for name in state)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory) -> Callable[[str], tuple[Path, list[dict]]]:
    """By settings, the folder of a run of two ranks with sharded checkpoints, and its ranks' outcomes."""

    @cache
    def outcomes(settings: str) -> tuple[Path, list[dict]]:
        folder = tmp_path_factory.mktemp("run")
        return folder, run_on_ranks(trains, output_dir=str(folder), settings=f"{settings},{SHARDED}")

    return outcomes


@pytest.mark.parametrize(
    ("settings", "elsewhere"),
    [
        slow("stage=0", "stage=3"),
        slow("stage=1", "stage=2"),
        slow("stage=3", "stage=1"),
        ("stage=2,param_dtype=bfloat16", "stage=3"),
    ],
)
def test_a_sharded_checkpoint_goes_on_bit_for_bit_and_becomes_a_model_folder(settings, elsewhere, run_of, tmp_path):
    folder, whole = run_of(settings)
    checkpoint, last = folder / "checkpoint-4", folder / "checkpoint-8"
    assert not list(checkpoint.glob("*.safetensors*")) and checkpoint_faults(checkpoint, "zero") == []
    assert "sharded" in hf_zero("inspect", last) and "good" in hf_zero("verify", last)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForSequenceClassification.from_pretrained(last)
    hf_zero("consolidate", last, tmp_path / "model")
    hf_zero("verify", tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype="auto")
    assert_same(in_numpy(model.state_dict()), whole[0]["state"])

    with_masters = load_consolidated(last, tmp_path / "masters", "--masters")
    dtypes = {value.dtype for value in load_file(tmp_path / "masters" / "model.safetensors").values()}
    assert torch.float32 in dtypes and torch.bfloat16 not in dtypes
    if "bfloat16" in settings:
        rounded = {name: torch.tensor(value).bfloat16() for name, value in with_masters.items()}
        assert_same(in_numpy(rounded), whole[0]["state"])
        assert any((with_masters[name] != whole[0]["state"][name]).any() for name in with_masters)
    else:
        assert_same(with_masters, whole[0]["state"])

    same = {"output_dir": str(tmp_path / "again"), "settings": f"{settings},{SHARDED}", "resume": str(checkpoint)}
    for outcome in run_on_ranks(trains, seed=77, **same):
        assert outcome["error"] == "" and outcome["losses"] == whole[0]["losses"]
        assert_same(outcome["state"], whole[0]["state"])
    if "bfloat16" in settings:
        elsewhere += ",param_dtype=bfloat16"
    other = {"output_dir": str(tmp_path / "other"), "settings": elsewhere, "resume": str(checkpoint)}
    for outcome in run_on_ranks(trains, seed=77, **other):
        assert outcome["error"] == "" and outcome["losses"] == pytest.approx(whole[0]["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "elsewhere"),
    [slow("stage=3", "stage=2"), ("stage=2,param_dtype=bfloat16", "stage=3,param_dtype=bfloat16")],
)
def test_another_world_size_reads_a_sharded_checkpoint(settings, elsewhere, run_of, tmp_path):
    folder, _ = run_of(settings)
    shutil.copytree(folder, tmp_path / "run")
    state = load_consolidated(folder / "checkpoint-8", tmp_path / "model")
    for outcome in run_on_ranks(trains, 3, output_dir=str(tmp_path / "run"), settings=elsewhere, resume=True):
        # Stock Trainer takes one step more when it resumes from the last checkpoint of all, at a learning rate of zero.
        assert outcome["error"] == "" and len(outcome["losses"]) >= 8
        assert_same(outcome["state"], state)


def load_consolidated(checkpoint: Path, out: Path, *parts: object) -> dict[str, np.ndarray]:
    hf_zero("consolidate", checkpoint, out, *parts)
    return in_numpy(load_file(out / "model.safetensors"))


@pytest.mark.slow
def test_hosts_with_disks_of_their_own_keep_their_ranks_parts(tmp_path):
    run, settings = tmp_path / "run", f"stage=3,{SHARDED}"
    whole = run_on_ranks(trains, output_dir=str(run), settings=settings, own_disks=True, save_total_limit=1)
    hosts = [run / "host0" / "checkpoint-8", run / "host1" / "checkpoint-8"]
    for number, host in enumerate(hosts):
        assert [path.name for path in host.parent.iterdir()] == ["checkpoint-8"]
        assert {path.name for path in (host / "zero").iterdir()} == {
            "manifest.json",
            f"rank-{number:05d}-of-00002.safetensors",
        }
        assert (host / "trainer_state.json").is_file() and checkpoint_faults(host, "zero") == []
    assert_same(load_consolidated(hosts[0], tmp_path / "model", "--part", hosts[1]), whole[0]["state"])
    refused = CliRunner().invoke(app, ["consolidate", str(hosts[0]), str(tmp_path / "half")])
    assert refused.exit_code == 1 and "rank-00001-of-00002.safetensors" in refused.output and "--part" in refused.output

    # Each host goes on from its own disk; what is damaged on one of them is passed over by all.
    shutil.copytree(hosts[1], run / "host1" / "checkpoint-9")
    shutil.copytree(hosts[0], run / "host0" / "checkpoint-9")
    (run / "host1" / "checkpoint-9" / "zero" / "rank-00001-of-00002.safetensors").write_bytes(b"cut")
    arguments = {"output_dir": str(run), "settings": settings, "own_disks": True, "save_strategy": "no"}
    for outcome in run_on_ranks(trains, resume=True, seed=77, **arguments):
        assert outcome["error"] == ""
        assert_same(outcome["state"], whole[0]["state"])
    [alone] = run_on_ranks(trains, 1, output_dir=str(run / "host0"), settings=settings, resume=str(hosts[0]))
    assert "has no rank-00001-of-00002.safetensors" in alone["error"] and "several hosts" in alone["error"]


def reads_mixed_parts(rank: int, world_size: int, run: str) -> list[str]:
    """What a resume, the best model and optimizer state say to checkpoint-4 of this rank's own folder."""
    as_launched(rank, world_size)
    folder = f"{run}/host{rank}"
    trainer = make_trainer(f"flag stage=2,{SHARDED}", "bert", folder, save_strategy="no", max_steps=2)
    said = []
    for resume in (f"{folder}/checkpoint-4", True):
        with pytest.raises(ValueError, match="parts of different saves") as refused:
            trainer.train(resume_from_checkpoint=resume)
        said.append(str(refused.value))
    trainer.train()
    trainer.state.best_model_checkpoint = f"{folder}/checkpoint-4"
    [engine] = trainer.accelerator.zero_engines
    for load in (trainer._load_best_model, lambda: load_engine(engine, f"{folder}/checkpoint-4/zero")):
        with pytest.raises(CheckpointError, match="not parts of one checkpoint") as refused:
            load()
        said.append(str(refused.value))
    return said


def test_parts_of_different_saves_are_refused_by_every_reader_of_several(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    short = {"settings": f"stage=2,{SHARDED}", "own_disks": True, "max_steps": 4, "save_steps": 2}
    for run in (one, two):
        run_on_ranks(trains, output_dir=str(run), **short)
    saves = {Manifest.read(host / "checkpoint-4" / "zero").save for host in one.iterdir()}
    assert len(saves) == 1 and len(saves.pop()) == 32
    here, rows = one / "host0" / "checkpoint-4", "rank-00001-of-00002.safetensors"
    # Of format 4, a run on one machine whose parts fit.
    former = tmp_path / "former"
    shutil.copytree(one, former)
    for host in former.iterdir():
        as_before_ids(host / "checkpoint-4")

    def consolidated(checkpoint: Path, part: Path) -> str:
        result = CliRunner().invoke(app, ["consolidate", str(checkpoint), str(tmp_path / "out"), "--part", str(part)])
        assert result.exit_code == 1 and not (tmp_path / "out").exists()
        return result.output

    other_step = consolidated(here, one / "host1" / "checkpoint-2")
    assert "(step 4, 2 ranks, 20" in other_step and "(step 2, 2 ranks, 20" in other_step
    assert "not parts of one checkpoint" in consolidated(here, two / "host1" / "checkpoint-4")
    assert "a save without an ID (step 4" in consolidated(here, former / "host1" / "checkpoint-4")
    # A file that a person has copied, of which this disk's manifest has no checksum.
    merged = shutil.copytree(here, tmp_path / "merged")
    shutil.copy2(one / "host1" / "checkpoint-4" / "zero" / rows, merged / "zero")
    assert "good" in hf_zero("verify", merged)
    hf_zero("consolidate", merged, tmp_path / "model")
    for source in (two, former):
        shutil.copy2(source / "host1" / "checkpoint-4" / "zero" / rows, merged / "zero")
        [fault] = checkpoint_faults(merged, "zero")
        assert fault.startswith(f"zero/{rows} is from ") and "but the manifest is from save" in fault
        with CheckpointReader(merged / "zero") as reader:
            row = next(row for each in reader.manifest.rows for row in each if reader.manifest.file_of(row) == rows)
            with pytest.raises(CheckpointError, match="but the manifest is from save"):
                reader.read(row.kind, row.name, row.interval)

    shutil.rmtree(one / "host1")
    shutil.copytree(two / "host1", one / "host1")
    shutil.rmtree(one / "host0" / "checkpoint-2")
    shutil.rmtree(one / "host1" / "checkpoint-2")
    said = run_on_ranks(reads_mixed_parts, run=str(one))
    assert all("rank 0 has save" in each and "rank 1 has save" in each for each in said[0][:2])
    # Parts without IDs go on, and do not fit parts with one.
    for host in former.iterdir():
        shutil.rmtree(host / "checkpoint-2")
    arguments = {"settings": f"stage=2,{SHARDED}", "own_disks": True, "resume": True, "save_strategy": "no"}
    went_on = run_on_ranks(trains, output_dir=str(former), **{**arguments, "max_steps": 5})
    assert [(outcome["error"], len(outcome["losses"])) for outcome in went_on] == [("", 5)] * 2
    shutil.rmtree(former / "host1")
    shutil.copytree(two / "host1", former / "host1")
    for outcome in run_on_ranks(trains, output_dir=str(former), **arguments):
        assert "rank 0 has a save without an ID" in outcome["error"]


def trains_on_a_disk_of_its_own(rank: int, world_size: int, output_dir: str, settings: str) -> dict:
    find = resuming.find_disk
    # One folder name, which is another folder on each host.
    resuming.find_disk = lambda folder, *args, **kwargs: find(folder / f"host{rank}", *args, **kwargs)
    return trains(rank, world_size, output_dir, settings)


@pytest.mark.parametrize("settings", ["stage=2", slow(f"stage=2,{SHARDED},checkpoint.full_every=4")])
def test_one_weights_file_on_several_disks_is_refused_before_training_with_the_way_out(settings, tmp_path):
    for outcome in run_on_ranks(trains_on_a_disk_of_its_own, output_dir=str(tmp_path), settings=settings):
        assert "of 2 see the same output_dir" in outcome["error"] and "checkpoint.layout: sharded" in outcome["error"]
        assert outcome["losses"] == []
    assert not list(tmp_path.rglob("checkpoint-*"))


def trains_by_its_own_clock(rank: int, world_size: int, output_dir: str, asks_late: bool, **overrides) -> dict:
    as_launched(rank, world_size)
    folder = f"{output_dir}/12-00-0{rank}"
    saving = {**SAVING, "save_strategy": "no"} if asks_late else SAVING
    callbacks = [AsksForASave()] if asks_late else []
    settings = {**saving, "save_steps": 2, "max_steps": 4, **overrides}
    trainer = make_trainer("flag stage=2", "bert", folder, callbacks=callbacks, **settings)
    trainer.train(resume_from_checkpoint="last-good")
    return {"folder": trainer.args.output_dir, **history(trainer)}


class AsksForASave(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 2


@pytest.mark.parametrize("asks_late", [False, True])
def test_ranks_that_name_different_output_dirs_all_write_to_that_of_rank_0(asks_late, tmp_path):
    """`asks_late`: the run was to save nothing, and a callback asks for a save."""
    first = run_on_ranks(trains_by_its_own_clock, output_dir=str(tmp_path), asks_late=asks_late)
    assert {outcome["folder"] for outcome in first} == {str(tmp_path / "12-00-00")}
    assert len(first[0]["losses"]) == 4
    names = sorted(path.name for path in (tmp_path / "12-00-00").iterdir())
    assert names == (["checkpoint-2"] if asks_late else ["checkpoint-2", "checkpoint-4"])
    assert all(checkpoint_faults(tmp_path / "12-00-00" / name, "zero") == [] for name in names)
    assert not (tmp_path / "12-00-01").exists() or not list((tmp_path / "12-00-01").iterdir())


def saves_by_its_own_clock(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    named = ProjectConfiguration(project_dir=f"{folder}/run{rank}", automatic_checkpoint_naming=True)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2), project_config=named)
    model = gpt2()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert accelerator.save_state() == Path(folder, "run0", "checkpoints", "checkpoint_0")
    accelerator.load_state()
    named.automatic_checkpoint_naming = False
    written = accelerator.save_state(f"{folder}/step{rank}")
    assert written == Path(folder, "step0")
    accelerator.load_state(written)


def test_ranks_that_name_different_states_all_write_to_that_of_rank_0(tmp_path):
    run_on_ranks(saves_by_its_own_clock, folder=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run0", "step0"]
    assert checkpoint_faults(tmp_path / "step0", "zero") == []


@pytest.mark.slow
@pytest.mark.parametrize("world_size", short_of([1, 2], [2]))
def test_every_so_many_steps_a_whole_checkpoint_is_written_and_kept(world_size, tmp_path):
    every = {"save_steps": 2, "max_steps": 10, "save_total_limit": 1}
    run_on_ranks(trains, world_size, output_dir=str(tmp_path), settings="stage=2,checkpoint.full_every=4", **every)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-4", "checkpoint-8"]
    for name in ("checkpoint-4", "checkpoint-8"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name)
        assert Manifest.read(tmp_path / name / "zero").is_kept
    assert Manifest.read(tmp_path / "checkpoint-10" / "zero").weights


def best_of(rank: int, world_size: int, output_dir: str, settings: str, **overrides) -> dict:
    """Evaluates at each save, the first being the best; loads that one at the end."""
    scores = iter([3.0, 1.0, 2.0])
    return trains(
        rank,
        world_size,
        output_dir,
        settings,
        save_steps=2,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        compute_metrics=lambda _: {"score": next(scores)},
        **overrides,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "save_only_model"),
    [slow(f"stage=2,{SHARDED}", True), (f"stage=3,{SHARDED}", False), slow("stage=3", True)],
)
def test_the_best_model_is_loaded_at_the_end(settings, save_only_model, tmp_path):
    outcomes = run_on_ranks(best_of, output_dir=str(tmp_path), settings=settings, save_only_model=save_only_model)
    best = load_consolidated(tmp_path / "checkpoint-2", tmp_path / "model")
    for outcome in outcomes:
        assert outcome["error"] == "" and outcome["best"] == str(tmp_path / "checkpoint-2")
        assert_same(outcome["state"], best)


# ---- adapters ----


def with_adapters(model: PreTrainedModel) -> PeftModel:
    return get_peft_model(model, LoraConfig(target_modules=["c_attn"], r=2, task_type="CAUSAL_LM"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_adapters_are_saved_without_their_base_and_refuse_another(stage, tmp_path):
    adapters = {"settings": f"stage={stage}", "model": "gpt2", "adapt": with_adapters}
    whole = run_on_ranks(trains, output_dir=str(tmp_path / "run"), **adapters)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    saved = in_numpy(load_file(tmp_path / "run" / "checkpoint-8" / "adapter_model.safetensors"))
    assert saved and all("lora" in name for name in saved) and not (checkpoint / "model.safetensors").exists()
    trained = {name.replace(".default", ""): value for name, value in whole[0]["state"].items() if "lora" in name}
    assert_same(trained, saved)
    assert len(Manifest.read(checkpoint / "zero").base) == 16 and "adapters" in hf_zero("inspect", checkpoint)
    arguments = {"output_dir": str(tmp_path / "again"), "resume": str(checkpoint), **adapters}
    for outcome in run_on_ranks(trains, **arguments):
        assert (outcome["error"], outcome["losses"]) == ("", whole[0]["losses"])
    for outcome in run_on_ranks(trains, seed=5, **arguments):
        assert "were trained on another base model" in outcome["error"]


@pytest.mark.parametrize("stage", [slow(2), 3])
def test_a_lone_adapter_in_the_ranks_own_files_goes_on(stage, tmp_path):
    run = {"settings": f"stage={stage},{SHARDED}", "model": "gpt2", "adapt": with_adapters}
    run |= {"save_steps": 2, "max_steps": 4}
    whole = run_on_ranks(trains, output_dir=str(tmp_path / "run"), **run)
    resume = tmp_path / "run" / "checkpoint-2"
    assert not list(resume.glob("*.safetensors"))
    for outcome in run_on_ranks(trains, output_dir=str(tmp_path / "again"), resume=str(resume), **run):
        assert (outcome["error"], outcome["losses"]) == ("", whole[0]["losses"])


def with_two_adapters(model: PreTrainedModel) -> PeftModel:
    config = LoraConfig(target_modules=["c_attn"], r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.add_adapter("second", config)
    adapted.set_adapter("second")
    return adapted


@pytest.mark.slow
@pytest.mark.parametrize("settings", short_of(["stage=2", "stage=3", f"stage=3,{SHARDED}"], ["stage=3"]))
def test_each_of_several_adapters_is_in_its_own_folder_and_goes_on(settings, tmp_path):
    run = {"settings": settings, "model": "gpt2", "adapt": with_two_adapters, "save_steps": 2, "max_steps": 4}
    whole = run_on_ranks(trains, output_dir=str(tmp_path / "run"), **run)
    for adapter, folder in (("default", "checkpoint-4"), ("second", "checkpoint-4/second")):
        saved = in_numpy(load_file(tmp_path / "run" / folder / "adapter_model.safetensors"))
        held = {name: value for name, value in whole[0]["state"].items() if f".{adapter}." in name}
        assert_same({name.replace(f".{adapter}", ""): value for name, value in held.items()}, saved)
    resume = str(tmp_path / "run" / "checkpoint-2")
    for outcome in run_on_ranks(trains, output_dir=str(tmp_path / "again"), resume=resume, **run):
        assert (outcome["error"], outcome["losses"]) == ("", whole[0]["losses"])


# ---- disks ----


def looks_at_disks(rank: int, world_size: int, folder: str) -> tuple[Disk, Disk, Disk]:
    shared = find_disk(Path(folder) / "new" / "shared", rank, exchange_between_ranks, then="")
    (Path(folder) / f"host{rank % 2}").mkdir(exist_ok=True)
    (Path(folder) / f"host{rank % 2}" / "file").touch()
    own = find_disk(Path(folder) / f"host{rank % 2}", rank, exchange_between_ranks, then="")
    found = disk_with(Path(folder) / f"host{rank % 2}" / "file", rank, exchange_between_ranks)
    return shared, own, found


def test_ranks_find_out_who_shares_their_disk(tmp_path):
    for rank, (shared, own, found) in enumerate(run_on_ranks(looks_at_disks, 3, folder=str(tmp_path))):
        assert shared == Disk.shared(rank, 3) and shared.is_of_all and shared.leads == (rank == 0)
        assert own == found == Disk(ranks=(0, 2) if rank != 1 else (1,), rank=rank, world_size=3)
        assert own.leads == (rank in (0, 1)) and own.index == (1 if rank == 2 else 0)
    assert not list((tmp_path / "new" / "shared").iterdir())


UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def buffers_go_on(rank: int, world_size: int, folder: str, layout: str) -> list[list[int]]:
    """Buffers of a run that goes on from a checkpoint whose buffers had other values."""
    as_launched(rank, world_size)

    def trainer(first: int) -> Trainer:
        def with_buffers(model):
            for number, dtype in enumerate(UNSIGNED):
                model.register_buffer(f"extra{number}", torch.arange(first, first + 3).to(dtype))
            return model

        settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "adapt": with_buffers}
        return make_trainer(f"flag stage=3,checkpoint.layout={layout}", "gpt2", folder, **settings)

    trainer(1000).train()
    resumed = trainer(0)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    buffers = dict(resumed.model.named_buffers())
    assert [buffers[f"extra{number}"].dtype for number in range(3)] == list(UNSIGNED)
    return [buffers[f"extra{number}"].tolist() for number in range(3)]


@pytest.mark.parametrize("layout", [slow("hf"), "sharded"])
def test_buffers_of_unsigned_integers_are_saved_and_go_on(layout, tmp_path):
    found = run_on_ranks(buffers_go_on, folder=str(tmp_path), layout=layout)
    assert found == [[[1000, 1001, 1002]] * 3] * 2


def saves_a_wide_complex(rank: int, world_size: int, folder: str, layout: str) -> str:
    as_launched(rank, world_size)

    def with_buffer(model):
        model.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
        return model

    door = f"flag stage=2,checkpoint.layout={layout}"
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "adapt": with_buffer}
    with pytest.raises(CheckpointError) as raised:
        make_trainer(door, "gpt2", folder, **settings).train()
    return str(raised.value)


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_a_buffer_of_a_dtype_that_no_file_has_is_named(layout, tmp_path):
    [said] = run_on_ranks(saves_a_wide_complex, world_size=1, folder=str(tmp_path), layout=layout)
    assert "wide has dtype torch.complex128, which cannot be saved; allowed: F64" in said


# ---- `accelerator.save_state` ----


def saves_and_fails(rank: int, world_size: int, folder: str) -> str:
    """Saves; steps; fails to save once more, on one rank; loads. What came back is the first state."""
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2))
    torch.manual_seed(0)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step() -> float:
        loss = model(**gpt2_batch(torch.Generator().manual_seed(rank), 2)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    written = accelerator.save_state(folder)
    # As accelerate's own, which returns a path.
    assert isinstance(written, Path) and written == Path(folder)
    expected = step()
    stock = door.seal_state

    def fails(engine, root, manifest, **kwargs):
        if rank == 1:
            next((root / "zero").glob("rank-00001*")).unlink()
        stock(engine, root, manifest, **kwargs)

    door.seal_state = fails
    with pytest.raises(CheckpointError) as refused:
        accelerator.save_state(folder)
    door.seal_state = stock
    accelerator.load_state(folder)
    assert step() == expected
    # Once more in its own place, and beside a file of the script's.
    accelerator.save_state(folder)
    if rank == 0:
        Path(folder, "notes.txt").write_text("mine")
    accelerator.wait_for_everyone()
    accelerator.save_state(folder)
    return str(refused.value)


def test_a_save_that_fails_leaves_the_state_that_was_there(tmp_path):
    for said in run_on_ranks(saves_and_fails, folder=str(tmp_path / "state")):
        assert "rank" in said and "could not" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]
    assert (tmp_path / "state" / "notes.txt").read_text() == "mine"
    assert checkpoint_faults(tmp_path / "state", "zero") == []


def saves_twice(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2))
    model = gpt2()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        accelerator.save_state(folder)
    accelerator.load_state(folder)


def test_a_link_to_a_folder_on_another_disk_stays_one(tmp_path):
    there = tmp_path / "disk" / "here"
    there.mkdir(parents=True)
    (tmp_path / "state").symlink_to(there)
    run_on_ranks(saves_twice, world_size=1, folder=str(tmp_path / "state"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "state"] and (tmp_path / "state").is_symlink()
    assert list(there.parent.iterdir()) == [there] and checkpoint_faults(there, "zero") == []


def names_no_folder(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=2))
    model = gpt2()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"save_state\(\) was called without a folder.*Pass the folder, or Project"):
        accelerator.save_state()
    with pytest.raises(ValueError, match=r"load_state\(\) was called without a folder.*is off\. Pass the folder"):
        accelerator.load_state()
    Path(folder, f"file{rank}").touch()
    accelerator.wait_for_everyone()
    with pytest.raises(ValueError, match=r"file0 is a file, but save_state writes a folder"):
        accelerator.save_state(f"{folder}/file0")


def test_a_state_without_a_folder_is_refused_in_words(tmp_path):
    run_on_ranks(names_no_folder, folder=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file0", "file1"]


@on_ranks(2)
def test_accelerates_own_names_and_limit_are_kept(rank, world_size, tmp_path):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=1), project_config=naming)
    model = gpt2()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    seen = []
    for _ in range(4):
        accelerator.save_state()
        accelerator.wait_for_everyone()
        seen.append(sorted(os.listdir(f"{folder}/checkpoints")))
        accelerator.wait_for_everyone()
    accelerator.load_state()
    naming.iteration = 3
    with pytest.raises(ValueError, match=r"checkpoint_3 already exists\. Set .*iteration"):
        accelerator.save_state()
    assert seen == [
        ["checkpoint_0"],
        ["checkpoint_0", "checkpoint_1"],
        ["checkpoint_1", "checkpoint_2"],
        ["checkpoint_2", "checkpoint_3"],
    ]
