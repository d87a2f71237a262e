"""Training from a notebook: hf_zero's launcher of fresh processes, and accelerate's launchers, which fork ranks."""

import json
import os
import signal
import subprocess
import sys
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
    with pytest.raises(RankFailedError, match="has 2 ranks, and this Accelerator, which was there before, counts 1"):
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
            sys.argv, os.environ["RANK"] = list(command), rank
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


SCRIPT = """
import sys, time
import hf_zero

def train(seconds):
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    accelerator.print("has stepped")
    time.sleep(seconds)
    return accelerator.num_processes, accelerator.zero_config.stage

if __name__ == "__main__":
    print("returned", hf_zero.launch(train, (float(sys.argv[1]),), num_processes=2, zero=2, cpu=True))
"""
INTERRUPTS = 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ranks_train_with_the_engine_and_none_outlives_an_interrupt_or_a_restart_of_the_kernel(tmp_path):
    script = tmp_path / "cell.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    done = subprocess.run([*command, "0"], capture_output=True, text=True, timeout=300)
    assert "has stepped" in done.stdout and "returned (2, 2)" in done.stdout, done.stdout + done.stderr
    for number in range(INTERRUPTS):
        cell = subprocess.Popen([*command, "1000"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert any("has stepped" in line for line in cell.stdout)
        started = psutil.Process(cell.pid).children(recursive=True)
        assert len(started) >= 3
        cell.send_signal((signal.SIGINT, signal.SIGKILL)[number % 2])
        _, orphans = psutil.wait_procs(started, timeout=60)
        cell.wait(60)
        assert orphans == [], number
