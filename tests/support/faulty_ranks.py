"""Runs in which one rank stops, ends, or makes a call without the others, and the ends of all ranks.

All runs are parallel. Their ranks are forked from one process with all imports, and end like scripts: through Python's own exit,
with its hooks.
"""

import atexit
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from launching import port_to_meet_on
from ranks import run_alone
from torch import nn
from training import gpt2, gpt2_batch
from transformers import Trainer, TrainerCallback

import hf_zero.integrations.arguments  # noqa: F401
from hf_zero import ZeroEngine, ZeroPlugin, ZeroTrainingArguments, engine_of

FAULTY = 1
"""The rank with the fault."""
AT_STEP = 3
LONE_SAVES = ("lone save of a callback", "saves of two steps")
"""Saves of Trainer by a callback on some ranks only, or at different steps."""
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        way: "accelerate" or "engine": a loop with accelerate, or with the engine only; "trainer".
        limit_s, late_s: `comm.timeout_s`, `comm.late_s`.
        limits_group: `limit_s` is set for the process group, and neither setting for the engine.
        own_store: rank 0 keeps the store, as without torchrun.
        patience_s: time limit for its ranks.
    """

    stage: int
    fault: str
    world_size: int = 2
    way: str = "accelerate"
    limit_s: float = 8.0
    late_s: float = 120.0
    limits_group: bool = False
    own_store: bool = False
    patience_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one rank.

    Attributes:
        code: exit code, negative for a signal; None if the rank had to be killed.
        seconds: time since the fault.
        said: stderr.
        told: the error file for the launcher.
    """

    code: int | None
    seconds: float
    said: str
    told: str


def train(rank: int, run: Run, folder: Path) -> None:
    WAYS[run.way](rank, run, folder)
    # Only reached if training survived the fault.
    print("trained to the end", file=sys.stderr)


def settings_of(run: Run) -> dict:
    comm = {} if run.limits_group else {"timeout_s": run.limit_s, "late_s": run.late_s}
    every = {"check_replicas_every": 2} if run.fault == "diverged replica" else {}
    return {"stage": run.stage, "comm": comm, **every}


def group_limit_of(run: Run) -> dict[str, timedelta]:
    return {"timeout": timedelta(seconds=run.limit_s)} if run.limits_group else {}


def seed_of(rank: int, run: Run) -> int:
    return rank if run.fault == "different seeds" else 0


def model_of(run: Run) -> nn.Module:
    model = gpt2()
    if run.fault == "diverged replica":
        model.transformer.wpe.requires_grad_(False)
    return model


def begin_fault(rank: int, run: Run, accelerator: Accelerator | None, model: nn.Module, folder: Path) -> bool:
    """Commits the fault; returns whether this rank has to leave its loop."""
    if rank == FAULTY:
        (folder / "fault").write_text(str(time.time()))
    return FAULTS[run.fault](rank, accelerator, model, folder) is True


def with_accelerate(rank: int, run: Run, folder: Path) -> None:
    handlers = [InitProcessGroupKwargs(**limit)] if (limit := group_limit_of(run)) else []
    accelerator = Accelerator(cpu=True, parallelism_config=ZeroPlugin(**settings_of(run)), kwargs_handlers=handlers)
    torch.manual_seed(seed_of(rank, run))
    model = model_of(run)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        if step == AT_STEP and begin_fault(rank, run, accelerator, model, folder):
            break
        accelerator.backward(model(**gpt2_batch(generator, 2)).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if run.fault == "end_training":
        accelerator.end_training()


def with_engine(rank: int, run: Run, folder: Path) -> None:
    dist.init_process_group("gloo", **group_limit_of(run))
    torch.manual_seed(seed_of(rank, run))
    model = model_of(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = ZeroEngine(model, [optimizer], settings_of(run))
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        if step == AT_STEP and begin_fault(rank, run, None, model, folder):
            break
        model(**gpt2_batch(generator, 2)).loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    engine.finish_parameters()
    if run.fault == "destroyed groups":
        dist.destroy_process_group()


class FaultAtStep(TrainerCallback):
    """Commits the fault before a step of Trainer."""

    def __init__(self, rank: int, run: Run, folder: Path):
        self._rank, self._run, self._folder = rank, run, folder
        self.trainer: Trainer | None = None

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == AT_STEP:
            trainer = self.trainer
            if begin_fault(self._rank, self._run, trainer.accelerator, trainer.model, self._folder):
                control.should_training_stop = True

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        if state.global_step == AT_STEP and self._run.fault in LONE_SAVES and self._rank == FAULTY:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        # After the next step, with a different step number.
        if state.global_step == AT_STEP + 1 and self._run.fault == "saves of two steps" and self._rank != FAULTY:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


def with_trainer(rank: int, run: Run, folder: Path) -> None:
    torch.manual_seed(seed_of(rank, run))
    fault = FaultAtStep(rank, run, folder)
    arguments = ZeroTrainingArguments(
        zero=settings_of(run),
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        max_steps=20,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        **({"ddp_timeout": int(run.limit_s)} if run.limits_group else {}),
    )
    generator = torch.Generator().manual_seed(0)
    data = [{key: value[0] for key, value in gpt2_batch(generator, 1).items()} for _ in range(100)]
    fault.trainer = Trainer(model=model_of(run), args=arguments, train_dataset=data, callbacks=[fault])
    fault.trainer.train()


WAYS = {"accelerate": with_accelerate, "engine": with_engine, "trainer": with_trainer}


def hangs_in_evaluate(rank: int, accelerator: Accelerator | None, model: nn.Module, folder: Path) -> None:
    """Hangs in an evaluation that gathers each batch's loss."""
    model.eval()
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for number in range(3):
            if rank == FAULTY and number == 1:
                time.sleep(1000)
            loss = model(**gpt2_batch(generator, 2)).loss.detach()
            if accelerator is not None:
                accelerator.gather(loss)
            else:
                dist.all_reduce(loss)
    model.train()


def saves_on_rank_0(rank: int, accelerator: Accelerator | None, model: nn.Module, folder: Path) -> None:
    if rank == 0 and accelerator is not None:
        accelerator.save_state(str(folder / "state"))
    elif rank == 0:
        with engine_of(model).whole_copies("a state dict", wanted=True):
            pass


def ends_first(rank: int, *_: object) -> bool:
    return rank == 0


def is_no_fault(*_: object) -> None:
    """Does nothing, because the fault happened earlier."""


Act = Callable[[Accelerator, nn.Module, Path], object]


def alone(act: Act) -> Callable[..., object]:
    """Makes a fault of one rank, while the others continue to train."""

    def fault(rank: int, accelerator: Accelerator, model: nn.Module, folder: Path) -> object:
        return act(accelerator, model, folder) if rank == FAULTY else None

    return fault


@alone
def diverges(_accelerator: Accelerator, model: nn.Module, _folder: Path) -> None:
    """Changes a value like a flipped bit in memory."""
    frozen = next(parameter for parameter in model.parameters() if not parameter.requires_grad)
    frozen.data.view(torch.int32).view(-1)[5] ^= 1 << 20


@alone
def raises(*_: object) -> None:
    raise LookupError("a bad batch")


@alone
def saves_alone(_accelerator: Accelerator, model: nn.Module, folder: Path) -> None:
    model.save_pretrained(folder / "saved")
    raise LookupError("saved alone")


@alone
def is_cut_off(_accelerator: Accelerator, _model: nn.Module, folder: Path) -> None:
    (folder / "cut").write_text("")
    while not (folder / "is cut").exists():
        time.sleep(0.01)


def looks_at_a_gradient(_accelerator: Accelerator, model: nn.Module, _folder: Path) -> None:
    engine_of(model).full_grad(next(model.parameters()))


def reads_a_gradient(rank: int, accelerator: Accelerator, model: nn.Module, _folder: Path) -> None:
    accelerator.backward(model(**gpt2_batch(torch.Generator().manual_seed(0), 2)).loss)
    if rank == 1:
        next(model.parameters()).grad.norm()


def forwards_once_more(_accelerator: Accelerator, model: nn.Module, _folder: Path) -> None:
    model(**gpt2_batch(torch.Generator().manual_seed(0), 2))


FAULTS: dict[str, Callable[..., object]] = {
    "stopped": alone(lambda *_: os.kill(os.getpid(), signal.SIGSTOP)),
    "sleeping": alone(lambda *_: time.sleep(60)),
    "killed": alone(lambda *_: os.kill(os.getpid(), signal.SIGKILL)),
    "exception": raises,
    "sys.exit": alone(lambda *_: sys.exit(0)),
    "lone full_grad": alone(looks_at_a_gradient),
    "lone read of p.grad": reads_a_gradient,
    "lone save_pretrained": saves_alone,
    "lone save_state": alone(lambda accelerator, _, folder: accelerator.save_state(str(folder / "state"))),
    "lone clip": alone(lambda accelerator, model, _: accelerator.clip_grad_norm_(model.parameters(), 1.0)),
    "lone barrier": alone(lambda *_: dist.barrier()),
    # The message size differs from all messages in which the engine agrees.
    "lone all_reduce": alone(lambda *_: dist.all_reduce(torch.zeros(1000))),
    "link cut": is_cut_off,
    "hang in evaluate": hangs_in_evaluate,
    "extra forward": alone(forwards_once_more),
    "save on rank 0 alone": saves_on_rank_0,
    "different batch counts": alone(lambda *_: True),
    "diverged replica": diverges,
    **dict.fromkeys(("end_training", "destroyed groups", "end"), ends_first),
    **dict.fromkeys(("different seeds", *LONE_SAVES), is_no_fault),
}
"""Fault → a function called on each rank before the step `AT_STEP`; returns true if the rank has to leave its loop."""


_numbers = itertools.count()


class Namespaces:
    """One network namespace per rank, and a link between the two."""

    def __init__(self):
        number = f"{os.getpid()}n{next(_numbers)}"
        self.names = [f"hfz{number}{end}" for end in "ab"]
        self.links = [f"v{number}{end}" for end in "ab"]
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for end, (name, link) in enumerate(zip(self.names, self.links)):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"10.231.7.{end + 1}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def enter(self, rank: int) -> str:
        """Moves this process to its namespace; returns its link."""
        with open(f"/run/netns/{self.names[rank]}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return self.links[rank]

    def cut(self) -> None:
        _ip("-n", self.names[0], "link", "set", self.links[0], "down")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Started:
    """The running ranks of a run."""

    def __init__(self, run: Run, folder: Path):
        self.run, self.folder = run, folder
        folder.mkdir(parents=True)
        self.networks = Namespaces() if run.fault == "link cut" else None
        self.is_cut = False
        self.port = port_to_meet_on()
        self.store = None
        self.pids: dict[int, int] = {}
        self.codes: dict[int, tuple[int | None, float]] = {}
        self.began = time.time()

    def keep_store(self) -> None:
        """Keeps the ranks' store, which outlives them as with a launcher. Made after the fork, because the store has a thread."""
        if self.networks is None and not self.run.own_store:
            self.store = dist.TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)

    def environment(self, rank: int) -> dict[str, str]:
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.run.world_size)),
            "MASTER_ADDR": "127.0.0.1" if self.networks is None else "10.231.7.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.networks is None and not self.run.own_store),
            "TORCHELASTIC_ERROR_FILE": str(self.folder / f"error{rank}.json"),
            "TORCHELASTIC_RUN_ID": "faults",
            "ACCELERATE_USE_CPU": "true",
            "GLOO_SOCKET_IFNAME": "lo" if self.networks is None else self.networks.enter(rank),
        }

    def look(self) -> bool:
        """Notes ended ranks; returns whether any rank is still running."""
        if self.networks is not None and (self.folder / "cut").exists() and not self.is_cut:
            self.networks.cut()
            self.is_cut = True
            (self.folder / "is cut").write_text("")
        for rank, pid in self.pids.items():
            if rank in self.codes:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.codes[rank] = (os.waitstatus_to_exitcode(status), time.time())
        held = {FAULTY} if self.run.fault in ("stopped", "sleeping") and self.run.late_s > self.run.limit_s else set()
        held |= {FAULTY} if self.run.fault == "stopped" else set()
        awaited = set(self.pids) - set(self.codes) - held
        return bool(awaited) and time.time() < self.began + self.run.patience_s

    def end(self) -> list[Outcome]:
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.codes[rank] = (None, time.time())
        if self.networks is not None:
            self.networks.remove()
        at = float(fault.read_text()) if (fault := self.folder / "fault").exists() else self.began
        return [
            Outcome(
                code=code,
                seconds=ended - at,
                said=(self.folder / f"said{rank}").read_text(),
                told=self.told(self.folder / f"error{rank}.json"),
            )
            for rank, (code, ended) in sorted(self.codes.items())
        ]

    @staticmethod
    def told(path: Path) -> str:
        return json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"] if path.exists() else ""


def run_all(folder: Path, runs: list[dict]) -> list[list[dict]]:
    """Returns the ends of each run's ranks, as `Outcome`s. Must be called in its own process."""
    torch.set_num_threads(1)
    # A fork does not copy the timer's thread, and Python's exit would wait for it.
    faulthandler.cancel_dump_traceback_later()
    started = []
    for number, run in enumerate(runs):
        started.append(Started(Run(**run), folder / str(number)))
        for rank in range(started[-1].run.world_size):
            pid = os.fork()
            if pid == 0:
                become(rank, started[-1])
            started[-1].pids[rank] = pid
    for each in started:
        each.keep_store()
    while any([each.look() for each in started]):
        time.sleep(0.05)
    return [[asdict(outcome) for outcome in each.end()] for each in started]


def become(rank: int, started: Started) -> NoReturn:
    """Runs the script of a forked rank, and ends the process like Python does."""
    said = os.open(started.folder / f"said{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(started.environment(rank))
    # At exit, Python would visit all objects imported before the fork, and copy their memory: two seconds per rank.
    atexit.unregister(gc.unfreeze)
    code = 0
    try:
        train(rank, started.run, started.folder)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        # Python does the same for an uncaught error.
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
        code = 1
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("Python has ended")


def outcomes(runs: list[dict], folder: Path) -> list[list[dict]]:
    """Returns the ends of each run's ranks. The runs are parallel."""
    return run_alone(run_all, time_limit_s=280, keyword_arguments={"folder": folder, "runs": runs})


@cache
def why_no_namespaces() -> str | None:
    """Returns why no network namespace can be made here; None if nothing prevents it."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    made = subprocess.run(["ip", "netns", "add", f"try{os.getpid()}"], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"try{os.getpid()}"], check=False)
    return None
