"""Runs that SIGTERM or SIGUSR1 to some ranks ends: what all agree on, what is saved, and how they go on."""

import io
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import ProjectConfiguration
from cells import slow
from launching import SUPPORT
from preemption import DOORS, STEPS, Trial, drawn, killed, lost_by_a_kill, prepare_forks, run_trial
from shared_ranks import on_shared_ranks, run_on_ranks
from split_runs import LENGTH, SplitJob, load, save_models
from torch.utils.data import DataLoader
from trainer_job import as_launched, make_trainer
from training import gpt2, gpt2_batch
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_zero import ConfigError, ZeroEngine, ZeroPlugin, last_good_state
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.config.zero import CheckpointConfig
from hf_zero.hooks.weak import WeakHook
from hf_zero.integrations.followed_loader import FollowedLoader, follow_loader
from hf_zero.integrations.save_clock import SAVE_DUE, TIME_UP, SaveClock
from hf_zero.integrations.signals import StopSignals

pytestmark = pytest.mark.timeout(170)

# An evaluation under way is left for the run that goes on; a rank is in the midst of stage 3's gathers.
SHORT = {
    "trainer": Trial(door="trainer", stage=2, world_size=2, phase="evaluate", step=3, struck=(1,)),
    "accelerate": Trial(
        door="accelerate", stage=3, world_size=2, phase="forward", struck=(0, 1), number=signal.SIGUSR1, second=True
    ),
}


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare_forks()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folder of runs that are compared with the same run that nothing ends."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.short_cells("trainer")
@pytest.mark.parametrize("door", DOORS)
def test_a_run_that_a_signal_ends_goes_on_bit_for_bit(door, runs):
    outcome = run_trial(SHORT[door], runs / f"{door} signal")
    assert outcome.fault_found is None, outcome
    name = signal.Signals(SHORT[door].number).name
    assert f"hf_zero: {name}: all ranks have saved step" in outcome.said
    assert outcome.said.count("all ranks have saved") == 1 and "after the signal" in outcome.said


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["backward", "step"])
def test_a_run_that_is_ended_behind_its_last_step_takes_no_step_more(phase, tmp_path):
    last = Trial(door="trainer", stage=1, world_size=2, phase=phase, step=STEPS - 1, struck=(0,), by_epoch=True)
    assert run_trial(last, tmp_path / "run").fault_found is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("door", DOORS)
def test_random_signals_lose_no_step_and_no_run_hangs(door, tmp_path):
    outcomes = [run_trial(drawn(number, door, (2, 3), (0, 1, 2, 3)), tmp_path / str(number)) for number in range(8)]
    assert [outcome for outcome in outcomes if outcome.fault_found is not None] == []


# ---- saves by the clock ----


def limits_broken(trials: list[Trial], folder: Path) -> list:
    """Trials that lost more than they may. Each resumed run is compared bit for bit; prints what the kills cost."""
    outcomes = [
        (trial, *lost_by_a_kill(trial, folder / f"{trial.door} kill {number}")) for number, trial in enumerate(trials)
    ]
    worst, lost_s, limit_s, _ = max(outcomes, key=lambda outcome: outcome[1] - outcome[2])
    evaluated = sum(lost > limit for _, lost, limit, _ in outcomes)
    print(
        f"{len(outcomes)} kills of {worst.door}, all resumed bit for bit. Nearest to its limit: {lost_s / 60:.2f} minutes "
        f"lost of {worst.minutes:g} and one step, {limit_s / 60:.2f}. Above it by an unforeseen evaluation: {evaluated}"
    )
    return [outcome for outcome in outcomes if outcome[1] > outcome[2] + outcome[3]]


@pytest.mark.short_cells("trainer")
@pytest.mark.parametrize("door", DOORS)
def test_a_killed_run_loses_the_minutes_that_it_may_and_goes_on_bit_for_bit(door, runs):
    assert limits_broken([killed(0, door, stage=2)], runs) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("door", DOORS)
def test_fifty_random_kills_lose_no_more_than_they_may(door, tmp_path):
    assert limits_broken([killed(number, door) for number in range(1, 51)], tmp_path) == []


def polled(settings: dict, *, step_s: float, cost_s: float, minutes: float) -> list[tuple[float, int]]:
    """What a clock asks for, and when in minutes, in a run whose steps and saves take so long."""
    now, step, asked = [0.0], [0], []
    clock = SaveClock(CheckpointConfig(**settings), lambda: step[0], decides=True, now_s=lambda: now[0], ran_s=60.0)
    while now[0] < 60 * minutes:
        now[0] += step_s
        number = clock.asked()
        if number:
            asked.append((now[0] / 60, number))
        if number == TIME_UP:
            break
        step[0] += 1
        if number == SAVE_DUE:
            with clock.saving():
                now[0] += cost_s
    return asked


def test_a_clock_leaves_room_for_a_save_and_measures_one_in_time(capfd):
    # The first save starts after half of the ten minutes, the others nine minutes after the last saved step: a save takes one.
    assert polled({"every_minutes": 10}, step_s=30, cost_s=60, minutes=26) == [(5, 1), (14, 1), (23, 1)]
    assert "hf_zero: a save takes 60.0 s, 10% of `checkpoint.every_minutes: 10`" in capfd.readouterr().err
    # Saves that take longer than there is time follow one another.
    assert polled({"every_minutes": 1}, step_s=30, cost_s=120, minutes=6) == [(0.5, 1), (3, 1), (5.5, 1)]
    assert "a crash can cost more than that" in capfd.readouterr().err
    # The run began one minute ago. The first save is at half time. At the end, there is time for two steps and a slow save.
    assert polled({"budget": "1h"}, step_s=60, cost_s=120, minutes=70) == [(29, SAVE_DUE), (54, TIME_UP)]
    assert polled({"budget": "20s"}, step_s=60, cost_s=120, minutes=70) == [(1, TIME_UP)]


def most_lost(chance: random.Random) -> tuple[float, float]:
    """The most seconds that a kill costs a loop that evaluates before it saves, and the most that it may cost."""
    every_s, cost_s, evaluation_s, pause = 600, chance.uniform(1, 120), chance.uniform(1, 240), chance.randint(1, 9)
    now, step, saved_s, pass_s, lost_s = [0.0], [0], 0.0, 0.0, 0.0
    settings = CheckpointConfig(every_minutes=every_s / 60)
    clock = SaveClock(settings, lambda: step[0], decides=True, now_s=lambda: now[0], ran_s=0.0)
    for step[0] in range(200):
        began_s = now[0]
        now[0] += chance.uniform(1, 60)
        number = clock.asked()
        stepped_s = now[0]
        now[0] += evaluation_s if step[0] % pause == 0 else 0
        clock.end_pass()
        pass_s = max(pass_s, now[0] - began_s)
        if number == SAVE_DUE:
            with clock.saving():
                now[0] += cost_s
        # A kill at the end of a pass or of a save costs the most. The first step is followed by an evaluation, which is measured.
        lost_s = max(lost_s, now[0] - saved_s)
        if number == SAVE_DUE:
            saved_s = stepped_s
    return lost_s, every_s + pass_s


def test_a_loop_that_evaluates_before_it_saves_loses_the_minutes_and_one_step_at_most():
    chance = random.Random(0)
    broken = [lost for lost in (most_lost(chance) for _ in range(500)) if lost[0] > lost[1]]
    assert broken == []


def loop_with_evaluations(rank: int, world_size: int, folder: str) -> float:
    """Trains with an evaluation after the second step; returns the longest time that the clock expects between step and save."""
    plugin = ZeroPlugin(stage=1, checkpoint={"every_minutes": 10})
    accelerator = Accelerator(parallelism_config=plugin, cpu=True, project_dir=folder)
    model = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters()), DataLoader(torch.ones(4, 4))
    )
    for number, batch in enumerate(loader):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            time.sleep(0.4)
    return accelerator.zero_stop.clock._delay_s


def test_the_time_of_an_evaluation_is_measured_by_its_loop(tmp_path):
    [delay_s] = run_on_ranks(loop_with_evaluations, world_size=1, folder=str(tmp_path))
    assert delay_s > 0.4


def test_time_is_left_for_an_evaluation_before_the_last_save():
    now, step = [0.0], [0]
    clock = SaveClock(CheckpointConfig(budget="1h"), lambda: step[0], decides=True, now_s=lambda: now[0], ran_s=0.0)
    while clock.asked() != TIME_UP:
        step[0] += 1
        # An evaluation, and the loop's own save after each.
        now[0] += 240
        with clock.saving():
            now[0] += 60
        clock.end_pass()
        now[0] += 30
    now[0] += 240 + 60
    assert 60 * 50 < now[0] <= 60 * 60


# ---- the agreement ----


def steps_until(engine: ZeroEngine, model, optimizer, steps: int) -> list[int]:
    """The signal that is due behind each of some steps."""
    generator, due = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        model(**gpt2_batch(generator, 2)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        due.append(engine.stop_due)
    return due


@on_shared_ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_ranks_know_of_one_ranks_signal_behind_the_same_step_and_send_no_message_more(rank, world_size, stage):
    sent = []
    for is_followed in (False, True):
        torch.manual_seed(0)
        model = gpt2(layers=1)
        optimizer = torch.optim.AdamW(model.parameters())
        engine = ZeroEngine(model, [optimizer], stage)
        asked = [0]
        if is_followed:
            engine.stop_when(lambda asked=asked: asked[0])
        due = steps_until(engine, model, optimizer, 2)
        asked[0] = signal.SIGTERM if rank == 1 and is_followed else 0
        due += steps_until(engine, model, optimizer, 1)
        assert due == [0, 0, signal.SIGTERM if is_followed else 0]
        sent.append({row.kind: row.calls for row in engine.comm_report().rows})
    assert sent[0] == sent[1]


def asked_between_outer_steps(rank: int, world_size: int) -> list[int]:
    torch.manual_seed(0)
    model = gpt2(layers=1)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], {"stage": 1, "comm": {"sync_every": 3, "shard_group_size": 1}})
    engine.stop_when(lambda: signal.SIGUSR1 if rank == 1 else 0)
    return steps_until(engine, model, optimizer, 4)


@pytest.mark.extra("wire")
def test_groups_that_step_apart_stop_behind_an_outer_step():
    assert run_on_ranks(asked_between_outer_steps) == [[0, 0, signal.SIGUSR1, 0]] * 2


def asked_of_a_split_model(rank: int, world_size: int, folder: str) -> list[int]:
    model = load(SplitJob(folder=folder))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], {"stage": 1})
    engine.stop_when(lambda: signal.SIGTERM if rank == 1 else 0)
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return [engine.stop_due]


def test_ranks_that_hold_one_copy_of_a_model_together_stop_together(splits_models, tmp_path):
    save_models(tmp_path)
    assert run_on_ranks(asked_of_a_split_model, folder=str(tmp_path)) == [[signal.SIGTERM]] * 2


# ---- the signals of a process ----

ALONE = SimpleNamespace(world_groups=SimpleNamespace(rank=0), world=SimpleNamespace(exchange=lambda value, _: [value]))


@pytest.fixture
def signals():
    noted = StopSignals()
    yield noted
    noted.ends = False
    noted.release()


def test_a_handler_that_was_there_is_called_behind_the_save_and_has_its_signal_back_without_one(signals, capfd):
    order = []
    former = signal.signal(signal.SIGUSR1, lambda number, _frame: order.append(number))
    try:
        signals.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.asked() == signal.SIGUSR1 and order == []
        with pytest.raises(SystemExit) as ended:
            signals.end(ALONE, signal.SIGUSR1, 7, lambda: order.append("saved") or Path("there"))
        assert ended.value.code == 128 + signal.SIGUSR1 and order == ["saved", signal.SIGUSR1]
        assert "SIGUSR1: all ranks have saved step 7 in there, and exit with status 138" in capfd.readouterr().err
        signals.ends = False
        signals.release()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert order == ["saved", signal.SIGUSR1, signal.SIGUSR1]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_a_save_that_fails_is_one_line_and_the_status_1(signals, capfd):
    def save() -> Path:
        raise CheckpointError("hf_zero: no space is left on the disk.")

    with pytest.raises(SystemExit) as ended:
        signals.end(ALONE, signal.SIGTERM, 7, save)
    assert ended.value.code == 1
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "hf_zero: SIGTERM, and step 7 is not saved, so all ranks exit with status 1. no space is left on the disk."
    ]


def test_a_forked_process_ends_by_sigterm_and_not_by_sigusr1(signals):
    signals.install()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signals.received == 0


# ---- plain loops of several kinds ----


class Count:
    """What a script counts, registered with its Accelerator."""

    def __init__(self):
        self.steps = 0

    def state_dict(self) -> dict:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict) -> None:
        self.steps = state["steps"]


def loop(rank: int, world_size: int, folder: str, kind: str, ends: bool) -> tuple[int, int, list[str]]:
    """A loop that rank 1 is struck in; the script's count, the Accelerator's, and the states."""
    as_launched(rank, world_size)
    named = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=kind == "named by accelerate")
    plugin = ZeroPlugin(stage=2, checkpoint={"budget": "1s"} if kind == "out of time" else {"on_signal": "auto"})
    # The time of a rank begins with its launcher's, which is this test's process here.
    os.environ["TORCHELASTIC_RUN_ID"] = "1"
    accelerator = Accelerator(parallelism_config=plugin, cpu=True, project_config=named)
    torch.manual_seed(0)
    model, count = torch.nn.Linear(4, 1), Count()
    accelerator.register_for_checkpointing(count)
    rows = torch.arange(4.0 * (13 if kind == "uneven" else 16)).view(-1, 4)
    loader = DataLoader(rows, batch_size=1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if kind not in ("unprepared", "out of time"):
        loader = accelerator.prepare(loader)
    state = last_good_state(accelerator)
    if state is not None:
        accelerator.load_state(state)
    uneven = accelerator.join_uneven_inputs([model], even_batches=False) if kind == "uneven" else nullcontext()
    with pytest.raises(SystemExit, match="143") if ends else nullcontext(), uneven:
        for batch in loader if ends else ():
            if rank == 1 and count.steps == 2 and kind != "out of time":
                os.kill(os.getpid(), signal.SIGTERM)
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            count.steps += 1
    return count.steps, accelerator.zero_steps, sorted(path.name for path in Path(folder, "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("kind", "steps", "name"),
    [
        ("named by accelerate", 3, "checkpoint_0"),
        slow("unprepared", 3, "checkpoint_3"),
        # Not prepared either.
        ("out of time", 1, "checkpoint_1"),
        # Ranks that are out of data take part in the others' steps: all stop when all are done.
        ("uneven", 7, "checkpoint_7"),
    ],
)
def test_a_loop_has_what_it_counts_behind_the_step_that_it_has_ended_behind(kind, steps, name, tmp_path):
    counts = run_on_ranks(loop, folder=str(tmp_path), kind=kind, ends=True)
    assert counts[0] == (steps, steps, [name])
    resumed = run_on_ranks(loop, folder=str(tmp_path), kind=kind, ends=False)
    assert resumed[0] == (steps, steps, [name])


# ---- settings that name no folder ----


def refused(rank: int, world_size: int, on_signal: str, naming: dict) -> str:
    plugin = ZeroPlugin(stage=1, checkpoint={"on_signal": on_signal})
    accelerator = Accelerator(parallelism_config=plugin, cpu=True, project_config=ProjectConfiguration(**naming))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError) as error:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return str(error.value)


def test_a_loop_whose_folder_is_not_known_is_refused_when_its_engine_is_built(tmp_path):
    [said] = run_on_ranks(refused, world_size=1, on_signal="auto", naming={})
    assert "Pass project_dir to the Accelerator" in said
    naming = {"automatic_checkpoint_naming": True, "project_dir": str(tmp_path)}
    [said] = run_on_ranks(refused, world_size=1, on_signal=f"{tmp_path}/step_{{step}}", naming=naming)
    assert "Set `checkpoint.on_signal: auto`" in said


def test_trainer_is_refused_a_folder_of_its_own(tmp_path):
    trainer = make_trainer(f"flag stage=1,checkpoint.on_signal={tmp_path}/step_{{step}}", "gpt2", tmp_path)
    with pytest.raises(ConfigError, match="Trainer saves in output_dir"):
        trainer.train()


def struck_before_training(rank: int, world_size: int, folder: str, kill_wait_s: float, pause_s: float) -> str:
    as_launched(rank, world_size)
    trainer = make_trainer("flag 1", "gpt2", folder, enable_jit_checkpoint=True)
    [callback] = [c for c in trainer.callback_handler.callbacks if isinstance(c, JITCheckpointCallback)]
    callback.jit_manager.kill_wait = kill_wait_s
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(pause_s)
    try:
        with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit):
            trainer.train()
    finally:
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.cancel()
    return said.getvalue()


@pytest.mark.parametrize(
    ("kill_wait_s", "pause_s"), [pytest.param(60, 0, id="just before"), slow(0, 0.2, id="long before")]
)
def test_a_signal_before_training_ends_trainers_run_behind_its_first_step(kill_wait_s, pause_s, tmp_path):
    times = {"kill_wait_s": kill_wait_s, "pause_s": pause_s}
    [said] = run_on_ranks(struck_before_training, world_size=1, folder=str(tmp_path), **times)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    [waited_s] = re.findall(r"status 143, ([\d.]+) s after the signal", said)
    assert float(waited_s) < 60


# ---- data loaders ----


def prepared(**settings) -> DataLoader:
    from accelerate.data_loader import prepare_data_loader

    return prepare_data_loader(DataLoader(torch.arange(8), batch_size=2, **settings), put_on_device=False)


class Notes:
    def __init__(self):
        self.entered = 0

    def batch(self):
        self.entered += 1
        return nullcontext()


def test_a_followed_loader_gives_the_same_batches_and_can_be_pickled():
    # A loader is pickled with accelerate's state, which has references to a former test's loader where that one was left early.
    GradientState._reset_state()
    notes, loader = Notes(), prepared()
    follow_loader(loader, WeakHook(notes, Notes.batch))
    assert isinstance(loader, FollowedLoader) and isinstance(loader, DataLoader)
    plain = [batch.tolist() for batch in prepared()]
    assert [batch.tolist() for batch in loader] == plain and notes.entered == len(plain) == 4
    assert [batch.tolist() for batch in pickle.loads(pickle.dumps(loader))] == plain


WORKERS = """
import os, signal, sys, torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from hf_zero.hooks.weak import WeakHook
from hf_zero.integrations.signals import StopSignals
from hf_zero.integrations.followed_loader import follow_loader
signals = StopSignals()
signals.install()
loader = prepare_data_loader(DataLoader(torch.arange(8), num_workers=1, prefetch_factor=1), put_on_device=False)
if sys.argv[1] == "followed":
    follow_loader(loader, WeakHook(None, None))
batches = iter(loader)
next(batches)
os.killpg(0, signal.SIGTERM)
seen = 1 + sum(1 for _ in batches)
sys.exit(0 if (seen, signals.received) == (8, signal.SIGTERM) else 3)
"""


@pytest.mark.slow
def test_workers_of_a_loader_outlive_a_signal_to_the_ranks_process_group():
    codes = [
        subprocess.run(
            [sys.executable, "-c", WORKERS, which], start_new_session=True, timeout=120, check=False
        ).returncode
        for which in ("followed", "plain")
    ]
    assert codes[0] == 0 and codes[1] != 0


# ---- torchrun, which passes SIGTERM on to the process groups of its workers, and restarts those that have failed ----


def launched(folder: Path, *flags: str) -> subprocess.Popen:
    settings = {"max_steps": 120, "enable_jit_checkpoint": True, "dataloader_num_workers": 1, "save_strategy": "steps"}
    settings |= {"save_steps": 1000, "logging_steps": 20}
    words = [
        *flags,
        SUPPORT / "trainer_job.py",
        "flag stage=2,checkpoint.resume=auto",
        "gpt2",
        folder,
        json.dumps(settings),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *map(str, words)]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "ACCELERATE_USE_CPU": "true"}
    said = (folder / "said").open("a")
    return subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)


def wait_for(run: subprocess.Popen, folder: Path, what: str, count: int = 1) -> None:
    """Waits until the ranks have said something so often."""
    deadline_s = time.monotonic() + 100
    while (folder / "said").read_text().count(what) < count:
        assert run.poll() is None and time.monotonic() < deadline_s, (folder / "said").read_text()[-4000:]
        time.sleep(0.05)


def status_of(run: subprocess.Popen, folder: Path) -> int:
    """The exit status of a run that is about to end."""
    try:
        return run.wait(100)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the run has not ended: {(folder / 'said').read_text()[-8000:]}")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_under_torchrun_goes_on_behind_a_signal_to_the_launcher_and_one_to_a_worker(tmp_path):
    run = launched(tmp_path)
    try:
        wait_for(run, tmp_path, "'loss'")
        run.terminate()
        assert status_of(run, tmp_path) != 0
        [first] = tmp_path.glob("checkpoint-*")
        run = launched(tmp_path, "--max-restarts", "1")
        wait_for(run, tmp_path, f"resumed from {first}")
        wait_for(run, tmp_path, "'loss'", 1 + (tmp_path / "said").read_text().count("'loss'"))
        psutil.Process(run.pid).children()[-1].send_signal(signal.SIGUSR1)
        assert status_of(run, tmp_path) == 0
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    said = (tmp_path / "said").read_text()
    assert "SIGTERM: all ranks have saved" in said and "SIGUSR1: all ranks have saved" in said
    assert "is killed by signal" not in said and "exited unexpectedly" not in said
    assert len(list(tmp_path.glob("checkpoint-*"))) >= 2 and (tmp_path / "outcome.json").exists()
