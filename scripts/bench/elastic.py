"""Kills agents of elastic runs at random moments, and compares each continued run with one resumed by hand.

    python scripts/bench/elastic.py    # 10 runs of 3 agents, one kill each, and their table

Each agent is a node of its own: in its own network namespace if root may make them, else on the loopback address.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from harness import ROOT, bytes_from_disk, print_table, read_options, write_record
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainerCallback

from hf_zero import ZeroTrainingArguments
from hf_zero.presence.store import keep_store

RENDEZVOUS = "is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
LIMIT_S = 600.0
_GLANCE_S = 0.05


class Node(NamedTuple):
    """The network of an agent: a namespace with its own address and interface, or the loopback."""

    address: str = "127.0.0.1"
    namespace: str | None = None
    interface: str = "lo"


class Network(NamedTuple):
    """Nodes, and the address of processes outside of all nodes."""

    nodes: list[Node]
    address: str = "127.0.0.1"


@contextmanager
def own_network(count: int) -> Iterator[Network]:
    """Makes nodes in namespaces, connected by a bridge; on the loopback if this user may not make namespaces."""
    bridge = f"el{os.getpid()}"

    def ip(*words: str, checks: bool = True) -> None:
        subprocess.run(["ip", *words], check=checks, capture_output=True)

    with ExitStack() as stack:
        try:
            ip("link", "add", bridge, "type", "bridge")
            stack.callback(ip, "link", "delete", bridge, checks=False)
            ip("address", "add", "10.97.0.254/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            nodes = [
                Node(f"10.97.0.{number + 1}", f"{bridge}-{number}", f"{bridge}-{number}") for number in range(count)
            ]
            for number, (address, space, inside) in enumerate(nodes):
                outside = f"{bridge}b{number}"
                ip("netns", "add", space)
                stack.callback(ip, "netns", "delete", space, checks=False)
                ip("link", "add", inside, "netns", space, "type", "veth", "peer", "name", outside)
                ip("link", "set", outside, "master", bridge, "up")
                ip("-n", space, "address", "add", f"{address}/24", "dev", inside)
                ip("-n", space, "link", "set", "lo", "up")
                ip("-n", space, "link", "set", inside, "up")
            network = Network(nodes, "10.97.0.254")
        except (OSError, subprocess.CalledProcessError):
            network = Network([Node()] * count)
        yield network


@dataclass
class MicroBatch:
    """The log of a rank about one micro-batch."""

    rows: list[int]
    loss: str
    at: float
    ready_s: float = 0.0
    disk_bytes: int = 0


@dataclass
class Start:
    """The logs of all ranks for one start of the workers, by step, rank and micro-batch."""

    world_size: int
    began_s: float
    steps: dict[tuple[int, int, int], MicroBatch] = field(default_factory=dict)

    @property
    def first_step(self) -> int:
        return min((step for step, _, _ in self.steps), default=-1)

    def whole_steps(self, accumulation: int) -> list[int]:
        """Returns the steps whose micro-batches all ranks have logged."""
        counts = Counter(step for step, _, _ in self.steps)
        return sorted(step for step, count in counts.items() if count == self.world_size * accumulation)

    def rows_of(self, step: int) -> list[int]:
        return [row for key in sorted(self.steps) if key[0] == step for row in self.steps[key].rows]


def starts_in(log: Path, apart_s: float = 4.0) -> list[Start]:
    """Returns the starts of the workers with logs in a folder, in order. Starts without a step are left out."""
    starts: list[Start] = []
    for path in sorted(log.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        began_s = int(path.name.split("-")[0]) / 1e9
        if len(lines) < 2:
            continue
        head, *logged = lines
        if not starts or starts[-1].world_size != head["world_size"] or began_s > starts[-1].began_s + apart_s:
            starts.append(Start(head["world_size"], began_s))
        for line in logged:
            micro = sum(step == line["step"] and rank == head["rank"] for step, rank, _ in starts[-1].steps)
            key = (line["step"], head["rank"], micro)
            starts[-1].steps[key] = MicroBatch(**{name: line[name] for name in line if name != "step"})
    return starts


def environment(node: Node) -> dict[str, str]:
    said = {
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": node.interface,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return dict(os.environ) | said


def script_words(folder: Path, settings: Mapping[str, object]) -> list[str]:
    said = {"rows_log": folder / "log", "output_dir": folder / "out", **settings}
    return [__file__, "train", *(word for name, value in said.items() for word in (f"--{name}", str(value)))]


def start_agent(number: int, network: Network, port: int, folder: Path, words: list[str]) -> subprocess.Popen:
    node, most = network.nodes[number], len(network.nodes)
    agent = [
        *([] if node.namespace is None else ["ip", "netns", "exec", node.namespace]),
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", f"{most - 1}:{most}", "--nproc_per_node", "1", "--max-restarts", "10"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{network.address}:{port}", "--rdzv-id", folder.name),
        *("--rdzv-conf", RENDEZVOUS, "--local-addr", node.address),
        *words,
    ]
    with (folder / f"agent-{number}.log").open("ab") as said:
        way = {"env": environment(node), "stdout": said, "stderr": said, "cwd": ROOT, "start_new_session": True}
        return subprocess.Popen(agent, **way)


def kill_with_children(process: subprocess.Popen) -> None:
    """Ends an agent and its workers at once, like the loss of a node."""
    with suppress(psutil.NoSuchProcess):
        agent = psutil.Process(process.pid)
        for each in (agent, *agent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()


@dataclass
class Outcome:
    """The result of one run."""

    killed: int
    at_step: int
    resumed_at: int
    ranks_after: int
    recovery_s: float
    statuses: list[int | None]
    starts: list[Start]
    ready_s: float = float("nan")
    disk_bytes: int = 0

    @property
    def ended(self) -> bool:
        """Whether all agents except the killed one ended by themselves with status 0."""
        return all(status == 0 for number, status in enumerate(self.statuses) if number != self.killed)


def killed_run(
    folder: Path, network: Network, settings: Mapping[str, object], *, killed: int, after_step: int, pause_s: float
) -> Outcome:
    """Runs elastic training, and kills agent number `killed` `pause_s` after a rank has begun step `after_step`."""
    folder.mkdir(parents=True)
    log = folder / "log"
    words = script_words(folder, settings)
    store = keep_store(0, network.address)
    with ExitStack() as stack:
        agents: list[subprocess.Popen] = []
        for number in range(len(network.nodes)):
            agents.append(start_agent(number, network, store.port, folder, words))
            stack.callback(kill_with_children, agents[-1])
        deadline_s = time.monotonic() + LIMIT_S

        def in_time() -> bool:
            time.sleep(_GLANCE_S)
            return time.monotonic() < deadline_s

        while _furthest(log, len(network.nodes)) < after_step and in_time():
            pass
        time.sleep(pause_s)
        at_s, at_step = time.time(), _furthest(log, len(network.nodes))
        kill_with_children(agents[killed])
        _evict(folder / "out")
        while any(a.poll() is None for n, a in enumerate(agents) if n != killed) and in_time():
            pass
        statuses = [agent.poll() for agent in agents]
    starts = starts_in(log)
    after = next((start for start in starts if start.began_s > at_s), None)
    logged = list(after.steps.values()) if after else []
    return Outcome(
        killed=killed,
        at_step=at_step,
        resumed_at=after.first_step if after else -1,
        ranks_after=after.world_size if after else 0,
        recovery_s=min((each.at for each in logged), default=float("nan")) - at_s,
        statuses=statuses,
        starts=starts,
        ready_s=max((each.ready_s for each in logged), default=float("nan")),
        disk_bytes=sum(each.disk_bytes for each in logged),
    )


def _evict(folder: Path) -> None:
    """Removes the checkpoints' files from the system's cache: a restarting node may not have read them before."""
    os.sync()
    for path in folder.glob("checkpoint-*/**/*"):
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _furthest(log: Path, world_size: int) -> int:
    """Returns the last step begun by a rank of the first start."""
    starts = (start for start in starts_in(log) if start.world_size == world_size)
    return max((step for start in starts for step, _, _ in start.steps), default=-1)


def run_by_hand(folder: Path, checkpoint: Path, settings: Mapping[str, object], ranks: int) -> Start:
    """Runs on `ranks` ranks from a given checkpoint and distribution of samples; returns the log."""
    folder.mkdir(parents=True)
    words = script_words(folder, {"resume_from_checkpoint": checkpoint, **settings})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *words]
    done = subprocess.run(command, env=environment(Node()), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    (folder / "said.log").write_text(done.stdout + done.stderr)
    return starts_in(folder / "log")[-1]


def rows_trained(starts: list[Start]) -> list[list[int]]:
    """Returns the samples of each step, as logged by the last start with this step."""
    steps: dict[int, list[int]] = {}
    for start in starts:
        steps.update({step: start.rows_of(step) for step in {step for step, _, _ in start.steps}})
    return [steps[step] for step in sorted(steps)]


def is_each_row_once(steps: list[list[int]], rows: int) -> bool:
    """Whether each full pass over the data has each sample exactly once, and the last, incomplete pass has none twice."""
    taken = [row for step in steps for row in step]
    passes = [taken[start : start + rows] for start in range(0, len(taken), rows)]
    return all(len(set(each)) == len(each) for each in passes)


# ---- the training ----

ROWS = 480
VOCABULARY = 500
LENGTH = 32


@dataclass
class OwnArguments:
    """Arguments of this script only."""

    rows_log: str = field(metadata={"help": "A folder, in which each rank of each start writes a file."})
    step_s: float = field(default=0.0, metadata={"help": "Seconds that a step takes longer than it does."})
    width: int = field(default=64, metadata={"help": "Of the model."})


class LoggingTrainer(Trainer):
    """A Trainer with a log of the samples and the loss of each micro-batch."""

    def __init__(self, *args: Any, log: Path, step_s: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        log.mkdir(parents=True, exist_ok=True)
        rank, world = self.args.process_index, self.args.world_size
        self._log = (log / f"{time.time_ns()}-{rank}-of-{world}.jsonl").open("w", buffering=1)
        self._say(rank=rank, world_size=world, restarts=os.environ.get("TORCHELASTIC_RESTART_COUNT"))
        self.add_callback(_Pause(step_s))
        self._first: dict[str, float] = {}

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._began is not None:
            seconds, read = time.perf_counter() - self._began, bytes_from_disk() - self._read_before
            self._first, self._began = {"ready_s": round(seconds, 3), "disk_bytes": read}, None
        return super().training_step(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._began: float | None = time.perf_counter()
        self._read_before = bytes_from_disk()
        return super().train(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        rows = inputs.pop("row").tolist()
        answer = super().compute_loss(model, inputs, *args, **kwargs)
        loss = answer[0] if isinstance(answer, tuple) else answer
        self._say(step=self.state.global_step, rows=rows, loss=loss.item().hex(), at=time.time(), **self._first)
        self._first = {}
        return answer

    def _say(self, **said: Any) -> None:
        self._log.write(json.dumps(said) + "\n")


class _Pause(TrainerCallback):
    def __init__(self, seconds: float):
        self._seconds = seconds

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        time.sleep(self._seconds)


def train(arguments: list[str]) -> None:
    """Trains a small GPT-2 with Trainer in an agent's worker. Each rank logs samples and loss of each micro-batch."""
    own, args = HfArgumentParser((OwnArguments, ZeroTrainingArguments)).parse_args_into_dataclasses(arguments)
    args.remove_unused_columns = False
    torch.manual_seed(0)
    sizes = {"n_embd": own.width, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": ids, "labels": ids, "row": number} for number, ids in enumerate(tokens)]
    trainer = LoggingTrainer(model=model, args=args, train_dataset=rows, log=Path(own.rows_log), step_s=own.step_s)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


# ---- killed runs, and their table ----


def compared(folder: Path, outcome: Outcome, plain: Mapping[str, object], agents: int) -> str:
    """Compares losses and samples after the restart with a run resumed by hand with the same number of ranks."""
    a_rank = 4 * 2 * agents // outcome.ranks_after
    shape = SHAPE | {"gradient_accumulation_steps": a_rank // 4, "zero": 2}
    checkpoint = folder / "out" / f"checkpoint-{outcome.resumed_at}"
    if not checkpoint.is_dir():
        return "not on disk"
    by_hand = run_by_hand(folder / "hand", checkpoint, plain | shape, outcome.ranks_after)
    after = outcome.starts[-1]
    if after.steps.keys() != by_hand.steps.keys():
        return "other steps"
    pairs = [(each, by_hand.steps[key]) for key, each in after.steps.items()]
    others = sum((own.loss, own.rows) != (its.loss, its.rows) for own, its in pairs)
    return f"{others} differ" if others else "bit for bit"


SHAPE: dict[str, object] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2:])
        return
    options = read_options(__doc__, runs=10, agents=3, seed=0, steps=30, width=64, save_steps=5)
    chance, figures = random.Random(options.seed), []
    plain = {"max_steps": options.steps, "width": options.width, "save_steps": options.save_steps, "step_s": 0.15}
    plain |= {"logging_steps": 5, "disable_tqdm": True, "report_to": "none"}
    with own_network(options.agents) as network, tempfile.TemporaryDirectory(prefix="elastic-") as work:
        for number in range(options.runs):
            folder = Path(work, f"run{number}")
            outcome = killed_run(
                folder,
                network,
                plain | SHAPE | {"zero": "stage=2,checkpoint.resume=auto"},
                killed=chance.randrange(options.agents),
                after_step=chance.randrange(2, options.steps - 8),
                pause_s=chance.uniform(0, 0.5),
            )
            has_gone_on = outcome.ended and outcome.resumed_at >= 0
            same = compared(folder, outcome, plain, options.agents) if has_gone_on else "-"
            names = ("killed", "at_step", "ended", "resumed_at", "ranks_after")
            figures.append(
                {name: getattr(outcome, name) for name in names}
                | {name: round(getattr(outcome, name), 2) for name in ("recovery_s", "ready_s")}
                | {"disk_mib": round(outcome.disk_bytes / 2**20, 1), "as_by_hand": same}
                | {"rows_once": is_each_row_once(rows_trained(outcome.starts), ROWS)}
            )
            print(json.dumps(figures[-1]), file=sys.stderr, flush=True)
            if not outcome.ended:
                for path in folder.glob("agent-*.log"):
                    print(path.read_text(errors="replace")[-3000:], file=sys.stderr)
            shutil.rmtree(folder)
    title = f"{options.runs} runs of {options.agents} agents, one killed in each"
    print_table(title, [(name, name) for name in figures[0]], figures)
    if options.json:
        write_record(options.json, {"namespaces": network.nodes[0].namespace is not None, "runs": figures})


if __name__ == "__main__":
    main()
