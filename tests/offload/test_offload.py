"""State in host memory: the same trajectory as without offload, whole runs with it, and the folder of a run's files."""

import fcntl
import itertools
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from cells import slow
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT, SUPPORT, run_forked
from loops import engine_or_ddp
from shared_ranks import run_on_ranks
from torch import nn
from trainer_job import run
from training import adamw_in_two_groups, gpt2, gpt2_batch, steps

from hf_zero import device
from hf_zero.buckets.bucket import Bucket, Row
from hf_zero.comm.collective_log import LABEL, SITE, STARTED, STEP
from hf_zero.device import available_host_bytes
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import announce, state_plan
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine, seal_state, write_state
from hf_zero.offload import run_folder
from hf_zero.offload.choice import Placement
from hf_zero.offload.host_memory import HostCores, host_memory_fault
from hf_zero.offload.host_tiers import HostTier
from hf_zero.offload.run_folder import RunFolder
from hf_zero.optimizer.bucket_steps import BucketStep
from hf_zero.optimizer.trial_step import state_kinds

pytestmark = pytest.mark.timeout(180)
CPU = {"offload": {"optimizer": "cpu"}}


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
    return (
        model,
        optimizer,
        ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "20KiB", **offload, **more}),
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rows_are_masters_in_memory_of_their_own(stage):
    model, optimizer, engine = built(CPU, stage)
    steps(model, optimizer, [0])
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
    steps(model, optimizer, [0])
    state = {bucket.tier.name: 0 for bucket in engine.buckets}
    for bucket in engine.buckets:
        state[bucket.tier.name] += 2 * 4 * sum(row.tensor.numel() for row in bucket.rows)
    assert list(state) == [engine.tier.name, "device"]
    rows = engine.memory_report().rows
    assert {row.where: row.bytes for row in rows if row.kind == "optimizer state"} == state
    assert 0.5 <= state[engine.tier.name] / sum(state.values()) < 1
    announce(engine, "nobody")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert re.search(r"\d+% of the state remains on the training device", said)


def test_an_edit_of_a_parameter_reaches_the_master():
    model, optimizer, engine = built(CPU)
    steps(model, optimizer, [0])
    with engine.gathered(writeback=True):
        model.transformer.wte.weight.data.fill_(0.25)
    slots = {slot.name: slot for bucket in engine.buckets for slot in bucket.slots}
    bucket = slots["transformer.wte.weight"].bucket
    row = next(row for row in bucket.rows if row.slot.name == "transformer.wte.weight")
    assert torch.equal(row.of(bucket.master), torch.full_like(row.tensor, 0.25))


def test_too_little_host_memory_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(device.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000})())
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
    write_group(tmp_path / "v2", memory__stat="anon 300\ninactive_file 700\nactive_file 100")
    assert available_host_bytes(tmp_path / "v2", membership) == 4700
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
    settings = None if settings is None else {"bucket_bytes": "20KiB", **settings}
    (entry, engine), own_step = engine_or_ddp(model, optimizer, settings), BucketStep.step

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
    gathers = [(each[LABEL].channel, each[STARTED]) for each in ended if each[LABEL].kind == "all-gather of parameters"]
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
    for plain, found in run_on_ranks(both_ways, settings={"stage": stage, **CPU}, writes=""):
        assert [index for index, _ in found.steps] == [index for index, _ in found.gathers] == found.buckets
        assert all(stepped <= sent for (_, stepped), (_, sent) in zip(found.steps, found.gathers))
        assert all(sent < stepped for (_, sent), (_, stepped) in zip(found.gathers, found.steps[1:]))
        assert found.losses == plain.losses


def test_rows_that_a_hook_edits_after_the_step_are_sent_again():
    for plain, found in run_on_ranks(both_ways, settings={"stage": 2, **CPU}, writes="hook behind"):
        # The step's own gathers come first, for a hook that reads parameters. `sends` compares the ranks' parameters at the end.
        assert [index for index, _ in found.gathers] == found.buckets
        assert found.losses == plain.losses


@pytest.mark.parametrize("writes", ["class", "hook ahead"])
def test_a_bucket_that_may_be_written_behind_its_step_is_sent_behind_the_whole_step(writes):
    for plain, found in run_on_ranks(both_ways, settings={"stage": 2, **CPU}, writes=writes):
        assert [index for index, _ in found.gathers] == found.buckets
        assert not found.steps
        assert found.losses == plain.losses


# ---- whole runs ----

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
def test_memory_grows_by_weights_gradients_and_the_window(tmp_path):
    plain, moved = measured({}, nvme(tmp_path))
    # One layer's gradient as autograd made it, and what a layer passes on: the same without offload.
    activations = plain["growth"] - plain["weights"] - plain["gradients"] - plain["state"]
    bound = moved["weights"] + moved["gradients"] + moved["window"]
    mib = {name: round(value / 2**20, 1) for name, value in moved.items()}
    print(f"\nMiB with NVMe: {mib}; without: {plain['growth'] / 2**20:.1f}; activations {activations / 2**20:.1f}")
    print(f"growth less activations {(moved['growth'] - activations) / 2**20:.1f}, bound {bound / 2**20:.1f}")
    assert moved["state"] >= 5 * moved["window"]
    assert 0 <= activations < 16 * 2**20
    assert moved["growth"] - activations <= bound
    # All rows of a save at a time, and read: pages of files, which the system takes back as it needs them.
    assert moved["saved"] == moved["state"]
    # AdamW's two moments.
    assert moved["written"] == moved["state"]
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
    for found in run_on_ranks(resumed_everywhere, world_size=world_size, path=str(tmp_path), stage=stage, **more):
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
        "cpu": "flag stage=2,offload.optimizer=cpu",
        "nvme": f"flag stage=2,offload.optimizer=nvme,offload.nvme_path={tmp_path / 'disk'}",
        "file": f"flag {ROOT / 'configs' / 'zero2_offload_cpu.yaml'}",
    }
    jobs = [{"door": door, "output_dir": str(tmp_path / name)} for name, door in doors.items()]
    for resumed in jobs[2:]:
        resumed |= {"resume": resume, "seed": 77}
    expected, moved, in_files, by_file = run_on_ranks(runs_in_turn, jobs=jobs)[0]
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
        [outcomes[kind]] = run_on_ranks(run, world_size=1, **arguments)
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


# ---- the folder of a run's files ----


def test_a_folder_is_removed_from_wherever_the_script_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("."))
    monkeypatch.chdir("/")
    folder.close()
    assert not list(tmp_path.iterdir())


def test_folders_of_other_users_are_left_alone(tmp_path, monkeypatch, capsys):
    theirs = RunFolder(tmp_path)
    dead = tmp_path / "hf_zero-run-1-0"
    dead.mkdir()
    user = os.getuid()
    monkeypatch.setattr(run_folder.os, "getuid", lambda: user + 1)
    ours = RunFolder(tmp_path)
    assert dead.is_dir() and theirs.path.is_dir() and not capsys.readouterr().err
    ours.close()
    monkeypatch.undo()
    theirs.close()


def a_link_to_nothing(shared: Path, victim: Path) -> None:
    (shared / "hf_zero-run-1-abc").symlink_to("/nowhere/at/all")


def a_link_to_a_folder(shared: Path, victim: Path) -> None:
    (shared / "hf_zero-run-1-abc").symlink_to(victim)


def a_file(shared: Path, victim: Path) -> None:
    (shared / "hf_zero-run-1-abc").touch()


def a_pipe(shared: Path, victim: Path) -> None:
    os.mkfifo(shared / "hf_zero-run-1-abc")


def a_linked_lock(shared: Path, victim: Path) -> None:
    dead = shared / "hf_zero-run-1-abc"
    dead.mkdir()
    (dead / "lock").symlink_to(victim / "lock")


PUT = [a_link_to_nothing, a_link_to_a_folder, a_file, a_pipe, a_linked_lock]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("put", PUT)
def test_what_others_put_into_a_shared_path_is_not_followed_and_refuses_no_run(put, tmp_path, capsys):
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir()
    victim.mkdir()
    for name in ("lock", "mine"):
        (victim / name).write_text("kept")
    put(shared, victim)
    folder = RunFolder(shared)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.close()
    assert not folder.path.exists() and os.path.lexists(shared / "hf_zero-run-1-abc")
    assert [(victim / name).read_text() for name in ("lock", "mine")] == ["kept", "kept"]
    assert ("could not be removed" in capsys.readouterr().err) == (put is a_linked_lock)


@pytest.mark.timeout(20)
def test_no_lock_of_anybodys_is_waited_for(tmp_path):
    held = [tmp_path / f".hf_zero-turn-{os.getuid()}", tmp_path / "hf_zero-run-1-abc" / "lock"]
    held[1].parent.mkdir()
    handles = [os.open(path, os.O_CREAT | os.O_RDWR) for path in held]
    for handle in handles:
        fcntl.flock(handle, fcntl.LOCK_EX)
    RunFolder(tmp_path).close()
    assert all(path.exists() for path in held)
    os.close(handles[1])
    RunFolder(tmp_path).close()
    assert not held[1].parent.exists()


@pytest.mark.parametrize("files", [[], ["lock"], ["bucket-0.state"], ["lock", "bucket-0.state"]])
def test_what_a_run_left_that_was_killed_at_any_moment_is_removed(files, tmp_path, capsys):
    left = tmp_path / "hf_zero-run-1-abc"
    left.mkdir()
    for name in files:
        (left / name).write_text("x" * (name != "lock"))
    RunFolder(tmp_path).close()
    assert not list(tmp_path.iterdir())
    assert ("removed" in capsys.readouterr().err) == ("bucket-0.state" in files)


@pytest.mark.timeout(60)
def test_runs_that_begin_and_end_at_once_take_nothing_from_each_other(tmp_path):
    def run(number: int) -> None:
        for turn in range(25):
            folder = RunFolder(tmp_path)
            (folder.path / "bucket-0.state").write_text(f"{number} {turn}")
            assert (folder.path / "lock").read_text() and (
                folder.path / "bucket-0.state"
            ).read_text() == f"{number} {turn}"
            folder.close()
            assert not folder.path.exists()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(8)))
    assert not list(tmp_path.iterdir())


def test_a_new_folder_that_another_process_takes_away_is_made_again(tmp_path, monkeypatch):
    stock, taken = fcntl.flock, []

    def takes_the_first(lock: int, kind: int) -> None:
        if not taken:
            [folder] = tmp_path.iterdir()
            taken.append(folder)
            (folder / "lock").unlink()
            folder.rmdir()
        stock(lock, kind)

    monkeypatch.setattr(run_folder.fcntl, "flock", takes_the_first)
    folder = RunFolder(tmp_path)
    assert folder.path != taken[0] and (folder.path / "lock").is_file()
    folder.close()
    assert not list(tmp_path.iterdir())
