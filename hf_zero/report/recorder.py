"""Records a training run: losses, times, memory, and the trace of a step."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.faults import in_one_line
from ..comm.ledger import CommRow, Ledger
from ..config import ZeroConfig
from ..device import peak_bytes
from ..engine.engine import ZeroEngine
from ..engine.report_tables import CommReport
from ..hooks.weak import WeakHook
from ..queues import HostValue, Moment
from .run_files import LogFile, read_lines

# ---- Counts steps, samples, tokens and seconds of a run with the host's clock, as the hooks are called ----


@dataclass(kw_only=True)
class Totals:
    """Sums since training began in this process.

    Attributes:
        rows, tokens: samples and tokens that this rank's forwards received.
        forward_s, backward_s, optimizer_s: seconds of steps; clipping is part of backward.
        between_s: seconds from the end of a step to the next forward.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    between_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s + self.between_s


class Counts:
    """Adds up amounts between the calls of hooks.

    Attributes:
        totals: the sums so far.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self._before = Totals()
        self._since_s = 0.0
        self._is_between = self._is_in_backward = False

    def forward(self, now_s: float, first: torch.Tensor | None) -> None:
        """Records the start of a training forward.

        Args:
            first: the forward's first tensor. Its samples are counted and, if it has two dimensions of integers, its tokens.
        """
        if self._is_between:
            self.totals.between_s += now_s - self._since_s
        elif self._is_in_backward:
            self.totals.backward_s += now_s - self._since_s
        self._since_s, self._is_between, self._is_in_backward = now_s, False, False
        if first is not None and first.dim():
            self.totals.rows += first.shape[0]
            if first.dim() == 2 and not first.is_floating_point():
                self.totals.tokens += first.numel()

    def forward_ended(self, now_s: float) -> None:
        self.totals.forward_s += now_s - self._since_s
        self._since_s, self._is_in_backward = now_s, True

    def step(self, now_s: float) -> None:
        """Records the start of the optimizer's step."""
        if self._is_in_backward:
            self.totals.backward_s += now_s - self._since_s
        self._since_s, self._is_in_backward = now_s, False

    def step_ended(self, now_s: float) -> None:
        self.totals.optimizer_s += now_s - self._since_s
        self.totals.steps += 1
        self._since_s, self._is_between = now_s, True

    def taken(self) -> dict[str, int | float]:
        """Returns the amounts since the previous call, as fields of a log line."""
        before, self._before = self._before, replace(self.totals)
        return {name: _rounded(value - getattr(before, name)) for name, value in vars(self._before).items()}


def _rounded(value: float) -> int | float:
    return round(value, 6) if isinstance(value, float) else value


# ---- Traces one step: computation, collectives, and waits ----


class StepTrace:
    """Traces from the end of one optimizer step to the end of the next, by the training device's clock.

    The traced step records two moments per collective and one per phase. Nothing waits for these moments.

    Args:
        step: the step to trace.
    """

    def __init__(self, ledger: Ledger, step: int):
        self.step = step
        self._ledger = ledger
        ledger.start_timing()
        self._begin = ledger.now()
        self._phases: list[tuple[str, Moment]] = []
        self._spans: list[tuple[str, str, Moment, Moment]] = []
        ledger.traced = self._spans

    def enter(self, phase: str) -> None:
        """Ends the previous phase and begins `phase`."""
        self._phases.append((phase, self._ledger.now()))

    def end(self) -> None:
        """Ends the trace after the optimizer step."""
        self._phases.append(("", self._ledger.now()))
        self._ledger.traced = None

    @property
    def is_past(self) -> bool:
        """Whether the device has reached the end of the trace. This check does not block the device."""
        return self._phases[-1][1].is_past

    def as_line(self) -> dict[str, Any]:
        """Returns seconds since the previous step: phases, spans under way, and waits, as [name, start, end]."""
        marks = [(phase, self._seconds(moment)) for phase, moment in self._phases]
        total_s = marks[-1][1]
        spans: dict[str, list[list[Any]]] = {"under_way_seconds": [], "wait_seconds": []}
        for kind, attribute, start, end in self._spans:
            # A collective from the previous step is shown from the end of the previous step.
            began_s, ended_s = max(0.0, self._seconds(start)), min(total_s, self._seconds(end))
            if ended_s > began_s:
                spans[attribute].append([kind, round(began_s, 7), round(ended_s, 7)])
        first = [["between steps", 0.0, round(marks[0][1], 7)]]
        phases = [[name, round(start, 7), round(end, 7)] for (name, start), (_, end) in pairwise(marks)]
        return {
            "seconds": round(total_s, 7),
            "phases": first + phases,
            "under_way": spans["under_way_seconds"],
            "waits": spans["wait_seconds"],
        }

    def _seconds(self, moment: Moment) -> float:
        return self._begin.seconds_until(moment)


# ---- Writes the log of a run: hooks on the model and its optimizer count, and write a line from time to time ----

_TRACED_STEP = 5
_SHORTEST_S = 0.05
_LINES = 500
"""A line of steps is written after this fraction of the time so far, so a day of training has a few thousand lines."""

_MIB = 2**20


class RunRecorder:
    """Records the training of one engine's model, on rank 0 only. No method is collective.

    Accelerate and Trainer record if `report: true` is set. In another loop, put
    `with RunRecorder(engine, "runs/first") as run:` around the loop, and call `run.log({"loss": ...})` for each loss.

    Args:
        folder: where the log and, at the end, the page are written.
        step: the optimizer step from which a resumed run continues.
        plan: planned bytes per rank by kind, and DDP's bytes, as {"plan": {kind: bytes}, "ddp": {kind: bytes}}.

    Attributes:
        step: optimizer steps so far, including those before a resume.
        folder: the folder of the log.
        is_open: True on rank 0 until the end.
    """

    def __init__(
        self,
        engine: ZeroEngine,
        folder: str | Path,
        *,
        step: int = 0,
        plan: Mapping[str, Mapping[str, int]] | None = None,
    ):
        self.folder = Path(folder)
        self.step = step
        self.is_open = engine.world_groups.rank == 0
        self._engine = engine
        self._plan = plan or {}
        # The ledger only measures times if somebody reads them, and only rank 0 does.
        comm = engine.comm_report() if self.is_open else CommReport(rows=())
        self._at_start = {row.kind: row for row in comm.rows}
        self._counts = Counts()
        self._before = self._shown = (replace(self._counts.totals), comm)
        self._trace: StepTrace | None = None
        self._traced: StepTrace | None = None
        self._waiting: tuple[dict[str, Any], dict[str, HostValue]] | None = None
        self._loss: torch.Tensor | None = None
        self._has_begun = False
        self._memory_due_s = self._began_s = self._flushed_s = time.perf_counter()
        self._handles: list[Any] = []
        if self.is_open:
            self._file = LogFile(self.folder)
            self._handles = self._install(engine.entry, engine.optimizers[0].optimizer)

    def _install(self, entry: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        return [
            # Run before the engine's own hook, which waits for parameters.
            entry.register_forward_pre_hook(
                WeakHook(self, RunRecorder._before_forward), with_kwargs=True, prepend=True
            ),
            entry.register_forward_hook(WeakHook(self, RunRecorder._after_forward)),
            optimizer.register_step_pre_hook(WeakHook(self, RunRecorder._before_step)),
            optimizer.register_step_post_hook(WeakHook(self, RunRecorder._after_step)),
        ]

    def __enter__(self) -> "RunRecorder":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end("finished" if error is None else in_one_line(error))

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Logs the numbers among `values`, from a script or Trainer."""
        if not self.is_open:
            return
        numbers = {name: _number(value) for name, value in values.items()}
        known = {name: value for name, value in numbers.items() if value is not None}
        if known:
            self._write("log", self.step if step is None else step, values=known)

    def stall(self, seconds: float, what: str, folder: Path | None = None) -> None:
        """Records a save's pause of training.

        Args:
            what: "save", or "copy" for the work that a background save leaves to the next step.
            folder: the folder of the save.
        """
        if self.is_open:
            where = {} if folder is None else {"folder": str(folder.resolve())}
            self._write("stall", self.step, seconds=round(seconds, 4), what=what, **where)

    def go_on_from(self, folder: Path) -> None:
        """Continues the count of steps from the save of `folder`, if this log contains the save."""
        saved, lines = str(folder.resolve()), read_lines(self.folder)
        found = [line["step"] for _, line in lines if line is not None and line.get("folder") == saved]
        self.step = found[-1] if found else self.step

    def figures(self) -> dict[str, float]:
        """Returns mean figures per step since the previous call, as `zero/...`; empty if no step ran since."""
        (before, sent_before), now = self._shown, self._counts.totals
        steps, seconds, ranks = now.steps - before.steps, now.seconds - before.seconds, self._engine.groups.world_size
        if not steps or seconds <= 0:
            return {}
        comm = self._engine.comm_report()
        self._shown = (replace(now), comm)
        figures = {
            "zero/steps_per_s": steps / seconds,
            "zero/samples_per_s": ranks * (now.rows - before.rows) / seconds,
            "zero/tokens_per_s": ranks * (now.tokens - before.tokens) / seconds,
            "zero/sent_mib": max(0, comm.bytes_sent - sent_before.bytes_sent) / steps / _MIB,
            "zero/wait_s": max(0.0, comm.wait_seconds - sent_before.wait_seconds) / steps,
            "zero/peak_mib": peak_bytes(self._engine.device) / _MIB,
        }
        return {name: float(f"{value:.6g}") for name, value in figures.items() if value}

    def end(self, how: str = "finished") -> None:
        """Writes the last lines and the page. Later calls do nothing. `how`: "finished", or why the run ended."""
        if not self.is_open:
            return
        for handle in self._handles:
            handle.remove()
        self._engine.transport.ledger.traced = None
        self._flush()
        self._write_waiting()
        self._write_trace()
        if self._counts.totals.steps < 2:
            self._write_memory()
        self._write_comm()
        self._write("end", self.step, how=how)
        self.is_open = False
        self._file.close()
        self._write_page()

    # ---- hooks ----

    def _before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        values = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        self._counts.forward(time.perf_counter(), next(values, None))
        if self._trace is not None:
            self._trace.enter("forward")

    def _after_forward(self, module: nn.Module, args: tuple, outputs: object) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        self._loss = _loss_in(outputs)
        self._counts.forward_ended(time.perf_counter())
        if self._trace is not None:
            self._trace.enter("backward")

    def _before_step(self, *_args: object) -> None:
        now_s = time.perf_counter()
        self._counts.step(now_s)
        if self._trace is not None:
            self._trace.enter("optimizer step")
        elif self._counts.totals.steps and now_s >= self._memory_due_s:
            # After the first step the optimizer state exists, and at this point the gradients exist too. Write the report
            # rarely, because it visits every tensor.
            self._memory_due_s = now_s + max(60.0, 0.1 * (now_s - self._began_s))
            self._write_memory()
            self._write_comm()

    def _after_step(self, *_args: object) -> None:
        now_s = time.perf_counter()
        self._counts.step_ended(now_s)
        self._begin()
        self.step += 1
        if self._trace is not None:
            self._trace.end()
            self._trace, self._traced = None, self._trace
        if now_s - self._flushed_s >= max(_SHORTEST_S, (now_s - self._began_s) / _LINES):
            self._flush()
        if self._counts.totals.steps == _TRACED_STEP - 1:
            self._trace = StepTrace(self._engine.transport.ledger, self.step + 1)

    # ---- lines ----

    def _write(self, kind: str, step: int, **values: Any) -> None:
        self._begin()
        self._file.write(kind, step, **values)

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        engine = self._engine
        self._file.write(
            "start",
            self.step,
            model=type(engine.model).__name__,
            parameters=sum(slot.interval.numel for bucket in engine.buckets for slot in bucket.layout.slots),
            optimizers=[type(sharded.optimizer).__name__ for sharded in engine.optimizers],
            ranks=engine.groups.world_size,
            stage=engine.config.stage,
            said=_said(engine.config.to_dict(), ZeroConfig().to_dict()),
            backend=engine.groups.backend,
            device=str(engine.device),
            **self._plan,
        )

    def _flush(self) -> None:
        """Writes a line for the steps since the previous line."""
        self._flushed_s = time.perf_counter()
        self._write_waiting()
        engine, (before, sent_before) = self._engine, self._before
        if self._counts.totals.steps == before.steps:
            return
        comm, group = engine.comm_report(), engine.optimizers[0].optimizer.param_groups[0]
        self._before = (replace(self._counts.totals), comm)
        values = {
            "steps": 0,
            **self._counts.taken(),
            "lr": _number(group.get("lr")) if not isinstance(group.get("lr"), torch.Tensor) else None,
            "skipped": engine.bad_steps.skipped,
            "sent_bytes": max(0, comm.bytes_sent - sent_before.bytes_sent),
            "wait_s": round(max(0.0, comm.wait_seconds - sent_before.wait_seconds), 6),
            "peak_bytes": peak_bytes(engine.device),
        }
        scalars = {"loss": self._loss, "grad_norm": engine.last_grad_norm}
        under_way = {name: HostValue(scalar.detach()) for name, scalar in scalars.items() if scalar is not None}
        self._waiting = ({"step": self.step, **values}, under_way)
        if engine.device.type == "cpu":
            self._write_waiting()
        if self._traced is not None and self._traced.is_past:
            self._write_trace()

    def _write_waiting(self) -> None:
        """Writes the previous line. By the time the next line is due, an accelerator has copied its values to the host."""
        if self._waiting is not None:
            (values, under_way), self._waiting = self._waiting, None
            scalars = {name: value.value() for name, value in under_way.items()}
            self._write("steps", values.pop("step"), **values, **scalars)

    def _write_trace(self) -> None:
        if self._traced is not None:
            trace, self._traced = self._traced, None
            self._write("trace", trace.step, **trace.as_line())

    def _write_memory(self) -> None:
        report = self._engine.memory_report()
        rows = [[row.kind, row.bytes, row.ddp_bytes, row.where] for row in report.rows]
        self._write("memory", self.step, rows=rows, peak_bytes=report.peak_bytes)

    def _write_comm(self) -> None:
        report: CommReport = self._engine.comm_report()
        rows = [self._since_the_start(row) for row in report.rows]
        self._write("comm", self.step, rows=[row for row in rows if row[1] > 0])

    def _since_the_start(self, row: CommRow) -> list[Any]:
        before = self._at_start.get(row.kind, CommRow(kind=row.kind))
        names = ("calls", "bytes_sent", "bytes_between", "wait_seconds", "under_way_seconds")
        return [row.kind, *(getattr(row, name) - getattr(before, name) for name in names)]

    def _write_page(self) -> None:
        # Imported only here: a running training needs neither the page nor its template engine.
        from .page import write_page

        try:
            said = f"the report of this run is {write_page(self.folder)}"
        except OSError as error:
            said = (
                f"the report of this run could not be written ({error}); write it with `hf-zero report {self.folder}`"
            )
        print(f"hf_zero: {said}", file=sys.stderr, flush=True)


def _loss_in(outputs: object) -> torch.Tensor | None:
    """Finds the scalar loss in a model output of transformers, or in an output of only the loss."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    return found.detach() if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def _number(value: object) -> float | int | None:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, float | int) and not isinstance(value, bool) else None


def _said(settings: Mapping[str, Any], usual: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the settings with values other than their defaults, under dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _said(value, usual[name], f"{prefix}{name}.")
        elif value != usual[name]:
            found[f"{prefix}{name}"] = value
    return found
