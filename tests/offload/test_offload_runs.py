"""Whole runs with state elsewhere: their memory, their checkpoints between kinds of offload, Trainer, and a kill."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cells import slow
from launching import ROOT, SUPPORT, run_forked
from ranks import run_ranks
from trainer_job import run
from training import adamw_in_two_groups, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine, seal_state, write_state

pytestmark = pytest.mark.timeout(180)

JOB = SUPPORT / "offload_job.py"


def environment(**more: str) -> dict[str, str]:
    # glibc keeps freed blocks below its threshold; this one is read before the process begins.
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts" / "bench")])
    return os.environ | {"PYTHONPATH": paths, "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1"} | more


def nvme(path: Path) -> dict:
    return {"optimizer": "nvme", "nvme_path": str(path)}


def measured(*offloads: dict, frozen: int = 0) -> list[dict[str, int]]:
    command = [sys.executable, str(JOB), "memory", json.dumps(offloads), str(frozen)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "early",
    [
        pytest.param({}, id="in time"),
        pytest.param({"speculate_bytes": "1GiB"}, id="early", marks=pytest.mark.slow),
    ],
)
def test_memory_grows_by_weights_gradients_and_the_window(early, tmp_path):
    plain, moved = measured({}, nvme(tmp_path) | early)
    # One layer's gradient as autograd made it, and what a layer passes on: the same without offload.
    activations = plain["growth"] - plain["weights"] - plain["gradients"] - plain["state"]
    # With early steps all of it is there at a time, and stacks of the threads that take them.
    bound = moved["weights"] + moved["gradients"] + moved["window"] + (2**20 if early else 0)
    mib = {name: round(value / 2**20, 1) for name, value in moved.items()}
    print(f"\nMiB with NVMe: {mib}; without: {plain['growth'] / 2**20:.1f}; activations {activations / 2**20:.1f}")
    print(f"growth less activations {(moved['growth'] - activations) / 2**20:.1f}, bound {bound / 2**20:.1f}")
    assert moved["state"] >= 5 * moved["window"]
    assert 0 <= activations < 16 * 2**20
    assert moved["growth"] - activations <= bound
    # All rows of a save at a time, and read: pages of files, which the system takes back as it needs them.
    assert moved["saved"] == moved["state"]
    # AdamW's two moments, and with early steps masters, which parameters follow when the step is asked for.
    assert moved["written"] == (moved["state"] * 3 // 2 if early else moved["state"])
    assert moved["finite"]
    assert moved["anonymous growth of a save"] < moved["state"] / 10


@pytest.mark.parametrize("frozen", [slow(0, id="all trained"), slow(30, id="base frozen")])
def test_memory_with_parameters_in_files_is_that_of_the_layers_in_use(frozen, tmp_path):
    plain, moved = measured({}, nvme(tmp_path) | {"params": "nvme"}, frozen=frozen)
    activations = plain["growth"] - plain["frozen"] - plain["weights"] - plain["gradients"] - plain["state"]
    # The layer in use and the one gathered ahead of it; that one's shard and the next one's on their way from the disk.
    assert moved["gathered"] <= 2 * moved["layer"]
    bound = moved["gathered"] + 2 * moved["layer"] + moved["gradients"] + moved["window"]
    mib = {name: round(value / 2**20, 1) for name, value in moved.items()}
    print(f"\nMiB with NVMe: {mib}; without: {plain['growth'] / 2**20:.1f}; activations {activations / 2**20:.1f}")
    print(f"growth less activations {(moved['growth'] - activations) / 2**20:.1f}, bound {bound / 2**20:.1f}")
    whole = moved["weights"] + moved["frozen"]
    assert whole == 32 * moved["layer"]
    assert 0 <= activations < 20 * 2**20
    assert moved["growth"] - activations <= bound
    if frozen:
        assert moved["growth"] < whole / 2
    assert moved["saved"] == moved["state"]


def save(engine: ZeroEngine, model: torch.nn.Module, folder: Path) -> None:
    weights = engine.whole_state_dict(wanted=True) if engine.config.stage == 3 else model.state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(weights, folder / f"weights-{engine.groups.rank}.pt")
    seal_state(engine, folder, write_state(engine, folder / ZERO_FOLDER))


def trained(rank: int, offload: dict, stage: int, steps: range, folder: Path | None = None, **more):
    torch.manual_seed(0)
    model = gpt2()
    if folder is not None:
        model.load_state_dict(torch.load(folder / f"weights-{rank}.pt", weights_only=True))
    optimizer = adamw_in_two_groups(model, fused=True)
    engine = ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "20KiB", "offload": offload, **more})
    if folder is not None:
        load_engine(engine, folder / ZERO_FOLDER)
    losses = []
    for step in steps:
        loss = model(**gpt2_batch(torch.Generator().manual_seed(10 * step + rank), 2)).loss
        loss.backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, engine


def kinds_of(root: Path, stage: int) -> dict[str, dict]:
    if stage < 3:
        return {"none": {}, "cpu": {"optimizer": "cpu"}, "nvme": nvme(root)}
    alike = {"none": {}, "cpu": {"optimizer": "cpu", "params": "cpu"}, "nvme": nvme(root) | {"params": "nvme"}}
    return alike | {"cpu and nvme": nvme(root) | {"optimizer": "cpu", "params": "nvme"}}


def resumed_everywhere(rank: int, world_size: int, path: str, stage: int, **more) -> list[tuple]:
    """(from, to, losses, expected) for every pair of kinds."""
    root = Path(path)
    kinds = kinds_of(root, stage)
    expected, _, _ = trained(rank, {}, stage, range(5), **more)
    found = []
    for name, offload in kinds.items():
        before, model, engine = trained(rank, offload, stage, range(3), **more)
        assert before == expected[:3]
        save(engine, model, root / "checkpoints" / name)
    for source, target in itertools.product(kinds, kinds):
        losses, _, _ = trained(rank, kinds[target], stage, range(3, 5), root / "checkpoints" / source, **more)
        found.append((source, target, losses, expected[3:]))
    return found


@pytest.mark.slow
@pytest.mark.short_cells("2-1-more2")
@pytest.mark.parametrize(
    ("world_size", "stage", "more"),
    [(1, 3, {}), pytest.param(2, 3, {"param_dtype": "bfloat16"}, marks=pytest.mark.slow), (2, 1, {})],
)
def test_checkpoints_go_from_each_kind_of_offload_to_each_other(world_size, stage, more, tmp_path):
    arguments = {"path": str(tmp_path), "stage": stage, **more}
    for found in run_ranks(resumed_everywhere, world_size=world_size, time_limit_s=150, keyword_arguments=arguments):
        assert len(found) == (16 if stage == 3 else 9)
        for source, target, losses, expected in found:
            assert losses == expected, f"from {source} to {target}"


def runs_in_turn(rank: int, world_size: int, jobs: list[dict]) -> list[dict]:
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    return [run(rank, world_size, model="gpt2", max_steps=4, **saving, **job) for job in jobs]


def test_trainer_offloads_by_its_flag_and_by_a_file_and_resumes_from_one_kind_to_another(tmp_path):
    (tmp_path / "disk").mkdir()
    resume = str(tmp_path / "cpu" / "checkpoint-2")
    doors = {
        "plain": "flag 2",
        "cpu": "flag stage=2,offload.optimizer=cpu,offload.speculate_bytes=64MiB",
        "nvme": f"flag stage=2,offload.optimizer=nvme,offload.nvme_path={tmp_path / 'disk'}",
        "file": f"flag {ROOT / 'configs' / 'zero2_offload_cpu.yaml'}",
    }
    jobs = [{"door": door, "output_dir": str(tmp_path / name)} for name, door in doors.items()]
    for resumed in jobs[2:]:
        resumed |= {"resume": resume, "seed": 77}
    expected, moved, in_files, by_file = run_ranks(
        runs_in_turn, world_size=2, time_limit_s=150, keyword_arguments={"jobs": jobs}
    )[0]
    assert moved["losses"] == expected["losses"]
    assert moved["state"] == in_files["state"] == by_file["state"] == expected["state"]
    assert not list((tmp_path / "disk").glob("hf_zero-run-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plain"),
    [pytest.param("zero3_offload_cpu", "3", marks=pytest.mark.slow), ("one_gpu_7b", "stage=3,param_dtype=bfloat16")],
)
def test_trainer_trains_one_rank_by_each_file_that_moves_parameters_as_it_does_without(name, plain, tmp_path):
    doors = {"moved": f"flag {ROOT / 'configs' / name}.yaml", "plain": f"flag {plain}"}
    outcomes = {}
    for kind, door in doors.items():
        arguments = {"door": door, "model": "gpt2", "output_dir": str(tmp_path / kind)}
        arguments |= {"max_steps": 4, "optim": "adamw_torch_fused"}
        # In a process of its own, which meets on no port, and leaves no environment of a rank's to later tests.
        [outcomes[kind]] = run_ranks(run, world_size=1, time_limit_s=120, keyword_arguments=arguments)
    assert outcomes["moved"]["losses"] == outcomes["plain"]["losses"]
    assert outcomes["moved"]["state"] == outcomes["plain"]["state"]


def start(offload: dict, folder: Path, steps: int, **more: str) -> subprocess.Popen:
    command = [sys.executable, str(JOB), "train", json.dumps(offload), str(folder), str(steps)]
    return subprocess.Popen(
        command,
        env=environment(**more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def forked(offload: dict, folder: Path, steps: int) -> subprocess.CompletedProcess:
    """The same to its end, by a process that has imported everything."""
    done = run_forked(JOB, ("train", json.dumps(offload), folder, steps), environment=os.environ, processes=1)
    assert done.returncode == 0, done.stderr
    return done


def lines_until(process: subprocess.Popen, word: str) -> list[str]:
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(word):
            return lines
    raise AssertionError(f"the run ended before it said {word!r}: {process.stderr.read()}")


def losses_in(lines: list[str]) -> dict[str, str]:
    return {line.split()[0]: line.split()[1] for line in lines if line[0].isdigit()}


@pytest.mark.slow
def test_a_killed_run_leaves_files_that_the_next_one_removes_and_its_checkpoint_goes_on_bit_for_bit(tmp_path):
    disk, plain, killed = tmp_path / "disk", tmp_path / "plain", tmp_path / "killed"
    for folder in (disk, plain, killed):
        folder.mkdir()
    expected = losses_in(forked({}, plain, 6).stdout.splitlines())
    victim = start(nvme(disk), killed, 4, WAIT_TO_BE_KILLED="1")
    lines = lines_until(victim, "files")
    assert "saved" in lines
    left = Path(lines[-1].split()[1])
    assert list(left.glob("*.state"))
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=60)
    assert list(left.glob("*.state")), "nothing runs after a SIGKILL"
    again = forked(nvme(disk), killed, 6)
    assert f"removed {left}" in again.stderr
    assert not left.exists()
    resumed = losses_in(again.stdout.splitlines())
    assert list(resumed) == ["2", "3", "4", "5"]
    assert resumed == {step: expected[step] for step in resumed}
    assert losses_in(lines) == {step: expected[step] for step in losses_in(lines)}
    assert not list(disk.glob("hf_zero-run-*"))
