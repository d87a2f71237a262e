"""Fine-tuning of BERT and GPT-2 on one GPU or several: torch's own engines beside every stage and tier of this package.

    python scripts/bench/gpus.py                                        # one GPU
    torchrun --nproc-per-node 4 scripts/bench/gpus.py                   # four (scripts/bench/multi_gpu.sh does this)
    python scripts/bench/gpus.py --device cpu --models bert-tiny        # does the harness run?

Models are built in host memory, as scripts load them, and prepared by accelerate. Each way trains alone, on the same batches;
its losses are compared with the first way's: a plain loop, or DDP where there are several ranks. A way that fails is shown with
its error, and the others go on; the script then ends with status 1, as it does when losses are off.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from accelerate import Accelerator
from harness import RESULTS, describe_run, keep, print_table, read_options
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedConfig

from hf_zero import ZeroPlugin
from hf_zero.device import peak_bytes, wait_for_device

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class DeviceTrace:
    """Milliseconds of a step on the device.

    Attributes:
        busy_ms: in which any kernel or copy runs.
        comm_ms: in which a kernel of NCCL runs.
        hidden_ms: of those, the ones in which a kernel that is not NCCL's runs, too.
    """

    busy_ms: float
    comm_ms: float
    hidden_ms: float


def trace_of(run: Callable[[], object], steps: int) -> DeviceTrace:
    """Traces `run`, which takes so many steps on the current CUDA device."""
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        run()
        torch.cuda.synchronize()
    events = [event for event in traced.events() if event.device_type == DeviceType.CUDA]
    spans = [(event.name, (event.time_range.start, event.time_range.end)) for event in events]
    return trace_in(spans, steps)


def trace_in(spans: Iterable[tuple[str, Span]], steps: int) -> DeviceTrace:
    """`spans`: name, begin and end in microseconds of all that ran on the device in so many steps."""
    comm, other = [], []
    for name, span in spans:
        (comm if "nccl" in name.lower() else other).append(span)
    comm, other = united(comm), united(other)
    scale = 1e-3 / steps
    both = length(comm) + length(other) - length(united([*comm, *other]))
    return DeviceTrace(
        busy_ms=scale * length(united([*comm, *other])), comm_ms=scale * length(comm), hidden_ms=scale * both
    )


def united(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap, in order."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def length(spans: Iterable[Span]) -> float:
    """Of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


SEED = 1234

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model in host memory, the same each time, and batches of `rows` x `length` tokens for a rank and step."""

    kind: type[nn.Module]
    config: PreTrainedConfig
    rows: int
    length: int

    def make(self) -> nn.Module:
        torch.manual_seed(SEED)
        model = self.kind(self.config).train()
        if self.kind is GPT2LMHeadModel:
            # transformers finds no loss by this class's name and warns before it falls back to this one.
            model.loss_type = "ForCausalLM"
        return model

    def batch(self, rank: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(SEED + 1_000_003 * rank + step)
        ids = torch.randint(self.config.vocab_size, (self.rows, self.length), generator=generator)
        return {"input_ids": ids, "labels": ids if self.kind is GPT2LMHeadModel else ids[:, 0] % 2}


def bert(rows: int, length: int, **shape: int) -> Model:
    """A classifier of sentences, without dropout."""
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape)
    return Model(kind=BertForSequenceClassification, config=config, rows=rows, length=length)


def gpt2(rows: int, length: int, **shape: int) -> Model:
    """A language model, without dropout."""
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **shape)
    return Model(kind=GPT2LMHeadModel, config=config, rows=rows, length=length)


_SMALL_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_SMALL_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}

MODELS = {
    "bert-base": bert(32, 128),
    "gpt2": gpt2(8, 512),
    "bert-tiny": bert(2, 16, **_SMALL_BERT, vocab_size=128),
    "gpt2-tiny": gpt2(2, 16, **_SMALL_GPT2, vocab_size=128),
}

EXACT, ROUNDED = 1e-4, 3e-2
"""Most difference of losses, relative to the reference's: where arithmetic is float32's, and where 16 or 8 bits are in it."""

MAX_NORM = 1.0
WARMUP_STEPS = 3
TRACED_STEPS = 2

_SPREADS = 4
"""So many times as far off as the reference is from itself, a way may be: two runs show a part of the spread."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is trained. `settings`: the engine's, or None for torch's own way of this name."""

    name: str
    settings: dict | None = None
    tolerance: float = EXACT


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one way, on this rank.

    Attributes:
        losses: of each step.
        step_ms, host_ms: a step's time, and the CPU time that this process took in it; medians of rounds.
        peak_mib: of the device's memory.
        trace: what the device did in traced steps; None on the CPU.
        error: why there is no more, where there is none.
    """

    model: str
    way: str
    losses: list[float]
    step_ms: float | None = None
    host_ms: float | None = None
    peak_mib: float | None = None
    trace: DeviceTrace | None = None
    loss_difference: float | None = None
    is_as_expected: bool = False
    error: str | None = None


def ways(world_size: int, folder: str) -> list[Way]:
    """The reference first."""
    peers = [Way(name="torch")] if world_size == 1 else [Way(name="DDP"), Way(name="FSDP2")]
    stages = [Way(name=f"stage {stage}", settings={"stage": stage}) for stage in range(4)]
    host, files = {"optimizer": "cpu"}, {"optimizer": "nvme", "nvme_path": folder}
    params = {"params": "cpu", "optimizer": "cpu"}
    tiers = [
        Way(name="stage 2, state on the host", settings={"stage": 2, "offload": host}),
        Way(name="stage 2, state in files", settings={"stage": 2, "offload": files}),
        Way(name="stage 3, all on the host", settings={"stage": 3, "offload": params}),
        Way(name="stage 2, torch's steps", settings={"stage": 2, "kernels": "never"}),
        Way(name="stage 2, bf16 parameters", settings={"stage": 2, "param_dtype": "bfloat16"}, tolerance=ROUNDED),
        Way(name="stage 3, bf16 parameters", settings={"stage": 3, "param_dtype": "bfloat16"}, tolerance=ROUNDED),
        Way(name="stage 2, 8-bit moments", settings={"stage": 2, "moments": "8bit"}, tolerance=ROUNDED),
    ]
    blocks = {"gradients": "int8", "weights": "int8"}
    wires = [
        Way(name=f"stage {stage}, int8 wire", settings={"stage": stage, "comm": blocks}, tolerance=ROUNDED)
        for stage in (2, 3)
    ]
    return peers + stages + tiers + (wires if world_size > 1 else [])


class Job:
    """One model that is trained in one way, with AdamW and clipping.

    Args:
        make_model: builds it in host memory, the same each time.
        make_batch: gives what a rank is fed in a step.
    """

    def __init__(
        self, way: Way, make_model: Callable[[], nn.Module], make_batch: Callable[[int, int], Batch], cpu: bool
    ):
        self.accelerator = Accelerator(cpu=cpu)
        self.device = self.accelerator.device
        if way.settings is not None:
            ZeroPlugin(way.settings).attach(self.accelerator)
        self._make_batch = make_batch
        self._way, self._number = way, 0
        model = make_model()
        if way.name == "FSDP2":
            model = self._fully_sharded(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.model = model
        if way.name != "FSDP2":
            self.model, self.optimizer = self.accelerator.prepare(model, self.optimizer)

    def _fully_sharded(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        model.to(self.device)
        for block in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
            fully_shard(block)
        return fully_shard(model)

    def steps(self, count: int) -> list[torch.Tensor]:
        """Losses, on the device."""
        losses = []
        for _ in range(count):
            batch = self._make_batch(self.accelerator.process_index, self._number)
            self._number += 1
            loss = self.model(**{name: values.to(self.device) for name, values in batch.items()}).loss
            loss.backward()
            self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def _clip(self) -> None:
        if self._way.name == "FSDP2":
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        else:
            self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def close(self) -> None:
        for engine in getattr(self.accelerator, "zero_engines", []):
            engine.close()
        self.accelerator.free_memory()


def measure(way: Way, model: str, *, steps: int, rounds: int, cpu: bool) -> Figures:
    """Trains a model one way: steps that do not count, rounds of steps that do, and traced ones on an accelerator."""
    job = Job(way, MODELS[model].make, MODELS[model].batch, cpu)
    try:
        device = job.device
        if device.type != "cpu":
            torch.get_device_module(device).reset_peak_memory_stats(device)
        losses = job.steps(WARMUP_STEPS)
        step_ms, host_ms = [], []
        for _ in range(rounds):
            wait_for_device(device)
            began, cpu_began = time.perf_counter(), time.process_time()
            losses += job.steps(steps)
            wait_for_device(device)
            step_ms.append(1e3 * (time.perf_counter() - began) / steps)
            host_ms.append(1e3 * (time.process_time() - cpu_began) / steps)
        peak_mib = peak_bytes(device) / 2**20
        trace = trace_of(lambda: job.steps(TRACED_STEPS), TRACED_STEPS) if device.type == "cuda" else None
        return Figures(
            model=model,
            way=way.name,
            losses=[loss.item() for loss in losses],
            step_ms=median(step_ms),
            host_ms=median(host_ms),
            peak_mib=peak_mib,
            trace=trace,
        )
    finally:
        job.close()


def tried(way: Way, model: str, reference: list[float] | None, spread: float = 0.0, **options) -> Figures:
    """`measure`, with an error in place of figures where the way fails, and beside the reference's losses.

    Args:
        spread: relative difference between two runs of the reference. A device that adds in another order each time lets a way
            be as far off.
    """
    try:
        found = measure(way, model, **options)
    except Exception as error:
        # Whatever it is: it is shown, and the ways behind it are measured.
        lines = str(error).strip().splitlines() or [""]
        return Figures(model=model, way=way.name, losses=[], error=f"{type(error).__name__}: {lines[0][:300]}")
    expected = found.losses if reference is None else reference
    difference = max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected, strict=True))
    allowed = max(way.tolerance, _SPREADS * spread)
    return replace(found, loss_difference=difference, is_as_expected=difference <= allowed)


HEADINGS = (
    "way",
    "ms a step",
    "x first",
    "host ms",
    "device busy",
    "comm hidden",
    "peak MiB",
    "last loss",
    "off by",
    "",
)


def row_of(each: Figures, first: Figures) -> tuple[str, ...]:
    """Of a way; `first` is the first one of its model that has figures."""
    way = f"{each.model}, {each.way}"
    if each.error is not None:
        return (way, *[""] * 8, each.error)
    trace = each.trace
    return (
        *(way, f"{each.step_ms:.1f}", f"{each.step_ms / first.step_ms:.2f}", f"{each.host_ms:.1f}"),
        "" if trace is None else f"{trace.busy_ms / each.step_ms:.0%}",
        "" if trace is None or not trace.comm_ms else f"{trace.hidden_ms / trace.comm_ms:.0%}",
        *(f"{each.peak_mib:.0f}", f"{each.losses[-1]:.5f}", f"{each.loss_difference:.1e}"),
        "" if each.is_as_expected else "losses are off",
    )


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    return read_options(
        __doc__,
        arguments,
        models=(["bert-base", "gpt2"], None, MODELS),
        ways=(list, "names, as in the table; the reference is always there"),
        device=("cuda", "or cpu, or another accelerator that torch and accelerate know"),
        steps=8,
        rounds=3,
        nvme_path=(Path("outputs/nvme"), "a folder on the disk to offload to"),
        minutes=(9.0, "no way is begun after that"),
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    if options.device != "cpu" and not torch.get_device_module(options.device).is_available():
        print(f"skipped: no {options.device} device on this machine; --device cpu tries the harness")
        return 0
    is_cpu, world_size = options.device == "cpu", int(os.environ.get("WORLD_SIZE", 1))
    deadline_s = time.monotonic() + 60 * options.minutes
    figures: list[Figures] = []
    options.nvme_path.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        reference, spread = None, 0.0
        for way in ways(world_size, str(options.nvme_path)):
            if reference is not None and options.ways is not None and way.name not in options.ways:
                continue
            if time.monotonic() > deadline_s:
                print(f"{model}, {way.name}: not measured, for want of time (--minutes)")
                continue
            size = {"steps": options.steps, "rounds": options.rounds, "cpu": is_cpu}
            found = tried(way, model, reference, spread, **size)
            figures.append(found)
            _give_back(options.device)
            if reference is None and found.error is None:
                reference = found.losses
                again = replace(tried(way, model, reference, **size), way=f"{way.name}, again")
                # No way is to blame for the reference's own spread.
                spread = again.loss_difference or 0.0
                figures.append(replace(again, is_as_expected=again.error is None))
                _give_back(options.device)
    if int(os.environ.get("RANK", 0)) == 0:
        report(options, figures, world_size)
    if dist.is_initialized():
        # A rank that ends with status 1 has the launcher stop the one that writes.
        dist.barrier()
        dist.destroy_process_group()
    return 0 if all(each.is_as_expected for each in figures) else 1


def _give_back(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.get_device_module(device).empty_cache()


def report(options: argparse.Namespace, figures: Sequence[Figures], world_size: int) -> None:
    run = describe_run(options)
    device = "CPU" if options.device == "cpu" else torch.get_device_module(options.device).get_device_name()
    title = f"{world_size} x {device}, commit {run['commit']}, torch {run['torch']}"
    firsts = {each.model: each for each in reversed(figures) if each.error is None}
    print_table(title, HEADINGS, (row_of(each, firsts.get(each.model, each)) for each in figures), width=160)
    measured = {"device": device, "ranks": world_size, "ways": [asdict(each) for each in figures]}
    keep("gpus", run, measured, options.json or RESULTS / f"gpus-{run['commit']}-{world_size}.json")


if __name__ == "__main__":
    sys.exit(main())
