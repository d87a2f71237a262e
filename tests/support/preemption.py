"""Runs ended by a signal, and their resumed runs, compared with an uninterrupted run.

    export PYTHONPATH=tests/support:scripts/bench
    python tests/support/preemption.py --trials 200 --at-once 2

A trial sends SIGTERM or SIGUSR1 to some ranks in one phase of a step, up to some milliseconds after the phase has begun, and then
resumes the run. Prints a table: steps made and not saved, runs that had to be killed, checkpoints with faults, resumed runs that
differ from the uninterrupted one in any bit, and seconds from the signal to the exit of the last rank.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import connection, get_context
from pathlib import Path

import ranks
import torch
from accelerate_job import Texts, TextsModel
from launching import SUPPORT, ending_as_a_script, port_to_meet_on
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from trainer_job import as_launched, make_trainer
from transformers import TrainerCallback

from hf_zero.checkpoint.verify import checkpoint_faults
from hf_zero.integrations import accelerator, signals, state_io, trainer_saves
from hf_zero.step.training_step import TrainingState, TrainingStep

STEPS, EVERY_SAVE, EVERY_EVALUATION = 9, 4, 3
PHASES = (*(state.name.lower() for state in TrainingState), "save")
DOORS = ("trainer", "accelerate")
PATIENCE_S = 150.0

_STARTS = threading.Lock()
"""A starting process reads the exit status of all others, which can only be read once, so one thread at a time may do this."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run and its signal.

    Attributes:
        step: the first step in which `phase` counts, from 0.
        struck: the ranks that get the signal; without any, the run is not interrupted.
        delay_s: from the phase's beginning to the signal.
        second: whether the signal is sent twice.
        by_epoch: Trainer evaluates and saves at the end of each epoch of five steps, instead of at a step interval.
        minutes: `checkpoint.every_minutes`, by a clock advanced by steps and saves; 0 saves at a step interval.
        killed_s: time by this clock at which all ranks are killed.
        cost_s: duration of a save.
    """

    door: str
    stage: int
    world_size: int
    accumulation: int = 1
    phase: str = "forward"
    step: int = 2
    struck: tuple[int, ...] = ()
    number: int = signal.SIGTERM
    delay_s: float = 0.0
    second: bool = False
    by_epoch: bool = False
    minutes: float = 0.0
    killed_s: float = 0.0
    cost_s: float = 0.0

    @property
    def save_steps(self) -> int:
        return STEPS + 1 if self.minutes else EVERY_SAVE


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a trial.

    Attributes:
        codes: exit statuses, None for a rank that had to be killed.
        resumed_codes: exit statuses of the resumed run.
        seconds: from the signal to the last rank's exit.
        lost: number of steps made that are in no checkpoint.
        faults: of checkpoints, and folders that are none.
        is_same: the resumed run has the uninterrupted run's log and parameters.
        said: stderr of all ranks.
    """

    trial: Trial
    codes: list[int | None]
    resumed_codes: list[int | None]
    seconds: float
    lost: int
    faults: list[str]
    is_same: bool
    said: str

    @property
    def fault_found(self) -> str | None:
        """Describes the first fault of the trial; None if the trial ended as expected."""
        trial = self.trial
        if None in [*self.codes, *self.resumed_codes]:
            return "hang"
        if set(self.codes) != {128 + trial.number} or set(self.resumed_codes) != {0}:
            return f"exit statuses {self.codes}, and {self.resumed_codes} when resumed"
        return "steps lost" if self.lost else "checkpoint" if self.faults else None if self.is_same else "resume"


class Strike:
    """Sends this rank its signal, once, when a phase begins."""

    def __init__(self, trial: Trial, folder: Path):
        self._trial, self._folder = trial, folder
        self._is_done = False

    def install(self) -> None:
        enter, plan = TrainingStep._enter, state_io.plan_rows

        def entering(step: TrainingStep, state: TrainingState) -> None:
            enter(step, state)
            self._look(state.name.lower(), step.log.step)

        def planning(*args, **kwargs):
            self._look("save", self._trial.step)
            return plan(*args, **kwargs)

        TrainingStep._enter, state_io.plan_rows = entering, planning

    def _look(self, phase: str, step: int) -> None:
        if phase == self._trial.phase and step >= self._trial.step and not self._is_done:
            self._is_done = True
            threading.Timer(self._trial.delay_s, self._send).start()

    def _send(self) -> None:
        (self._folder / f"struck {os.getpid()}").write_text(str(time.time()))
        os.kill(os.getpid(), self._trial.number)
        if self._trial.second:
            time.sleep(0.01)
            os.kill(os.getpid(), self._trial.number)


class FakeTime:
    """A clock advanced by each phase of a step and each save. At a trial's time, the clock kills the process."""

    now_s = 0.0

    @staticmethod
    def phase_s(step: int, phase: str) -> float:
        """Returns up to 40 seconds, the same in each run."""
        return 40 * random.Random(f"{step} {phase}").random()

    def install(self, trial: Trial) -> None:
        enter, seal = TrainingStep._enter, state_io.seal_state

        def entering(step: TrainingStep, state: TrainingState) -> None:
            enter(step, state)
            self._go_on(trial, self.phase_s(step.log.step, state.name))

        def sealing(*args, **kwargs) -> None:
            self._go_on(trial, trial.cost_s)
            seal(*args, **kwargs)

        TrainingStep._enter, trainer_saves.seal_state, accelerator.seal_state = entering, sealing, sealing
        signals.SaveClock = partial(signals.SaveClock, now_s=lambda: self.now_s, ran_s=0.0)

    def _go_on(self, trial: Trial, seconds: float) -> None:
        self.now_s += seconds
        if trial.killed_s and self.now_s >= trial.killed_s:
            os._exit(KILLED)


fake_time = FakeTime()
KILLED = 9


def note_step(folder: Path, step: int) -> None:
    with (folder / f"steps {os.environ['RANK']}").open("a") as file:
        file.write(f"{step}\n")
    with (folder / f"times {os.environ['RANK']}").open("a") as file:
        file.write(f"{fake_time.now_s}\n")


class NoteSteps(TrainerCallback):
    def __init__(self, folder: Path):
        self._folder = folder

    def on_optimizer_step(self, args, state, control, **kwargs):
        note_step(self._folder, state.global_step + 1)


def with_trainer(trial: Trial, folder: Path) -> dict:
    """Trains with dropout, a schedule, evaluations and saves; resumes by `checkpoint.resume: auto`."""
    when = "epoch" if trial.by_epoch else "steps"
    trainer = make_trainer(
        f"flag stage={trial.stage},checkpoint.resume=auto,checkpoint.every_minutes={trial.minutes},"
        # The clock advanced by saves belongs to one thread.
        f"checkpoint.async_save={str(not trial.minutes).lower()}",
        "gpt2",
        folder / "states",
        callbacks=[NoteSteps(folder)],
        max_steps=STEPS,
        gradient_accumulation_steps=trial.accumulation,
        per_device_train_batch_size=48 // (trial.world_size * trial.accumulation),
        eval_strategy=when,
        eval_steps=EVERY_EVALUATION,
        save_strategy=when,
        save_steps=trial.save_steps,
        enable_jit_checkpoint=True,
    )
    trainer.train()
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    logged = [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]
    return {"log": [e for e in logged if len(e) > 1], "state": whole(trainer.accelerator.get_state_dict(trainer.model))}


def with_accelerate(trial: Trial, folder: Path) -> dict:
    """Trains in a plain loop with a schedule, evaluations and saves, and one setting for the signals."""
    from accelerate import Accelerator

    from hf_zero import ZeroPlugin, last_good_state

    states = folder / "states"
    plugin = ZeroPlugin(
        stage=trial.stage, checkpoint={"on_signal": f"{states}/step_{{step}}", "every_minutes": trial.minutes}
    )
    accelerator = Accelerator(
        parallelism_config=plugin,
        gradient_accumulation_steps=trial.accumulation,
        step_scheduler_with_optimizer=False,
        cpu=True,
    )
    torch.manual_seed(0)
    model = TextsModel(layers=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    # Five steps per epoch, so some signals are sent at its end.
    rows = Texts(2 * trial.world_size * trial.accumulation * 5)
    model, optimizer, loader, evaluated = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=2), DataLoader(rows, batch_size=8)
    )
    step, log_file = 0, folder / f"log {accelerator.process_index}"
    state = last_good_state(accelerator, states)
    if state is not None:
        accelerator.load_state(state)
        scheduler.load_state_dict(torch.load(Path(state, "own schedule"), weights_only=True))
        step = int(state.rpartition("_")[2])
    accelerator.register_save_state_pre_hook(
        lambda _models, _weights, to: torch.save(scheduler.state_dict(), Path(to, "own schedule"))
    )
    while step < STEPS:
        done = step % 5 * trial.accumulation
        for at, batch in enumerate(accelerator.skip_first_batches(loader, done) if done else loader, start=done):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
                optimizer.zero_grad()
            with log_file.open("a") as file:
                file.write(json.dumps([step, at, loss.item()]) + "\n")
            if not accelerator.sync_gradients:
                continue
            note_step(folder, step + 1)
            scheduler.step()
            step += 1
            if step % EVERY_EVALUATION == 0:
                began_s = fake_time.now_s
                with torch.no_grad():
                    for held in evaluated:
                        model(**held)
                with (folder / f"evaluations {accelerator.process_index}").open("a") as file:
                    file.write(f"{fake_time.now_s - began_s}\n")
            if step % trial.save_steps == 0:
                accelerator.save_state(str(states / f"step_{step}"))
            if step == STEPS:
                break
    # A resumed run repeats some micro-batches of the killed one.
    lines = {tuple(line[:2]): line for line in map(json.loads, log_file.read_text().splitlines())}
    return {"log": list(lines.values()), "state": whole(accelerator.get_state_dict(model))}


def whole(state: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in state.items()}


JOBS = {"trainer": with_trainer, "accelerate": with_accelerate}


def main_of_rank(rank: int, trial: Trial, folder: str, port: int) -> None:
    """Runs a rank as its launcher would."""
    path = Path(folder)
    with (path / f"said {rank}").open("a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    as_launched(rank, trial.world_size)
    os.environ["MASTER_PORT"] = str(port)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with ending_as_a_script():
        if rank in trial.struck:
            Strike(trial, path).install()
        if trial.minutes:
            fake_time.install(trial)
        outcome = JOBS[trial.door](trial, path)
        (path / f"outcome {rank}").write_text(json.dumps(outcome))


def start(trial: Trial, folder: Path) -> tuple[list[int | None], float]:
    """Runs a trial's ranks; returns their exit statuses and the time of the last exit."""
    folder.mkdir(parents=True, exist_ok=True)
    context, port = get_context("forkserver"), port_to_meet_on()
    processes = [
        context.Process(target=main_of_rank, args=(rank, trial, str(folder), port), daemon=True)
        for rank in range(trial.world_size)
    ]
    deadline_s = time.monotonic() + PATIENCE_S
    with _STARTS:
        for process in processes:
            process.start()
    left = [process.sentinel for process in processes]
    while left and time.monotonic() < deadline_s:
        for sentinel in connection.wait(left, timeout=max(0.0, deadline_s - time.monotonic())):
            left.remove(sentinel)
    ended = time.time()
    with _STARTS:
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
    return codes, ended


@cache
def uninterrupted(trial: Trial, folder: Path) -> dict:
    """Returns the log and the parameters of an uninterrupted run."""
    own = folder / "-".join(map(str, (trial.door, trial.stage, trial.world_size, trial.accumulation, trial.by_epoch)))
    codes, _ = start(trial, own)
    assert set(codes) == {0}, said_by(own, trial)
    return json.loads((own / "outcome 0").read_text())


def without_signal(trial: Trial) -> Trial:
    """Returns the trial without a signal, the same for all trials of one kind of run."""
    return Trial(**{name: getattr(trial, name) for name in ("door", "stage", "world_size", "accumulation", "by_epoch")})


def said_by(folder: Path, trial: Trial) -> str:
    return "".join((folder / f"said {rank}").read_text() for rank in range(trial.world_size))


def run_trial(trial: Trial, folder: Path) -> Outcome:
    """Interrupts a run, checks its checkpoints, and resumes the run."""
    reference = uninterrupted(without_signal(trial), folder.parent)
    codes, ended = start(trial, folder)
    struck = [float(path.read_text()) for path in folder.glob("struck *")]
    said = said_by(folder, trial)
    found = [path for path in (folder / "states").glob("*") if path.is_dir() and path.name not in ("runs",)]
    numbered = {path: path.name.replace("-", "_").rpartition("_")[2] for path in found}
    faults = [f"{path.name}: {number}" for path, number in numbered.items() if not number.isdigit()]
    faults += [f"{path.name}: {fault}" for path in found for fault in checkpoint_faults(path, "zero")]
    taken = max(int(line) for path in folder.glob("steps *") for line in path.read_text().split())
    saved = max((int(number) for number in numbered.values() if number.isdigit()), default=0)
    resumed, _ = start(replace(trial, struck=()), folder)
    outcome = folder / "outcome 0"
    is_same = outcome.exists() and json.loads(outcome.read_text()) == reference
    return Outcome(
        trial=trial,
        codes=codes,
        resumed_codes=resumed,
        seconds=ended - min(struck, default=ended),
        lost=taken - saved,
        faults=faults,
        is_same=is_same,
        said=said if is_same else said_by(folder, trial),
    )


def killed(number: int, door: str, stage: int | None = None) -> Trial:
    """Returns the trial of a number, with all ranks killed at any time of the run."""
    chance = random.Random(f"killed {door} {number}")
    whole_s = sum(FakeTime.phase_s(step, state.name) for step in range(STEPS) for state in TrainingState)
    return Trial(
        door=door,
        stage=chance.choice((0, 1, 2, 3)) if stage is None else stage,
        world_size=2,
        minutes=chance.choice((3.0, 4.0, 5.0)),
        killed_s=chance.uniform(0.1, 1.0) * whole_s,
        cost_s=chance.uniform(5.0, 60.0),
    )


def lost_by_a_kill(trial: Trial, folder: Path) -> tuple[float, float, float]:
    """Kills a run and resumes it. Returns the lost seconds, the settings' minutes plus one step, and what no clock can foresee.

    Raises:
        AssertionError: a bit differs from the uninterrupted run, or more than one state of the clock is left.
    """
    codes, _ = start(trial, folder)
    assert set(codes) == {KILLED}, (trial, codes, said_by(folder, trial))
    # The times at which each step ended; the run began at 0.
    times = [0.0, *map(float, (folder / "times 0").read_text().split() if (folder / "times 0").exists() else ())]
    found = [path for path in (folder / "states").glob("*[-_][0-9]*") if path.name[0] != "."]
    assert len(found) <= 1 and not any(checkpoint_faults(path, "zero") for path in found), (trial, found)
    saved = max((int(path.name.replace("-", "_").rpartition("_")[2]) for path in found), default=0)
    codes, _ = start(replace(trial, killed_s=0.0), folder)
    assert set(codes) == {0}, (trial, codes, said_by(folder, trial))
    reference = uninterrupted(without_signal(trial), folder.parent)
    assert json.loads((folder / "outcome 0").read_text()) == reference, trial
    longest_s = max(after - before for before, after in zip(times, [*times[1:], trial.killed_s]))
    evaluations = folder / "evaluations 0"
    # A loop evaluates before it saves. The clock foresees evaluations as long as the longest one before.
    took = [0.0, *map(float, evaluations.read_text().split() if evaluations.exists() else ())]
    unforeseen_s = max((took[at] - max(took[:at]) for at in range(1, len(took))), default=0.0)
    return trial.killed_s - times[saved], 60 * trial.minutes + longest_s, max(0.0, unforeseen_s)


def drawn(number: int, door: str, worlds: Sequence[int], stages: Sequence[int]) -> Trial:
    """Returns the trial of a number, always the same."""
    chance = random.Random(f"{door} {number}")
    world_size = chance.choice(worlds)
    return Trial(
        door=door,
        stage=chance.choice(stages),
        world_size=world_size,
        accumulation=chance.choice((1, 2)),
        phase=PHASES[number % len(PHASES)],
        step=chance.randrange(1, 6),
        struck=tuple(sorted(chance.sample(range(world_size), chance.randrange(1, world_size + 1)))),
        number=chance.choice((signal.SIGTERM, signal.SIGUSR1)),
        delay_s=chance.choice((0.0, chance.random() * 0.02)),
        second=chance.random() < 0.25,
        by_epoch=door == "trainer" and chance.random() < 0.4,
    )


def prepare_forks() -> None:
    ranks.PRELOADED_MODULES += [
        "transformers.trainer_seq2seq",
        "hf_zero.integrations.arguments",
        "preemption",
        "warm_start",
    ]
    ranks.PRELOAD_FOLDERS.append(SUPPORT)
    ranks.start_forking()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="of both doors together")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--doors", nargs="+", default=list(DOORS), choices=DOORS)
    options = parser.parse_args()
    prepare_forks()
    numbers = range(options.first, options.first + options.trials)
    trials = [
        drawn(number // len(options.doors), options.doors[number % len(options.doors)], options.worlds, options.stages)
        for number in numbers
    ]
    with tempfile.TemporaryDirectory(prefix="preemption-") as folder:
        for trial in trials:
            uninterrupted(without_signal(trial), Path(folder))
        with ThreadPoolExecutor(options.at_once) as pool:
            started = [pool.submit(run_trial, trial, Path(folder) / str(at)) for at, trial in enumerate(trials)]
            outcomes = []
            for each in started:
                outcomes.append(each.result())
                if outcomes[-1].fault_found:
                    print(outcomes[-1].fault_found, outcomes[-1], file=sys.stderr, flush=True)
    show(outcomes)
    sys.exit(any(outcome.fault_found for outcome in outcomes))


def show(outcomes: list[Outcome]) -> None:
    """Prints one line per way in and phase, and one for all."""
    columns = ("door", "phase", "signals", "ranks struck", "steps lost", "hangs", "faulty checkpoints", "not bitwise")
    table = Table(*columns, "other faults", "seconds to exit: median", "most")
    rows: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault((outcome.trial.door, outcome.trial.phase), []).append(outcome)
    for (door, phase), found in [*sorted(rows.items()), (("both", "all"), outcomes)]:
        seconds = [outcome.seconds for outcome in found]
        figures = (
            len(found),
            sum(len(outcome.trial.struck) for outcome in found),
            sum(outcome.lost for outcome in found),
            sum(outcome.fault_found == "hang" for outcome in found),
            sum(bool(outcome.faults) for outcome in found),
            sum(not outcome.is_same for outcome in found),
            sum((outcome.fault_found or "").startswith("exit") for outcome in found),
            f"{statistics.median(seconds):.2f}",
            f"{max(seconds):.2f}",
        )
        table.add_row(door, phase, *map(str, figures))
    Console(width=170).print(table)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
