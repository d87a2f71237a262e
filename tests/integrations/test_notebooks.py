"""Training from a notebook: hf_zero's launcher of fresh processes, and accelerate's launchers, which fork ranks."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, update_wrapper
from multiprocessing import current_process
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import debug_launcher, notebook_launcher
from accelerate_job import Texts, TextsModel, make_accelerator
from cells import slow
from launching import port_to_meet_on
from ranks import RankFailedError, run_alone
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainer_job import history, make_trainer

from hf_zero import ConfigError, ZeroEngine, ZeroPlugin
from hf_zero.integrations import notebook
from hf_zero.integrations.launcher import PARENT_VARIABLE

STEPS = 3


def plugin(folder: str, zero: str | None) -> list[float]:
    torch.manual_seed(0)
    accelerator = make_accelerator(f"plugin {zero}" if zero else "ddp")
    model = TextsModel(layers=2)
    loader = torch.utils.data.DataLoader(Texts(4 * 2 * STEPS), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def flag(folder: str, zero: str | None) -> list[float]:
    trainer = make_trainer(f"flag {zero}" if zero else "ddp", "gpt2", folder, max_steps=STEPS)
    trainer.train()
    return history(trainer)["losses"]


def callback(folder: str, zero: str | None) -> list[float]:
    trainer = make_trainer(f"callback {zero}" if zero else "ddp", "gpt2", folder, max_steps=STEPS)
    trainer.train()
    return history(trainer)["losses"]


def own_loop(folder: str, zero: str | None) -> list[float]:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = TextsModel(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], f"stage={zero}") if zero else None
    losses = own_steps(model if engine else DistributedDataParallel(model), optimizer)
    if engine:
        engine.close()
    return losses


def own_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for batch in torch.utils.data.DataLoader(Texts(4 * STEPS), batch_size=4):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def noted(train: Callable[[str, str | None], list[float]], folder: str, zero: str | None) -> None:
    """What each rank runs."""
    torch.set_num_threads(1)
    losses = train(folder, zero)
    rank = torch.distributed.get_rank()
    assert torch.distributed.get_world_size() == 2
    Path(folder, f"{zero}-{rank}.json").write_text(json.dumps(losses))


def launch(launcher: str, function: Callable[..., None]) -> None:
    """As a cell of a notebook does."""
    # Processes of the tests' may have no children else.
    current_process().daemon = False
    if launcher == "debug":
        debug_launcher(function)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ACCELERATE_USE_CPU", "true")
            # The tests' processes have imported peft, and so this: the launcher refuses a process that has.
            patch.delitem(sys.modules, "bitsandbytes", raising=False)
            notebook_launcher(function, num_processes=2, use_port=str(port_to_meet_on()))


def launch_door(launcher: str, train: Callable, folder: str, zero: str | None) -> None:
    # A launcher asks a function for its name.
    launch(launcher, update_wrapper(partial(noted, train, folder, zero), noted))


def alone(target: Callable[..., object], **arguments: object) -> None:
    run_alone(target, time_limit_s=120, keyword_arguments=arguments)


@pytest.mark.parametrize(
    ("launcher", "train", "zero"),
    [
        ("debug", plugin, "2"),
        ("notebook", own_loop, "3"),
        *(
            slow(launcher, train, zero)
            for launcher in ("debug", "notebook")
            for train in (plugin, flag, callback, own_loop)
            for zero in ("1", "2", "3")
        ),
    ],
)
def test_a_cell_of_a_notebook_has_ddps_losses(launcher, train, zero, tmp_path):
    for each in (None, zero):
        alone(launch_door, launcher=launcher, train=train, folder=str(tmp_path), zero=each)
    ours, stock = (
        [json.loads((tmp_path / f"{each}-{rank}.json").read_text()) for rank in (0, 1)] for each in (zero, None)
    )
    assert ours == stock and len(ours[0]) == STEPS


# ---- what goes wrong in notebooks ----


def engine_before(launcher: str) -> None:
    model = TextsModel(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], 2)
    own_steps(model, optimizer)
    launch(launcher, partial(own_steps, model, optimizer))
    engine.close()


def trainer_before(launcher: str, folder: str, door: str) -> None:
    launch(launcher, make_trainer(door, "gpt2", folder, max_steps=STEPS).train)


def test_an_engine_that_was_built_before_the_launch_does_not_train_alone_on_each_rank():
    with pytest.raises(
        RankFailedError, match=r"before a launcher forked process .* in the function that the launcher calls"
    ):
        alone(engine_before, launcher="debug")


@pytest.mark.slow
@pytest.mark.parametrize("door", ["flag 2", "callback 2"])
def test_a_trainer_that_was_built_before_the_launch_is_refused(door, tmp_path):
    with pytest.raises(RankFailedError, match="has 2 ranks, but this Accelerator was built before it and counts 1"):
        alone(trainer_before, launcher="debug", folder=str(tmp_path), door=door)
    # accelerate's own.
    with pytest.raises(RankFailedError, match="should only be initialized inside your training function"):
        alone(trainer_before, launcher="notebook", folder=str(tmp_path), door=door)


def test_a_fork_behind_cuda_is_refused_unless_there_is_no_gpu_or_it_trains_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    ZeroPlugin(stage=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="CUDA was used before a launcher forked this process"):
        ZeroPlugin(stage=2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    ZeroPlugin(stage=2)


@pytest.mark.slow
def test_what_a_notebook_imports_leaves_the_launcher_its_forks():
    """accelerate's launcher refuses where bitsandbytes, which may start CUDA, has been imported, as by transformers' Trainer."""
    names = "ConfigError, ZeroConfig, ZeroEngine, ZeroPlugin, engine_of"
    code = f"import sys; from hf_zero import {names}; ZeroPlugin(2); sys.exit('bitsandbytes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0


# ---- hf_zero.launch: fresh processes ----

CELL = """
import os
import hf_zero
FACTOR = 3

def times(number):
    return FACTOR * number

def train(number, fails):
    if fails:
        raise ValueError("no such number")
    print("rank", os.environ["RANK"], "counts")
    return {"product": times(number), "of": hf_zero.__name__}
"""
"""A cell of a notebook, whose functions are in no file."""


def in_forks(command: list[str], environment: dict[str, str]) -> int:
    """Runs two ranks as forks, which costs no new interpreter."""
    status = 0
    for rank in ("1", "0"):
        child = os.fork()
        if child == 0:
            sys.argv = list(command)
            os.environ |= {"RANK": rank, PARENT_VARIABLE: str(os.getppid())}
            try:
                notebook.main()
            except BaseException:
                os._exit(1)
            os._exit(0)
        status |= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status


def test_a_cells_function_is_called_by_value_and_brings_back_what_rank_0_returns(monkeypatch):
    monkeypatch.setattr(notebook, "_run", in_forks)
    cell = {"__name__": "__main__"}
    exec(CELL, cell)
    assert notebook.launch(cell["train"], (14, False), num_processes=2, cpu=True) == {"product": 42, "of": "hf_zero"}
    with pytest.raises(RuntimeError, match=r"rank 1 of hf_zero\.launch failed: ValueError: no such number; the"):
        notebook.launch(cell["train"], (14, True), num_processes=2, cpu=True)
    with pytest.raises(ConfigError, match="--num-processes is 0"):
        notebook.launch(cell["train"], (14, False), num_processes=0, cpu=True)
    with pytest.raises(ConfigError, match="it takes a function: hf_zero"):
        notebook.launch("train")


@pytest.fixture
def hears_interrupts():
    """A shell starts background commands with SIGINT ignored, and Python then leaves it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_the_launcher_starts_ends_it(hears_interrupts, monkeypatch):
    started = []
    start = subprocess.Popen

    def interrupted(*args, **kwargs):
        started.append(start(*args, **kwargs))
        # Ctrl-C before `Popen` has returned.
        os.kill(os.getpid(), signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        notebook._run([sys.executable, "-c", "import time; time.sleep(1000)"], {})
    assert started[0].returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_launchers_processes_have_ended_when_an_interrupted_call_ends(hears_interrupts, monkeypatch):
    monkeypatch.setattr(notebook, "_GRACE_S", 0.2)
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    rank = f"{ignores} print('waits', flush=True); time.sleep(1000)"
    launcher = f"import subprocess; {ignores} subprocess.run([{sys.executable!r}, '-c', {rank!r}])"
    before, seen = psutil.Process().children(recursive=True), set()

    def write(text):
        seen.update(psutil.Process().children(recursive=True))
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys.stdout, "write", write)
    with pytest.raises(KeyboardInterrupt):
        notebook._run([sys.executable, "-c", launcher], {})
    started = seen - set(before)
    assert len(started) == 2 and not any(notebook._is_alive(process) for process in started)


def test_a_rank_whose_launcher_ended_while_the_rank_started_ends(tmp_path):
    notebook._write(tmp_path / "call", (waits, ()))
    gone = subprocess.Popen(["true"])
    gone.wait()
    # A stand-in for the rank's start: the launcher's number is not that of this process, which is the parent.
    child = os.fork()
    if child == 0:
        sys.argv, os.environ[PARENT_VARIABLE] = ["rank", str(tmp_path)], str(gone.pid)
        notebook.main()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM


def waits() -> None:
    time.sleep(20)


SCRIPT = """
import hf_zero, signal, sys, time

def train(seconds, steps):
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(steps):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            accelerator.print("trains")
        time.sleep(seconds)
    accelerator.print("ends")
    return accelerator.num_processes, accelerator.zero_config.stage

def call(seconds, steps):
    # As a kernel, which goes on after an interrupt of a cell.
    try:
        print("starts", flush=True)
        print("returned", hf_zero.launch(train, (seconds, steps), num_processes=2, zero=2, cpu=True), flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)

if __name__ == "__main__":
    # A shell starts background commands with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            seconds, steps = sys.stdin.readline().split()
        except KeyboardInterrupt:
            continue
        call(float(seconds), int(steps))
"""
INTERRUPTS = 50
MARK = "HF_ZERO_TEST_KERNEL"
"""Environment variable of all processes that a kernel of the test starts, and of the processes that these start."""


class Kernel:
    """A process that calls `hf_zero.launch` for each line that it reads, as a notebook's kernel for each cell."""

    def __init__(self, script: Path, name: str):
        self._name = name
        environment = os.environ | {MARK: name, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def call(self, seconds: float, steps: int) -> None:
        self.process.stdin.write(f"{seconds} {steps}\n")
        self.process.stdin.flush()
        self.wait_for("starts")

    def wait_for(self, *words: str) -> str:
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if found := next((word for word in words if line.startswith(word)), None):
                return found
        raise AssertionError(f"no {words} in {''.join(seen)}")

    def started(self) -> list[psutil.Process]:
        """Returns the living processes that the kernel, or one of its processes, has started, wherever they hang in the tree."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._name and process.pid != self.process.pid:
                    found.append(process)
            except psutil.Error:
                continue
        return [process for process in found if notebook._is_alive(process)]


def left_after(kernel: Kernel, limit_s: float) -> list[str]:
    """Returns the command lines of the kernel's processes that are alive after the limit."""
    until = time.monotonic() + limit_s
    while (left := kernel.started()) and time.monotonic() < until:
        time.sleep(0.1)
    return [" ".join(process.cmdline()) for process in left]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_rank_outlives_an_interrupt_or_a_restart_of_the_kernel_at_any_moment(tmp_path):
    """Interrupts fall in the start-up, the training and the end of a call. Each third one is a restart: SIGKILL to the kernel."""
    script = tmp_path / "kernel.py"
    script.write_text(SCRIPT)
    moments, counts, orphans = random.Random(0), Counter(), []
    kernel = Kernel(script, f"{tmp_path} first")
    kernel.call(0, 2)
    began_s = time.monotonic()
    kernel.wait_for("trains")
    start_up_s = time.monotonic() - began_s
    assert kernel.wait_for("returned") and left_after(kernel, 0) == []
    for number in range(INTERRUPTS):
        phase, restarts = ("start-up", "training", "end")[number % 3], number % 9 in (2, 3, 7)
        is_impatient = moments.random() < 0.25
        kernel.call(0.05, 2 if phase == "end" else 100_000)
        if phase == "start-up":
            time.sleep(moments.uniform(0, start_up_s))
        else:
            kernel.wait_for("trains" if phase == "training" else "ends")
            time.sleep(moments.uniform(0, 2 if phase == "training" else 0.5))
        kernel.process.send_signal(signal.SIGKILL if restarts else signal.SIGINT)
        if restarts:
            kernel.process.wait(60)
            left = left_after(kernel, 60)
            kernel = Kernel(script, f"{tmp_path} {number}")
        else:
            if is_impatient and phase != "end":
                # Not at an end: the kernel may be outside of the call already.
                time.sleep(moments.uniform(0, 1))
                kernel.process.send_signal(signal.SIGINT)
            kernel.wait_for("interrupted", "returned")
            left = left_after(kernel, 60)
        counts[phase, "restart" if restarts else "Ctrl-C"] += 1
        orphans += [(number, phase, restarts, each) for each in left]
        print(
            f"interrupt {number}: {phase}, {'restart' if restarts else 'Ctrl-C'}, {len(left)} processes left",
            flush=True,
        )
    kernel.process.kill()
    kernel.process.wait()
    print(f"{INTERRUPTS} interrupts, {len(orphans)} orphans: {dict(counts)}")
    assert orphans == []
