"""A timeline of training steps with offloaded state, on a simulated device: what each bucket waits for, and what is exposed.

`python scripts/bench/offload.py --timeline` runs this. It needs a C++ compiler and ninja, and no accelerator.

The engine's own code runs on the tests' stand-in device. The stand-in's clock (tests/support/standin_clock.cpp) computes when a
device would have done its work, and nothing sleeps:

- The model has all layers, and half the width and vocabulary: a quarter of the parameters. Rates are divided by the same number,
  so the times are those of the whole model.
- A copy occupies the link in its direction for its bytes by `--links`, so both directions may be busy at the same time.
- The model's kernels last as long as a plain step lasted on an H100 (`PLAIN_MS`). A third is forward, two thirds are backward,
  distributed over the layers by what they compute. The model itself runs on one short sample.
- A pass of the host over state lasts for the bytes that it reads and writes, by `--host-gbs`: a pass of AdamW, a norm and a
  multiplication need less arithmetic than memory. A matrix product lasts for its operations by `HOST_TFLOPS` if that is longer.
  A kernel's launch costs the host `LAUNCH_S`. Other CPU time counts `CPU_FACTOR`
  of itself: on the H100's host, Python took less time than the kernels, and a machine with other work takes longer.
- Each step is clipped to a norm that is below its own, as most steps of fine-tuning are.
- From its forward to its backward, a layer has its part of the activations of a plain step on an H100.

- Reads and writes of files share a disk with `--disk-gbs`.
- `--script-threads 1` is a rank that torchrun starts: its script has one thread, whose passes have `THREAD_GBS`, and the engine's
  steps have the rank's share of the cores. By default, the script has these cores, too.

Threads that compute at the same time do not slow each other down. The column *planned* has the ratio that `hf-zero plan`
forecasts for the same rates.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from engines import adamw_arguments
from gpus import MODELS
from harness import ROOT, print_table
from ranks import run_alone
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.forecast.peak import Activations
from hf_zero.integrations.drawing import INK, write_png
from hf_zero.offload.host_memory import HostCores
from hf_zero.planner.layouts import lay_out, ranks_without_a_group, step_time
from hf_zero.planner.search import Machine

if str(ROOT / "tests" / "support") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests" / "support"))

PLAIN_MS = {"bert-base": 58.9, "gpt2": 90.3}
"""A plain loop's step in fp32 on an H100: results/gpu-float32.json."""
HOST_GBS = 50.0
"""The rate of the host's memory at which BERT-base takes about as long as on an H100 (153 ms in results/gpu-float32.json)."""
THREAD_GBS = 12.0
"""The rate of memory that one thread of a host gets."""
HOST_TFLOPS = 1.0
"""The rate of a host's matrix products in 16 bits, as in the planner: Muon's."""
CPU_FACTOR = 0.25
LAUNCH_S = 5e-6
"""Seconds that the host needs to start a kernel."""
FORWARD = 1 / 3
BUCKET_BYTES = 25 << 20
MAX_NORM = 1e-3
SMALLER = {
    "bert-base": replace(MODELS["bert-base"], n_embd=384, vocab_size=15261, n_head=6, batch_size=1, sequence_length=4),
    "gpt2": replace(MODELS["gpt2"], n_embd=384, vocab_size=25128, n_head=6, batch_size=1, sequence_length=4),
}
"""Models that run, for those of `PLAIN_MS`, and `NUMEL`, the parameters of the latter."""
NUMEL = {"bert-base": 109_483_778, "gpt2": 124_439_808}
ACTIVATIONS_MIB = {"bert-base": 2095, "gpt2": 6027}
"""What forward keeps for backward: a plain loop's peak on an H100 less 16 bytes per parameter."""
HEAD = {"bert-base": 0.0, "gpt2": 5.4}
"""What the head computes, in layers: GPT-2's multiplies by 38.6 million numbers, a layer by 7.1 million."""
WARMUP_STEPS = 3
LANES = ("kernel", "down", "up", "disk", "host", "host thread", "host waits", "device waits")
COMPUTED = ("norm", "clip", "step", "sum")
TIERS: dict[str, dict[str, Any]] = {
    "device": {"stage": 2},
    "host": {"stage": 2, "offload": {"optimizer": "cpu"}},
    "stepped there": {"stage": 2, "offload": {"optimizer": "cpu"}},
    "parameters": {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
    "files": {"stage": 2, "offload": {"optimizer": "nvme"}},
}
"""Settings by name. The host steps on a device without room for gradients (*stepped there*)."""
PLAN_ERROR = 0.2
"""The largest relative difference between a planned ratio and the measured one."""


@dataclass(frozen=True)
class Span:
    """Something that lasts: its lane, one of `LANES`; a label; begin and end in ms; of these, the ms that the host computed."""

    lane: str
    label: str
    begin_ms: float
    end_ms: float
    busy_ms: float = 0.0

    @property
    def ms(self) -> float:
        return self.end_ms - self.begin_ms


class Cores(HostCores):
    """The cores of a rank on a simulated host: their number is the rate of a thread's passes."""

    def __init__(self, compiled: ModuleType, script_rate: float, step_rate: float):
        super().__init__(1)
        self._compiled = compiled
        self._script_rate = script_rate
        self._step_rate = step_rate

    def enter(self) -> None:
        self._compiled.set_rate(self._step_rate)

    take = enter

    def release(self) -> None:
        self._compiled.set_rate(self._script_rate)


def units_of(model: nn.Module, name: str) -> list[tuple[str, nn.Module, float]]:
    """The model's parts in forward's order: label, module, and its share of a step's kernels."""
    if name.startswith("bert"):
        parts = [
            ("embeddings", model.bert.embeddings),
            *_numbered(model.bert.encoder.layer),
            ("head", model.classifier),
        ]
    else:
        parts = [*_numbered(model.transformer.h), ("head", model.lm_head)]
    weights = {"embeddings": 0.0, "head": HEAD[name]}
    total = sum(weights.get(label, 1.0) for label, _ in parts)
    return [(label, module, weights.get(label, 1.0) / total) for label, module in parts]


def _numbered(layers: nn.ModuleList) -> list[tuple[str, nn.Module]]:
    return [(f"layer {number}", layer) for number, layer in enumerate(layers)]


def add_kernels(compiled: ModuleType, model: nn.Module, name: str, activation_bytes: float) -> None:
    """Makes the parts of the model last: behind what they read in forward, and before their gradients in backward.

    From its forward to its backward, a part has its share of `activation_bytes`.
    """
    plain_s = 1e-3 * PLAIN_MS[name]

    def after(label: str, share: float) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: tuple, output: Any) -> None:
            compiled.delay(0, FORWARD * share * plain_s, f"forward {label}")
            first = output[0] if isinstance(output, tuple) else output
            kept = [torch.empty(round(share * activation_bytes), dtype=torch.uint8, device=first.device)]

            def backward(_gradient: torch.Tensor) -> None:
                compiled.delay(0, (1 - FORWARD) * share * plain_s, f"backward {label}")
                kept.clear()

            first.register_hook(backward)

        return hook

    for label, module, share in units_of(model, name):
        module.register_forward_hook(after(label, share))


class Host:
    """Notes what the engine computes on the host, and makes clocks of threads follow each other.

    Attributes:
        spans: lane, label, begin, end and the seconds that were computed.
    """

    def __init__(self, compiled: ModuleType, disk_rate: float):
        self._compiled = compiled
        self._disk_rate, self._disk_end, self._disk = disk_rate, 0.0, threading.Lock()
        self._main = threading.get_ident()
        self._autograd: set[int] = set()
        self.spans: list[tuple[str, str, float, float, float]] = []

    def backward(self, loss: torch.Tensor) -> None:
        """Runs a backward, which torch does in a thread of its own."""
        began, thread = self._compiled.now(), 0

        def enter(_gradient: torch.Tensor) -> None:
            nonlocal thread
            thread = self._compiled.thread()
            self._autograd.add(threading.get_ident())
            self._compiled.catch_up(began)

        loss.register_hook(enter)
        loss.backward()
        self._compiled.catch_up(self._compiled.clock_of(thread))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Replaces functions of the engine by ones that note when they run, until the block ends."""
        from hf_zero.buckets.bucket import Bucket
        from hf_zero.offload import copies
        from hf_zero.offload.files import StoredShard
        from hf_zero.optimizer.bucket_steps import BucketStep
        from hf_zero.optimizer.storage import StepChoice
        from hf_zero.step.norm import GradientNorm
        from hf_zero.step.sharded_gradients import ShardedGradients

        def of_bucket(arguments: tuple) -> str:
            return f" {arguments[1].layout.index}"

        with ExitStack() as stack:
            for owner, name, label, describe in (
                (GradientNorm, "_measure", "norm", None),
                (StepChoice, "scale_gradients", "clip", None),
                (BucketStep, "step", "step", of_bucket),
                (copies, "_add_landed", "sum", None),
            ):
                timed = self._timed(getattr(owner, name), label, describe or (lambda _: ""))
                stack.enter_context(mock.patch.object(owner, name, timed))
            for owner, name, label in (
                (ShardedGradients, "_deliver", "gradient"),
                (Bucket, "write_back", "parameters"),
            ):
                place = 1 if owner is ShardedGradients else 0
                stack.enter_context(mock.patch.object(owner, name, self._labeled(getattr(owner, name), label, place)))
            for name in ("read", "write"):
                on_disk = self._on_disk(getattr(StoredShard, name), name)
                stack.enter_context(mock.patch.object(StoredShard, name, on_disk))
            stack.enter_context(mock.patch.object(futures.ThreadPoolExecutor, "submit", self._submit))
            stack.enter_context(mock.patch.object(futures.Future, "result", self._result))
            yield

    def _timed(self, call: Callable, label: str, describe: Callable[[tuple], str]) -> Callable:
        compiled = self._compiled

        def timed(*arguments, **named):
            begin, busy = compiled.now(), compiled.busy()
            try:
                return call(*arguments, **named)
            finally:
                lane = "host" if threading.get_ident() in {self._main, *self._autograd} else "host thread"
                self.spans.append((lane, label + describe(arguments), begin, compiled.now(), compiled.busy() - busy))

        return timed

    def _on_disk(self, call: Callable, label: str) -> Callable:
        compiled = self._compiled

        def on_disk(shard: Any, *arguments, **named):
            asked, before = compiled.now(), shard.read_bytes + shard.written_bytes
            found = call(shard, *arguments, **named)
            with self._disk:
                begin = max(asked, self._disk_end)
                self._disk_end = begin + (shard.read_bytes + shard.written_bytes - before) / self._disk_rate
                self.spans.append(("disk", label, begin, self._disk_end, 0.0))
                compiled.catch_up(self._disk_end)
            return found

        return on_disk

    def _labeled(self, call: Callable, label: str, place: int) -> Callable:
        compiled = self._compiled

        def labeled(*arguments, **named):
            before = compiled.set_label(f"{label} {arguments[place].layout.index}")
            try:
                return call(*arguments, **named)
            finally:
                compiled.set_label(before)

        return labeled

    @property
    def _submit(self) -> Callable:
        compiled, stock = self._compiled, futures.ThreadPoolExecutor.submit

        def submit(pool: futures.ThreadPoolExecutor, call: Callable, *arguments, **named):
            asked, ended = compiled.now(), []

            def run():
                compiled.catch_up(asked)
                try:
                    return call(*arguments, **named)
                finally:
                    ended.append(compiled.now())

            future = stock(pool, run)
            future.__dict__["ended"] = ended
            return future

        return submit

    @property
    def _result(self) -> Callable:
        compiled, stock = self._compiled, futures.Future.result

        def result(future: futures.Future, timeout: float | None = None):
            try:
                return stock(future, timeout)
            finally:
                for ended in future.__dict__.get("ended", ()):
                    compiled.catch_up(ended)

        return result


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **adamw_arguments(fused=True))


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers, and AdamW for all other parameters."""
    layers = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    matrices = [p for layer in layers for p in layer.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=1e-3), _adamw(others)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "adamw": lambda model: [_adamw(model.parameters())],
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)],
    "muon": _muon,
}


def measure(
    *,
    model_name: str,
    settings: dict[str, Any],
    optimizer_name: str,
    link_gbs: float,
    host_gbs: float,
    accumulation: int,
    clips: bool,
    steps: int,
    script_threads: int = 0,
    steps_on_host: bool = False,
    disk_gbs: float = 2.0,
    activations: float = 1.0,
) -> dict[str, Any]:
    """Takes steps in this process. Returns figures of each step after the warm-up, and the spans of the last one."""
    import standin_device

    compiled = standin_device.register(standin_device.build())
    from hf_zero.engine import assemble
    from hf_zero.engine.engine import ZeroEngine
    from hf_zero.offload import choice

    torch.set_num_threads(1)
    workload = SMALLER[model_name]
    model = workload.make_model().to(standin_device.NAME)
    smaller = NUMEL[model_name] / sum(parameter.numel() for parameter in model.parameters())
    settings = {"bucket_bytes": round(BUCKET_BYTES / smaller), **settings}
    optimizers = OPTIMIZERS[optimizer_name](model)
    link, memory = 1e9 * link_gbs / smaller, 1e9 * host_gbs / smaller
    script = min(memory, 1e9 * THREAD_GBS * script_threads / smaller) if script_threads else memory
    # A product of matrices with half the rows and columns has an eighth of the operations.
    products = 1e12 * HOST_TFLOPS / smaller**1.5
    cores = Cores(compiled, script, memory)
    cores.release()
    kept_bytes = activations * ACTIVATIONS_MIB[model_name] * 2**20 / smaller
    disk = 1e9 * disk_gbs / smaller
    machine = Machine(
        ranks_a_node=1,
        # A third is forward. The optimizer's kernels are in `PLAIN_MS`.
        flops=3 / (1e-3 * PLAIN_MS[model_name]),
        step_flops=float("inf"),
        memory_bytes_a_second=float("inf"),
        host_bytes_a_second=link,
        host_step_bytes_a_second=memory,
        rank_step_bytes_a_second=memory,
        host_step_flops=products,
        disk_bytes_a_second=disk,
    )
    config = ZeroConfig.from_dict(settings)
    layout = lay_out(
        model,
        optimizers,
        config,
        ranks_without_a_group(1, 1, config, "standin"),
        torch.device(standin_device.NAME),
        free_bytes=0 if steps_on_host else None,
    )
    kept = Activations(curve=(), saved_bytes=round(kept_bytes), flops=3, forward_flops=1, tokens=0, shape="")
    planned = step_time(layout, machine, kept, accumulation)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(choice, "choose_host_cores", lambda device: cores))
        if steps_on_host:
            # As on a device without room for gradients.
            stack.enter_context(mock.patch.object(assemble, "has_room_to_step", return_value=False))
        engine = ZeroEngine(model, optimizers, settings)
    add_kernels(compiled, model, model_name, kept_bytes)
    host = Host(compiled, disk)
    batches = [
        {name: values.to(standin_device.NAME) for name, values in workload.make_batch(0, number).items()}
        for number in range(accumulation)
    ]
    marks: list[tuple[float, int, int]] = []
    losses = []
    with host.noting():
        compiled.start_clock(link, link, memory, LAUNCH_S, CPU_FACTOR, products)
        # One more, which shows when the last one ends.
        for _ in range(WARMUP_STEPS + steps + 1):
            marks.append((compiled.busy(), compiled.noted(), len(host.spans)))
            for number, batch in enumerate(batches):
                with ExitStack() as stack:
                    if number + 1 < len(batches):
                        stack.enter_context(engine.no_sync())
                    loss = model(**batch).loss / len(batches)
                    host.backward(loss)
                losses.append(loss.detach())
            if clips:
                engine.clip_grad_norm_(MAX_NORM)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        spans = compiled.end_clock()
    of_device = [Span(kind, label, 1e3 * begin, 1e3 * end) for kind, label, _, begin, end in spans]
    of_host = [Span(lane, label, 1e3 * begin, 1e3 * end, 1e3 * busy) for lane, label, begin, end, busy in host.spans]
    found = of_device + of_host
    kernels_ms = accumulation * PLAIN_MS[model_name]
    first = units_of(model, model_name)[0][0]
    begins = [span.begin_ms for span in found if span.lane == "kernel" and span.label == f"forward {first}"]
    steps_ms = list(zip(begins[::accumulation], begins[accumulation::accumulation]))[WARMUP_STEPS:]
    engine.close()
    return {
        "steps": [
            # All spans queued by the step. Some begin after the next step's first kernel.
            _figures(of_device[device:next_device] + of_host[at_host:next_host], kernels_ms, *step)
            | {"script_ms": 1e3 * (next_busy - busy), "planned_ms": 1e3 * planned.step_s}
            for step, ((busy, device, at_host), (next_busy, next_device, next_host)) in zip(
                steps_ms, list(pairwise(marks))[WARMUP_STEPS:]
            )
        ],
        "spans": [
            replace(span, begin_ms=span.begin_ms - steps_ms[-1][0], end_ms=span.end_ms - steps_ms[-1][0]).__dict__
            for span in found
            if span.end_ms > steps_ms[-1][0] and span.begin_ms < steps_ms[-1][1] + FORWARD * PLAIN_MS[model_name]
        ],
        "smaller": smaller,
        "losses": [loss.item() for loss in losses],
        "device_peak_bytes": compiled.peak(),
        "pinned_bytes": compiled.most_pinned(),
    }


def _figures(spans: list[Span], kernels_ms: float, begin_ms: float, end_ms: float) -> dict[str, float]:
    """Figures of the step from one forward's begin to the next one's."""
    totals: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.lane in ("host", "host thread"):
            totals[span.label.rstrip("0123456789 ")] += span.busy_ms
        else:
            totals[span.lane] += span.ms
    return {
        "whole_ms": end_ms - begin_ms,
        "exposed_ms": end_ms - begin_ms - kernels_ms,
        **{
            f"{name.replace(' ', '_')}_ms": totals[name]
            for name in (*COMPUTED, "down", "up", "disk", "host waits", "device waits")
        },
    }


def summarize(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all steps of all runs."""
    steps = [step for run in runs for step in run["steps"]]
    found = {name: median(step[name] for step in steps) for name in steps[0]}
    host = sum(found[f"{name.replace(' ', '_')}_ms"] for name in COMPUTED)
    moved = found["down_ms"] + found["up_ms"] + found["disk_ms"] + host
    return found | {
        "host_ms": host,
        "moved_ms": moved,
        "slowest_ms": max(step["whole_ms"] for step in steps),
        "fastest_ms": min(step["whole_ms"] for step in steps),
        "device_peak_bytes": max(run["device_peak_bytes"] for run in runs),
        "pinned_bytes": max(run["pinned_bytes"] for run in runs),
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    columns = [
        ("way", "way"),
        ("step ms", "whole_ms", ".1f"),
        ("fastest", "fastest_ms", ".0f"),
        ("slowest", "slowest_ms", ".0f"),
        ("of plain", "ratio", ".2f"),
        ("planned", "planned_ratio", ".2f"),
        ("exposed", "exposed_ms", ".1f"),
        ("% of copies and host", lambda row: 100 * row["exposed_share"] if row["exposed_share"] else None, ".0f"),
        ("script", "script_ms", ".1f"),
        ("down", "down_ms", ".1f"),
        ("up", "up_ms", ".1f"),
        ("disk", "disk_ms", ".0f"),
        *((name, f"{name.replace(' ', '_')}_ms", ".1f") for name in COMPUTED),
        ("device MiB", "device_peak_bytes", ",.0f", 2**20),
        ("pinned MiB", "pinned_bytes", ",.0f", 2**20),
    ]
    print_table(title, columns, rows, width=200)


def show_buckets(title: str, spans: list[Span]) -> None:
    """Prints when each bucket's gradient is copied, when it is stepped and when its parameters are copied, and all waits."""
    rows: dict[int, dict[str, Any]] = defaultdict(dict)
    for span in spans:
        kind, _, number = span.label.rpartition(" ")
        if span.lane in ("down", "up", "host") and kind in ("gradient", "step", "parameters") and span.begin_ms >= 0:
            first = rows[int(number)].setdefault(kind, span)
            rows[int(number)][kind] = replace(first, end_ms=max(first.end_ms, span.end_ms))
    columns = [("bucket", "bucket")]
    for kind, heading in (("gradient", "gradient down"), ("step", "host step"), ("parameters", "parameters up")):
        columns += [(heading, kind)]
    found = [
        {"bucket": str(number)}
        | {
            kind: f"{row[kind].begin_ms:.1f} - {row[kind].end_ms:.1f}" if kind in row else None
            for kind in ("gradient", "step", "parameters")
        }
        for number, row in sorted(rows.items())
    ]
    print_table(f"{title}: ms from the step's first kernel", columns, found)
    waits = [span for span in spans if span.lane in ("host waits", "device waits") and span.ms > 0.05]
    for span in sorted(waits, key=lambda span: span.begin_ms):
        who = span.lane.removesuffix(" waits")
        print(f"{span.begin_ms:8.1f} ms: the {who} waits {span.ms:.1f} ms for {span.label or 'its kernels'}")


COLORS = {
    "forward": "tab:blue",
    "backward": "tab:cyan",
    "gradient": "tab:orange",
    "parameters": "tab:green",
    "norm": "tab:red",
    "clip": "tab:pink",
    "step": "tab:purple",
    "sum": "tab:brown",
}


def draw(path: Path, runs: list[tuple[str, list[Span]]]) -> None:
    """Draws one step of each run, one below the other, without a background: a bar for each span, by lane."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(dict.fromkeys(inked, INK) | {"axes.facecolor": "none", "legend.frameon": False}):
        figure = Figure(figsize=(14, 0.8 + 2.4 * len(runs)), facecolor="none", layout="constrained")
        axes = figure.subplots(len(runs), 1, sharex=True, squeeze=False)
        for axis, (title, spans) in zip(axes[:, 0], runs):
            lanes = [lane for lane in LANES if any(span.lane == lane for span in spans)]
            for span in spans:
                kind = span.label.split(" ")[0]
                lane = lanes.index(span.lane)
                color = COLORS.get(kind, "lightgray") if "waits" not in span.lane else "lightgray"
                axis.barh(lane, span.ms, left=span.begin_ms, height=0.8, color=color, edgecolor=INK, linewidth=0.4)
                number = span.label.rpartition(" ")[2]
                if number.isdigit() and span.lane in ("down", "up", "host") and span.ms > 1.2:
                    middle = span.begin_ms + span.ms / 2
                    axis.text(middle, lane, number, ha="center", va="center", fontsize=6, color="white")
            axis.set_yticks(range(len(lanes)), lanes)
            axis.invert_yaxis()
            axis.set_title(title, loc="left", fontsize=10)
        axes[-1, 0].set_xlabel("ms from the step's first kernel")
        used = {span.label.split(" ")[0] for _, spans in runs for span in spans if "waits" not in span.lane}
        handles = [Patch(color=color, label=kind) for kind, color in COLORS.items() if kind in used]
        figure.legend(handles=handles, loc="outside upper right", ncol=len(handles), fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_png(figure, path, dpi=110)
    print(f"drawn in {path}")


def ways_of(options: Any, folder: str) -> dict[str, dict[str, Any]]:
    """Arguments of `measure` by the names of tiers. The first is a step without offload."""
    moments = {"moments": options.moments} if options.moments != "fp32" else {}
    ways = {}
    for tier in dict.fromkeys(["device", *options.tiers]):
        settings = TIERS[tier] | moments
        if tier == "files":
            settings["offload"] = settings["offload"] | {"nvme_path": folder}
        ways[tier] = {"settings": settings, "steps_on_host": tier == "stepped there"}
    return ways


def compare(options: Any) -> dict[str, Any]:
    """Runs each way at each link speed, in turn, and shows rows, buckets and the picture. Returns the figures."""
    import standin_device

    # In this process: the build loads the library, and a process that measures loads it once.
    standin_device.build()
    figures: dict[str, Any] = {}
    drawn: list[tuple[str, list[Span]]] = []
    folder = tempfile.TemporaryDirectory(prefix="timeline-", dir=options.nvme_path)
    ways = ways_of(options, folder.name)
    for name in options.models or list(PLAIN_MS):
        for link in options.links:
            runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for way in list(ways) * options.rounds:
                arguments = {"model_name": name, "optimizer_name": options.optimizer, **ways[way]}
                arguments |= {"link_gbs": link, "host_gbs": options.host_gbs, "clips": options.clip}
                arguments |= {"accumulation": options.accumulation, "steps": options.steps}
                arguments |= {"script_threads": options.script_threads, "disk_gbs": options.disk_gbs}
                arguments |= {"activations": options.activations}
                runs[way].append(run_alone(measure, time_limit_s=1800, keyword_arguments=arguments))
            rows = [{"way": way, **summarize(found)} for way, found in runs.items()]
            for row in rows:
                row["ratio"] = row["whole_ms"] / rows[0]["whole_ms"]
                row["planned_ratio"] = row["planned_ms"] / rows[0]["planned_ms"]
                # A plain step with this optimizer and these moments, whose host may be late as well.
                row["exposed_ms"] = row["whole_ms"] - rows[0]["whole_ms"]
                row["exposed_share"] = row["exposed_ms"] / row["moved_ms"] if row["moved_ms"] else None
            off = [row["way"] for row in rows if abs(row["planned_ratio"] / row["ratio"] - 1) > PLAN_ERROR]
            differ = [way for way, found in runs.items() if found[0]["losses"] != runs["device"][0]["losses"]]
            more = f", {options.accumulation} micro-batches" if options.accumulation > 1 else ""
            moments = f", moments in {options.moments}" if options.moments != "fp32" else ""
            title = f"{name}, {options.optimizer}{moments}{more}, {link:g} GB/s"
            show(f"{title}; the host's memory: {options.host_gbs:g} GB/s", rows)
            print("losses equal the device tier's" if not differ else f"LOSSES DIFFER: {differ}")
            print(*(f"the plan of {way} is more than {PLAN_ERROR:.0%} off" for way in off), sep="\n")
            if "host" in runs:
                show_buckets(title, [Span(**span) for span in runs["host"][-1]["spans"]])
            drawn += [
                (f"{title}, {way}", [Span(**span) for span in runs[way][-1]["spans"]])
                for way in reversed(ways)
                if way != "device"
            ]
            figures[title] = {"rows": rows, "equal": not differ, "planned": not off}
    folder.cleanup()
    if options.picture:
        draw(Path(options.picture), drawn)
    return figures
