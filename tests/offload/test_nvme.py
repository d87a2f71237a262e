"""State in files: the same trajectory as in memory, in the memory of a window, and what happens when the disk fails."""

import ctypes
import errno
import gc
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from shared_ranks import run_on_ranks
from torch import nn
from training import ELEMENTWISE, VOCABULARY, adamw_in_two_groups, fused_adamw, gpt2, steps

from hf_zero.allocation import allocate
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.mapped_tensors import mapped_tensors
from hf_zero.config import ConfigError
from hf_zero.device import in_units
from hf_zero.engine import room
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import announce
from hf_zero.layout.intervals import Interval
from hf_zero.offload import files, run_folder
from hf_zero.offload.files import ALIGNMENT, AlignedFile, Kind, OffloadError, StoredShard, aligned
from hf_zero.offload.host_memory import HostCores
from hf_zero.offload.run_folder import RunFolder
from hf_zero.offload.walk import Window
from hf_zero.read_ahead import ask_for

pytestmark = pytest.mark.timeout(180)


def nvme(path: Path, **more) -> dict:
    return {"offload": {"optimizer": "nvme", "nvme_path": str(path), **more}}


def built(offload: dict, stage: int = 2, make_optimizer=fused_adamw, **more):
    torch.manual_seed(0)
    model = gpt2()
    optimizer = make_optimizer(model)
    return (
        model,
        optimizer,
        ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "20KiB", **offload, **more}),
    )


def register_of(optimizer: torch.optim.Optimizer) -> list[dict]:
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs))


def state_of_engine(engine: ZeroEngine) -> dict[tuple[str, str], torch.Tensor]:
    return {(row.kind, row.name): row.tensor.clone() for row in engine.state.rows()}


@pytest.mark.parametrize("stage", [0, 2])
def test_between_steps_state_is_in_files_and_nowhere_else(stage, tmp_path, capsys):
    model, optimizer, engine = built(nvme(tmp_path), stage)
    steps(model, optimizer, [0] * 2)
    for state in register_of(optimizer):
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].untyped_storage().nbytes() == 4
            assert state[name].isnan().all()
        assert state["step"] == 2
    found = list(engine.tier.files.folder.path.glob("*.state"))
    assert len(found) == len(engine.buckets)
    held = sum(path.stat().st_size for path in found)
    assert held == sum(2 * aligned(4 * bucket.layout.shard_numel) for bucket in engine.buckets)
    report = engine.memory_report()
    assert report.traffic.held_bytes == held
    assert report.traffic.read_bytes_a_step == report.traffic.written_bytes_a_step == held
    rows = {row.kind: row for row in report.rows}
    assert rows["optimizer state"].where == "NVMe"
    assert report.total_bytes == sum(row.bytes for row in report.rows if row.kind != "optimizer state")
    announce(engine, "nobody")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "in files" in said and f"a rank reads and writes {in_units(2 * held)}" in said
    # If state is larger than host memory, only files are left.
    with mock.patch("hf_zero.integrations.announce.available_host_bytes", return_value=held - 1):
        announce(engine, "nobody")
    assert "cannot pay off" in said and "cannot pay off" not in capsys.readouterr().err
    assert "written by the last step" in report.table()


def test_hooks_and_schedulers_see_one_step(tmp_path):
    outcomes = []
    for offload in ({}, nvme(tmp_path)):
        model, optimizer, engine = built(offload)
        seen = []

        def halve(optimizer, *_, seen=seen):
            seen.append("before")
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            steps(model, optimizer, [0])
            scheduler.step()
        assert seen == ["before", "after"] * 3
        outcomes.append(weights_of(model))
        engine.close()
    assert same(*outcomes)


class Counting(torch.optim.SGD):
    """Keeps a counter in its group, as schedule-free optimizers do, and scales by it."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


def test_a_counter_in_the_group_counts_steps_and_not_buckets_also_behind_a_parents_hooked_step(tmp_path):
    # The first of a class has torch wrap its step in hooks, which the child's step calls.
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    outcomes = []
    for offload in ({}, nvme(tmp_path)):
        model, optimizer, engine = built(
            offload, make_optimizer=lambda model: Counting(model.parameters(), lr=0.1, momentum=0.9)
        )
        steps(model, optimizer, [0] * 3)
        assert len(engine.buckets) > 3
        assert optimizer.param_groups[0]["k"] == 3
        outcomes.append(weights_of(model))
        engine.close()
    assert same(*outcomes)


def test_gradients_of_whole_parameters_are_there_after_the_step(tmp_path):
    grads = []
    for offload in ({}, nvme(tmp_path)):
        model, optimizer, _ = built(offload, 0)
        torch.manual_seed(1)
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert same(*grads)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adam amsgrad"])
def test_the_optimizers_own_state_dict_has_the_values_and_takes_them_back(name, tmp_path):
    runs = []
    for offload in ({}, nvme(tmp_path)):
        model, optimizer, _ = built(offload, make_optimizer={"adamw": adamw_in_two_groups, **ELEMENTWISE}[name])
        steps(model, optimizer, [0])
        runs.append((model, optimizer, optimizer.state_dict()))
    plain, moved = (saved["state"] for _, _, saved in runs)
    assert plain.keys() == moved.keys()
    for index, state in plain.items():
        for kind, value in state.items():
            assert torch.equal(torch.as_tensor(moved[index][kind]), torch.as_tensor(value))
    for model, optimizer, saved in runs:
        optimizer.load_state_dict(saved)
        steps(model, optimizer, [0])
    assert same(*[weights_of(model) for model, _, _ in runs])


def test_a_look_a_save_and_the_end_have_the_values(tmp_path):
    outcomes = []
    for offload in ({}, nvme(tmp_path)):
        model, optimizer, engine = built(offload)
        steps(model, optimizer, [0])
        looked = engine.full_state(model.transformer.wte.weight)
        outcomes.append((looked, state_of_engine(engine)))
        folder = engine.tier.files.folder.path if offload else None
        engine.close()
        assert same([looked["exp_avg"]], [optimizer.state[model.transformer.wte.weight]["exp_avg"]])
    assert not folder.exists()
    (plain, plain_rows), (moved, moved_rows) = outcomes
    assert plain.keys() == moved.keys()
    assert all(torch.equal(plain[kind], moved[kind]) for kind in plain)
    assert plain_rows.keys() == moved_rows.keys()
    assert all(torch.equal(plain_rows[key], moved_rows[key]) for key in plain_rows)


def test_later_saves_have_later_values(tmp_path):
    outcomes = []
    for offload in ({}, nvme(tmp_path)):
        model, optimizer, engine = built(offload)
        found = []
        for _ in range(3):
            steps(model, optimizer, [0])
            found.append(state_of_engine(engine))
        outcomes.append(found)
        engine.close()
    for plain, moved in zip(*outcomes):
        assert all(torch.equal(plain[key], moved[key]) for key in plain)


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_a_vocabulary_grows_with_state_elsewhere(kind, tmp_path):
    outcomes = []
    for offload in ({}, nvme(tmp_path) if kind == "nvme" else {"offload": {"optimizer": "cpu"}}):
        model, optimizer, engine = built(offload)
        steps(model, optimizer, [0])
        torch.manual_seed(3)
        engine.resize_embeddings(VOCABULARY + 16)
        steps(model, optimizer, [0] * 2)
        outcomes.append((weights_of(model), state_of_engine(engine)))
        engine.close()
    assert same(outcomes[0][0], outcomes[1][0])
    assert all(torch.equal(outcomes[0][1][key], outcomes[1][1][key]) for key in outcomes[0][1])
    assert not list(tmp_path.glob("hf_zero-run-*"))


def test_edits_reach_masters_in_files(tmp_path):
    outcomes = []
    for offload in ({}, nvme(tmp_path)):
        model, optimizer, engine = built(offload, param_dtype="bfloat16")
        steps(model, optimizer, [0])
        with engine.gathered(writeback=True):
            model.transformer.wte.weight.data.mul_(0.5)
        with torch.no_grad():
            model.transformer.wpe.weight.add_(1.0)
        steps(model, optimizer, [0])
        outcomes.append((weights_of(model), state_of_engine(engine)))
        engine.close()
    assert same(outcomes[0][0], outcomes[1][0])
    assert all(torch.equal(outcomes[0][1][key], outcomes[1][1][key]) for key in outcomes[0][1])


def test_masters_in_files_are_read_and_written_for_edits_only(tmp_path):
    model, optimizer, engine = built(nvme(tmp_path), param_dtype="bfloat16")
    steps(model, optimizer, [0])
    moved = lambda: [(shard.read_bytes, shard.written_bytes) for shard in engine.tier.files.shards]  # noqa: E731
    before = moved()
    engine.state.follow_edits()
    assert moved() == before
    with torch.no_grad():
        model.transformer.wpe.weight.add_(1.0)
    engine.state.follow_edits()
    assert sum(now != then for now, then in zip(moved(), before)) == 1
    engine.close()


# Disks


def test_direct_io_refused_by_the_file_system_is_ordinary_io(monkeypatch, tmp_path):
    stock = os.open

    def refusing(path, flags, *rest, **keywords):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return stock(path, flags, *rest, **keywords)

    monkeypatch.setattr(files.os, "open", refusing)
    file = AlignedFile(tmp_path / "x", ALIGNMENT)
    assert not file.is_direct
    monkeypatch.undo()
    model, optimizer, engine = built(nvme(tmp_path))
    steps(model, optimizer, [0])
    assert all(shard.file.is_direct for shard in engine.tier.files.shards) or sys.platform != "linux"


def test_another_file_system_than_the_output_will_do():
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no second file system: /dev/shm cannot be written")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        outcomes = []
        for offload in ({}, nvme(Path(folder))):
            model, optimizer, engine = built(offload)
            steps(model, optimizer, [0] * 2)
            outcomes.append(weights_of(model))
            engine.close()
        assert same(*outcomes)


def test_paths_that_cannot_be_used_are_named(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"nvme_path` is '.*missing', which is not a folder on this host"):
        built(nvme(tmp_path / "missing"))
    with pytest.raises(
        ConfigError, match=r"nvme_path` is '/proc', but no folder for this run could be created.*Name a fold"
    ):
        # Whoever runs the tests: only root may write there at all.
        with monkeypatch.context() as as_root:
            as_root.setattr("hf_zero.offload.run_folder.os.access", lambda *_: True)
            built(nvme(Path("/proc")))
    monkeypatch.setattr("hf_zero.offload.run_folder.os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="which this user cannot write to"):
        built(nvme(tmp_path))


def test_too_small_a_disk_is_refused_before_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setattr(room, "free_disk_bytes", lambda _: 1000)
    with pytest.raises(OSError, match=r"needs .* GiB below .* \(\d+ bytes\) too little"):
        built(nvme(tmp_path))


def test_a_disk_that_is_full_when_files_are_made_is_an_error_with_path_and_shortfall(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=rf"{tmp_path}.*bucket-0.state needs [\d.]+ \w+, .* free \(No space left"):
        built(nvme(tmp_path))


def test_a_disk_that_fails_in_mid_step_ends_the_run_with_a_reason(tmp_path):
    model, optimizer, engine = built(nvme(tmp_path))
    steps(model, optimizer, [0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ALIGNMENT, before[1]))
    try:
        with pytest.raises(
            OffloadError, match=r"bucket-\d+.state: only \d+ of \d+ bytes .* could be written .*resume from the"
        ):
            steps(model, optimizer, [0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    # The disk is well again, and the state is not.
    with pytest.raises(OffloadError, match="an earlier step of this run failed"):
        steps(model, optimizer, [0])
    with pytest.raises(OffloadError, match="an earlier step of this run failed"):
        list(engine.state.rows())


def with_a_disk_that_fails_on_one_rank(rank: int, world_size: int, path: str) -> list[str]:
    model, optimizer, engine = built(nvme(Path(path)))
    steps(model, optimizer, [0])
    if rank == 1:

        def fail(_):
            raise OffloadError(errno.EIO, "hf_zero: the disk of one rank is broken")

        engine.tier.files.shards[1].write = fail
    said = []
    for _ in range(2):
        with pytest.raises(OffloadError) as caught:
            steps(model, optimizer, [0])
        said.append(str(caught.value))
    return said


def test_a_disk_that_fails_on_one_rank_ends_all_with_that_ranks_reason(tmp_path):
    (here, later_here), (there, later_there), (other, _) = run_on_ranks(
        with_a_disk_that_fails_on_one_rank, world_size=3, path=str(tmp_path)
    )
    assert "on rank 1: hf_zero: the disk of one rank is broken" in here == other
    assert "hf_zero: the disk of one rank is broken" in there
    assert "on rank" not in there
    assert "an earlier step of this run failed" in later_here
    assert "an earlier step of this run failed" in later_there


def test_a_file_that_was_cut_between_steps_is_an_error(tmp_path):
    model, optimizer, engine = built(nvme(tmp_path))
    steps(model, optimizer, [0])
    path = max(engine.tier.files.folder.path.glob("*.state"), key=lambda path: path.stat().st_size)
    os.truncate(path, ALIGNMENT)
    with pytest.raises(OffloadError, match="shorter than it was"):
        list(engine.state.rows())
    with pytest.raises(OffloadError, match=rf"{path}: .* could be read \(the file is shorter than it was\)"):
        steps(model, optimizer, [0])


def flip_a_bit_in(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        [byte] = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


CHANGED = r"bucket-\d+.state: the \d+ bytes at \d+ differ from the written bytes: .* resume from the last checkpoint"


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("more", [{}, {"params": "nvme"}])
@pytest.mark.parametrize("moments", ["32bit", "8bit"])
def test_a_bit_that_flips_in_a_file_ends_the_run_at_its_next_step_and_reaches_no_checkpoint(
    moments, more, where, tmp_path
):
    stage = 3 if "params" in more else 2
    model, optimizer, engine = built({**nvme(tmp_path, **more), "stage": stage, "moments": moments})
    steps(model, optimizer, [0] * 2)
    shard = engine.tier.files.shards[-1]
    [offset, kind] = list(shard._regions.values())[-1]
    place = {"first": 0, "middle": kind.nbytes // 2, "last": kind.nbytes - 1}[where]
    flip_a_bit_in(shard.file.path, offset + place)
    with pytest.raises(OffloadError, match=CHANGED):
        for row in engine.state.rows():
            row.tensor.detach().sum()
    with pytest.raises(OffloadError, match=CHANGED):
        steps(model, optimizer, [0])


def test_a_bit_that_flips_in_a_file_of_parameters_ends_the_next_forward(tmp_path):
    settings = {"stage": 3, "offload": {"params": "nvme", "nvme_path": str(tmp_path)}}
    model, optimizer, _ = built(settings)
    steps(model, optimizer, [0])
    path = max(filter(Path.is_file, tmp_path.rglob("*")), key=lambda path: path.stat().st_size)
    flip_a_bit_in(path, 100)
    with pytest.raises(OffloadError, match="differ from the written bytes"):
        steps(model, optimizer, [0])


def host_bytes(nbytes: int) -> torch.Tensor:
    return allocate(nbytes, torch.uint8, torch.device("cpu"))


def test_a_read_in_a_thread_finds_all_of_a_write_or_nothing(tmp_path, monkeypatch):
    shard = StoredShard(tmp_path / "x.state", (Kind("a", torch.float32, 1000),))
    new, read = host_bytes(shard.nbytes).fill_(1), host_bytes(shard.nbytes)
    shard.write(host_bytes(shard.nbytes).zero_())
    stock, half_way, goes_on = shard.file.write, threading.Event(), threading.Event()

    def slow_write(*arguments) -> None:
        half_way.set()
        assert goes_on.wait(30)
        stock(*arguments)

    monkeypatch.setattr(shard.file, "write", slow_write)
    with ThreadPoolExecutor(2) as threads:
        written = threads.submit(shard.write, new)
        assert half_way.wait(30)
        # A fetch of a layer reads in a thread while the script edits the parameters.
        found = threads.submit(shard.read, read)
        with pytest.raises(TimeoutError):
            found.result(0.3)
        goes_on.set()
        written.result(30)
        found.result(30)
    assert torch.equal(read, new)


def test_each_read_of_what_is_changed_in_a_file_is_refused_and_no_other(tmp_path):
    numel = 600_000
    shard = StoredShard(tmp_path / "x.state", (Kind("a", torch.float32, 10), Kind("b", torch.float32, numel)))
    buffer = host_bytes(shard.nbytes)
    # What nobody has written is of no value.
    flip_a_bit_in(shard.file.path, 5)
    shard.read(buffer)
    buffer.zero_()
    shard.write(buffer)
    shard.write_part("b", Interval(599_990, numel), torch.ones(10))
    assert shard.read_part("b", Interval(599_980, numel)).tolist() == [0.0] * 10 + [1.0] * 10
    flip_a_bit_in(shard.file.path, aligned(40) + 4 * 450_000)
    assert shard.read_part("a", Interval(0, 10)).sum() == 0 and shard.mapped_part("b", Interval(0, 1000)).sum() == 0
    reads = (
        lambda: shard.read(buffer),
        lambda: shard.read_region("b", host_bytes(shard.region_bytes("b"))),
        lambda: shard.read_part("b", Interval(449_000, 449_001)),
        lambda: shard.mapped_part("b", Interval(449_000, 449_001)),
        lambda: shard.write_part("b", Interval(449_000, 449_001), torch.ones(1)),
    )
    for read in reads:
        with pytest.raises(OffloadError, match=r"x.state: the \d+ bytes at \d+ differ from the written bytes"):
            read()


def test_a_run_goes_on_without_the_names_of_its_files(tmp_path, monkeypatch):
    """The script goes to another folder, and somebody clears the disk's. What is open stays."""
    (tmp_path / "disk").mkdir()
    outcomes = []
    for offload in ({}, nvme(Path("disk"))):
        monkeypatch.chdir(tmp_path)
        model, optimizer, engine = built(offload)
        monkeypatch.chdir("/")
        if offload:
            shutil.rmtree(tmp_path / "disk")
        steps(model, optimizer, [0])
        outcomes.append((weights_of(model), list(state_of_engine(engine).values())))
        engine.close()
    assert same(outcomes[0][0], outcomes[1][0]) and same(outcomes[0][1], outcomes[1][1])


def test_two_runs_on_one_path_do_not_meet(tmp_path):
    outcomes, engines = [], []
    for _ in range(2):
        model, optimizer, engine = built(nvme(tmp_path))
        steps(model, optimizer, [0])
        engines.append((model, optimizer, engine))
    for _ in range(2):
        for model, optimizer, _ in engines:
            steps(model, optimizer, [0])
    outcomes = [weights_of(model) for model, _, _ in engines]
    assert same(*outcomes)
    assert len({engine.tier.files.folder.path for _, _, engine in engines}) == 2
    for _, _, engine in engines:
        engine.close()
    assert not list(tmp_path.glob("hf_zero-run-*"))


HOLD = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock
from hf_zero.offload.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
(folder.path / "bucket-0.state").write_bytes(bytes(4096))
print(folder.path, flush=True)
time.sleep(60)
"""


def test_a_living_runs_folder_stays_and_a_killed_ones_is_removed_with_a_message(tmp_path, capsys):
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        theirs = Path(child.stdout.readline().strip())
        RunFolder(tmp_path).close()
        assert theirs.is_dir()
        assert "removed" not in capsys.readouterr().err
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert (theirs / "bucket-0.state").is_file()
    RunFolder(tmp_path).close()
    assert not theirs.exists()
    said = capsys.readouterr().err
    assert f"removed {theirs}" in said
    assert f'"pid": {child.pid}' in said


# The window


def stored(tmp_path: Path, count: int) -> list[StoredShard]:
    shards = [
        StoredShard(tmp_path / f"{i}.state", (Kind("a", torch.float32, 1000), Kind("b", torch.bfloat16, 1000)))
        for i in range(count)
    ]
    for i, shard in enumerate(shards):
        buffer = torch.zeros(shard.nbytes, dtype=torch.uint8)
        shard.views(buffer)["a"].fill_(i)
    return shards


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_walk_keeps_what_is_left_in_its_buffers(size, tmp_path):
    shards = stored(tmp_path, 7)
    window = Window(size, HostCores(1))
    for turn in range(3):
        seen = []
        for shard, buffer in window.walk(shards):
            views = shard.views(buffer)
            assert (views["a"] == turn * (shards.index(shard) + 1)).all()
            views["a"].add_(shards.index(shard) + 1)
            views["b"].fill_(turn)
            seen.append(shard)
        assert seen == shards
    assert shards[0].written_bytes == 3 * shards[0].nbytes
    assert window.nbytes(shards) == (min(size, 6) + 1) * shards[0].nbytes


def test_the_next_shards_are_read_while_one_is_at_hand(tmp_path):
    shards = stored(tmp_path, 4)
    read = threading.Event()
    stock = shards[2].read
    shards[2].read = lambda buffer: (stock(buffer), read.set())
    for shard, _ in Window(2, HostCores(1)).walk(shards):
        if shard is shards[0]:
            assert read.wait(10), "the third was not read while the first was at hand"


def test_a_failed_write_ends_the_walk_and_leaves_no_thread_at_work(tmp_path):
    shards = stored(tmp_path, 4)

    def fail(_):
        raise OffloadError(errno.EIO, "hf_zero: broken")

    shards[1].write = fail
    with pytest.raises(OffloadError, match="broken"):
        for _ in Window(1, HostCores(1)).walk(shards):
            pass


@pytest.mark.timeout(20)
def test_a_folder_that_is_collected_while_another_is_made_is_removed_and_waits_for_nothing(tmp_path, monkeypatch):
    """An engine that was dropped without `close()` goes whenever the garbage collector runs."""
    stock = run_folder._remove_dead

    def collects_first(parent):
        gc.collect()
        stock(parent)

    cycle = [RunFolder(tmp_path)]
    cycle.append(cycle)
    dropped = cycle[0].path
    monkeypatch.setattr(run_folder, "_remove_dead", collects_first)
    del cycle
    made = RunFolder(tmp_path)
    assert not dropped.exists() and made.path.exists()
    made.close()
    assert list(tmp_path.iterdir()) == []


# ---- pages of mapped files ----

NUMEL = 8 << 20
"""Elements of the file: 32 MiB, more than any disk's read-ahead."""


def forgotten_file(folder: Path) -> Path:
    path = folder / "weights.safetensors"
    save_file({"weight": torch.arange(NUMEL, dtype=torch.float32)}, path)
    handle = os.open(path, os.O_RDWR)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    return path


def bytes_in_memory(values: torch.Tensor) -> int:
    """Of the pages on which a mapped tensor lies, those that have been read."""
    begin = values.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = values.data_ptr() + values.nbytes - begin
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture
def far(tmp_path):
    """The second half of the file, where no reading of its header comes to."""
    values = mapped_tensors(forgotten_file(tmp_path))["weight"][NUMEL // 2 :]
    assert bytes_in_memory(values) == 0
    return values


def test_single_values_cost_a_page_each(far):
    at = torch.arange(0, len(far), len(far) // 16)
    assert torch.equal(far[at], NUMEL // 2 + at.float())
    assert 0 < bytes_in_memory(far) <= 16 * mmap.PAGESIZE


def test_what_is_asked_for_is_read_and_what_lies_beside_it_is_not(far):
    own = far[len(far) // 4 : len(far) // 2]
    ask_for(own)
    assert torch.equal(own, own[0] + torch.arange(len(own), dtype=torch.float32))
    assert 0 < bytes_in_memory(far) <= own.nbytes + 2 * mmap.PAGESIZE


def test_all_that_is_asked_for_comes_without_being_touched(far):
    ask_for(far)
    until_s = time.monotonic() + 20
    while bytes_in_memory(far) < far.nbytes and time.monotonic() < until_s:
        time.sleep(0.01)
    assert bytes_in_memory(far) >= far.nbytes


@pytest.mark.parametrize("values", [torch.ones(3), torch.empty(0), torch.ones(4, 4).t()], ids=["3", "none", "strided"])
def test_memory_of_other_kinds_keeps_its_values(values):
    ask_for(values)
    assert torch.equal(values, torch.ones_like(values))


def test_tensors_have_their_shapes_and_values_and_a_damaged_file_is_refused(tmp_path):
    tensors = {
        "matrix": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2, dtype=torch.int64),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    mapped = mapped_tensors(path)
    assert mapped.keys() == tensors.keys()
    assert all(
        torch.equal(mapped[name], tensors[name]) and mapped[name].dtype == tensors[name].dtype for name in tensors
    )
    mapped["matrix"].zero_()
    assert torch.equal(load_file(path)["matrix"], tensors["matrix"])
    for size in (path.stat().st_size - 1, 4, 0):
        os.truncate(path, size)
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read .*header"):
            mapped_tensors(path)
