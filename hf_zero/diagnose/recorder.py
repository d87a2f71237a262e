"""Records what a training run computes: the loss of each backward, the gradients of each optimizer step, parameters after it."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.engine import ZeroEngine
from ..optimizer.state.optimizer import engine_stepped_by, whole_parameters
from .recording import Facts, Recording, write_facts, write_tensors, write_trace
from .split_copies import put_together


class Recorder:
    """Writes the first optimizer steps of a run to a folder, the same with DDP, without it, and with the engine.

    Full gradients and parameters are collected from all ranks and written by rank 0; each rank has losses of its own.

    Args:
        folder: rank 0 writes gradients and parameters there, and each rank its losses when `close` is called.
        steps: how many steps to record, those of all optimizers counted.
        models: the models whose parameters are looked at, asked at the first step; wrappers such as DDP are seen through.
        on_done: called behind the last step that is recorded, on all ranks.

    Attributes:
        trace: the losses of this rank, a list for each step, and the norms that clipping returned.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        models: Callable[[], Sequence[nn.Module]],
        on_done: Callable[[], None] = lambda: None,
    ):
        self._folder = folder
        self._steps = steps
        self._models = models
        self._on_done = on_done
        self._names: dict[nn.Parameter, str] = {}
        self._hooked: set[torch.optim.Optimizer] = set()
        self._step = 0
        self._losses: list[float] = []
        self._norm: float | None = None
        self._config: dict[str, Any] | None = None
        self.trace: dict[str, list] = {"losses": [], "norms": []}

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Records the steps of an optimizer. Again is harmless."""
        if optimizer not in self._hooked:
            self._hooked.add(optimizer)
            optimizer.register_step_pre_hook(self._before_step)

    @contextmanager
    def watching_backward(self) -> Iterator[None]:
        """Within it, each `loss.backward()` of this process is recorded."""
        stock = torch.Tensor.backward

        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if tensor.numel() == 1:
                self.loss(tensor)
            stock(tensor, *args, **kwargs)

        changed: Any = torch.Tensor
        changed.backward = backward
        try:
            yield
        finally:
            changed.backward = stock

    def loss(self, value: torch.Tensor) -> None:
        """Records the loss of a micro-batch."""
        self._losses.append(value.detach().double().item())

    def norm(self, value: Any) -> None:
        """Records the gradient norm that clipping returned, if it did."""
        self._norm = None if value is None else float(value)

    def close(self) -> None:
        """Writes this rank's losses."""
        if self._losses and self._step < self._steps:
            self.trace["losses"].append(self._losses)
        write_trace(self._folder, self._rank, self.trace)

    # ---- a step ----

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        if self._step >= self._steps:
            return
        named = self._named(optimizer)
        engine = engine_stepped_by(optimizer)
        if self._step == 0:
            self._write("start", full_parameters(named, engine))
            self._write_facts(optimizer, named, engine)
        self._write(f"gradients-{self._step}", full_gradients(named, engine))
        # Registered in the step itself, and so behind the engine's own hook.
        handle = optimizer.register_step_post_hook(lambda *_: self._after_step(named, engine, handle))

    def _after_step(self, named: Mapping[str, nn.Parameter], engine: ZeroEngine | None, handle: Any) -> None:
        handle.remove()
        self._write(f"parameters-{self._step}", full_parameters(named, engine))
        self.trace["losses"].append(self._losses)
        self.trace["norms"].append(self._norm)
        self._losses, self._norm = [], None
        self._step += 1
        if self._step == self._steps:
            self._on_done()

    def _named(self, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
        if not self._names:
            models = list(self._models())
            for index, model in enumerate(models):
                prefix = f"model{index}." if len(models) > 1 else ""
                for name, parameter in model.named_parameters():
                    self._names[parameter] = prefix + bare_name(name)
        return {self._names[p]: p for p in whole_parameters(optimizer) if p in self._names and p.requires_grad}

    def _write(self, name: str, tensors: Iterator[tuple[str, torch.Tensor | None]]) -> None:
        """Every rank takes part in collecting what rank 0 writes."""
        if self._rank == 0:
            write_tensors(self._folder, name, {n: None if t is None else t.to("cpu", copy=True) for n, t in tensors})
        else:
            for _ in tensors:
                pass

    def _write_facts(
        self, optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], engine: ZeroEngine | None
    ) -> None:
        if self._rank == 0:
            write_facts(
                self._folder,
                Facts(
                    world_size=dist.get_world_size() if dist.is_initialized() else 1,
                    config=None if engine is None else engine.config.to_dict(),
                    dtypes=sorted({str(p.dtype).removeprefix("torch.") for p in named.values()}),
                    device=next(iter(named.values())).device.type if named else "cpu",
                    optimizer=type(optimizer).__name__,
                    order=list(named),
                ),
            )

    @property
    def _rank(self) -> int:
        """The launcher's before and after there is a process group."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    def read(self) -> Recording:
        """What rank 0 has written."""
        return Recording(self._folder)


def bare_name(name: str) -> str:
    """A parameter's name without what DistributedDataParallel and torch.compile put before it."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


@torch.no_grad()
def full_gradients(
    named: Mapping[str, nn.Parameter], engine: ZeroEngine | None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each parameter's whole reduced gradient; None where it has none. Collective with an engine."""
    for name, parameter in named.items():
        if engine is not None and engine.trains(parameter):
            gradient = engine.full_grad(parameter)
            yield name, None if gradient is None else engine.state.as_whole(parameter, gradient)
        else:
            yield name, None if parameter.grad is None else put_together(parameter.grad)


@torch.no_grad()
def full_parameters(
    named: Mapping[str, nn.Parameter], engine: ZeroEngine | None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each whole parameter. Collective with an engine."""
    if engine is not None:
        engine.finish_parameters()
    for name, parameter in named.items():
        if engine is None:
            yield name, put_together(parameter.detach())
        else:
            with engine.gathered(parameter):
                yield name, engine.state.as_whole(parameter, parameter.detach().clone())
