"""Trains with and without the engine, and compares the results."""

import copy
import dataclasses
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..comm.model_copies import ModelCopies
from ..config import AUTO, ConfigLike, ZeroConfig
from ..engine.engine import ZeroEngine
from ..engine.split_model import SplitModel, is_dtensor
from ..step.sharded_optimizer import engine_stepped_by, whole_parameters
from .parity_report import Facts, ParityReport, Recording, compare, repeats, write_facts, write_tensors, write_trace

# ---- Split models trained without the engine, with a plain all-reduce ----


def is_split(model: nn.Module) -> bool:
    """Whether parameters of a model are DTensors."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


class PlainCopies:
    """Averages gradients over the copies of a split model, as DistributedDataParallel does for whole models.

    Args:
        model: a model with DTensors, the same on all ranks. The constructor replaces its parameters, also in `optimizer`.
            Collective.

    Attributes:
        index: index of this rank's copy.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._model = model
        split = SplitModel(model, [optimizer])
        sets = [split.ranks, split.copy_ranks]
        experts = [name for name, parameter in model.named_parameters() if parameter in split.experts]
        split.restore()
        self._experts = {model.get_parameter(name) for name in experts}
        everyone: list[list[tuple[int, ...]]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, sets)
        copies, of_experts = (ModelCopies.of(theirs) for theirs in zip(*everyone))
        self.index = copies.copies.index(sets[0])
        self._size = len(copies.copies)
        self._group, self._expert_group = map(_own_group, (copies, of_experts))

    @torch.no_grad()
    def average(self) -> None:
        """Replaces the gradients by their means over the copies. A gradient missing in all copies stays None. Collective."""
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        used = used.to(_local(trained[0]).device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        for parameter, is_used in zip(trained, used.tolist()):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif is_dtensor(parameter) and is_dtensor(parameter.grad):
                # An embedding's gradient is a whole tensor.
                split: Any = parameter
                parameter.grad = split.grad.redistribute(placements=split.placements)
            gradient = _local(parameter.grad)
            # An expert's gradient is the sum over the batches of all ranks with tokens for the expert.
            dist.all_reduce(gradient, group=self._expert_group if parameter in self._experts else self._group)
            gradient.div_(self._size)

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients to a norm of the whole model of at most `max_norm`; returns the norm before. Collective."""
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        norm = torch.stack([put_together(each).double().square().sum() for each in gradients]).sum().sqrt()
        for gradient in gradients:
            _local(gradient).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class LocalValues:
    """Stores this rank's values of a split model for restoring, because a model on a device mesh cannot be copied."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._values = [_local(value).detach().clone() for value in self._held()]
        self._gradients = [parameter.grad for parameter in model.parameters()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restores the values of the model, and its gradients."""
        for value, kept in zip(self._held(), self._values, strict=True):
            _local(value).copy_(kept)
        for parameter, gradient in zip(self._model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient

    def _held(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]


def _own_group(copies: ModelCopies) -> dist.ProcessGroup | None:
    """Makes the group of the ranks with the same part of the model as this rank. Collective."""
    made = [(alike, dist.new_group(list(alike))) for alike in copies.dp_groups]
    return next(group for alike, group in made if dist.get_rank() in alike)


def put_together(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole tensor of a DTensor, or the tensor itself. Collective over the ranks of the split."""
    split: Any = tensor
    return split.full_tensor() if is_dtensor(tensor) else tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    split: Any = tensor
    return split.to_local() if is_dtensor(tensor) else tensor


# ---- Records a training run: losses of backwards, gradients of steps, parameters after them ----


class Recorder:
    """Writes the first optimizer steps of a run to a folder, in the same format for DDP, one process and the engine.

    Full gradients and parameters are collected from all ranks and written by rank 0. Each rank has its own losses.

    Args:
        folder: rank 0 writes gradients and parameters there, and each rank its losses when `close` is called.
        steps: number of steps to record, summed over all optimizers.
        models: returns the models whose parameters are recorded; called at the first step. Wrappers such as DDP are unwrapped.
        on_done: called after the last recorded step, on all ranks.

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
        """Records the steps of an optimizer. A second call has no effect."""
        if optimizer not in self._hooked:
            self._hooked.add(optimizer)
            optimizer.register_step_pre_hook(self._before_step)

    @contextmanager
    def watching_backward(self) -> Iterator[None]:
        """Records each `loss.backward()` of this process inside the context."""
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
        self._losses.append(value.detach().double().item())

    def norm(self, value: Any) -> None:
        """Records the gradient norm of a clip, if the clip returned one."""
        self._norm = None if value is None else float(value)

    def close(self) -> None:
        if self._losses and self._step < self._steps:
            self.trace["losses"].append(self._losses)
        write_trace(self._folder, self._rank, self.trace)

    # ---- A step ----

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        if self._step >= self._steps:
            return
        named = self._named(optimizer)
        engine = engine_stepped_by(optimizer)
        if self._step == 0:
            self._write("start", full_parameters(named, engine))
            self._write_facts(optimizer, named, engine)
        self._write(f"gradients-{self._step}", full_gradients(named, engine))
        # Register during the step, so the hook runs after the engine's own hook.
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
        """Collects tensors, and writes them on rank 0. Collective."""
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
        """Returns the rank of this process, also before there is a process group."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    def read(self) -> Recording:
        """Reads rank 0's recording."""
        return Recording(self._folder)


def bare_name(name: str) -> str:
    """Strips the prefixes of DistributedDataParallel and torch.compile from a parameter's name."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


@torch.no_grad()
def full_gradients(
    named: Mapping[str, nn.Parameter], engine: ZeroEngine | None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Returns each parameter's whole reduced gradient; None without one. Collective with an engine."""
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
    """Yields each whole parameter. Collective with an engine."""
    if engine is not None:
        engine.finish_parameters()
    for name, parameter in named.items():
        if engine is None:
            yield name, put_together(parameter.detach())
        else:
            with engine.gathered(parameter):
                yield name, engine.state.as_whole(parameter, parameter.detach().clone())


# ---- The same training steps under DDP and under the engine, compared ----

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
LossOf = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The training of both runs."""

    model: nn.Module
    batches: Sequence[Any]
    optimizer: MakeOptimizer
    loss: LossOf
    accumulation: int
    max_norm: float | None
    seed: int

    @property
    def steps(self) -> int:
        return len(self.batches) // self.accumulation


def parity(
    model: nn.Module,
    batches: Iterable[Any],
    config: ConfigLike = None,
    *,
    optimizer: MakeOptimizer | None = None,
    loss: LossOf | None = None,
    steps: int = 5,
    accumulation: int = 1,
    max_norm: float | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> ParityReport:
    """Trains a model for a few steps with DDP and with the engine, and compares losses, gradients and parameters.

    Both runs start from the current weights of the model, with the same random numbers and batches. The model itself is not
    modified. Without a process group, or with one rank, the plain model is used instead of DDP. A model that transformers has
    split over ranks (tensor or expert parallelism) is compared with its own run, whose gradients are averaged over its copies by
    a plain all-reduce. Such a model is trained itself; its values are restored afterwards, in new parameters. Collective.

    Args:
        model: in train mode or not, on the device to train on.
        batches: batches of this rank, in the form that `loss` accepts. The ranks of one copy of a split model need equal batches.
        config: any form that `ZeroConfig.of` accepts. On an accelerator gradients are added in float32, unless `reduce_dtype` or
            `comm.gradients` specifies another dtype.
        optimizer: makes an optimizer for a copy of the model; by default AdamW with learning rate 1e-3.
        loss: computes the loss of a model and a batch; by default the loss that `model(**batch)` returns, or `model(*batch)` if a
            batch is not a mapping.
        steps: number of optimizer steps, fewer if there are fewer batches.
        accumulation: micro-batches of a step.
        max_norm: clips the gradients of each step.
        tolerance: relative difference that passes. None requires equal bits if they are expected, and otherwise uses the
            tolerance of the set-up.
        seed: seed of the random numbers of each run; each rank's number is added.

    Returns:
        The same report on all ranks. `passed` is the verdict; `str` of the report is a few sentences.

    Raises:
        ParityError: there are fewer batches than one step needs. ConfigError, ValueError: the engine cannot train this model.
    """
    settings = _adding_in_float32(ZeroConfig.of(config), model)
    taken = list(islice(batches, steps * accumulation))
    job = _Job(
        model=model,
        batches=taken[: len(taken) // accumulation * accumulation],
        optimizer=optimizer or _adamw,
        loss=loss or _loss_of,
        accumulation=accumulation,
        max_norm=max_norm,
        seed=seed,
    )
    stock_run = _split_stock if is_split(model) else _stock
    with tempfile.TemporaryDirectory(prefix="hf-zero-parity-") as folder, _same_random_numbers_afterwards():
        stock = _record(job, Path(folder, "stock"), stock_run)
        engine = _record(job, Path(folder, "engine"), lambda model, made: _with_engine(model, made, settings))
        report = _on_all_ranks(lambda: compare(stock(), engine(), tolerance))
        if report.passed or report.reasons:
            return report
        again = _record(job, Path(folder, "again"), stock_run)
        return _on_all_ranks(lambda: dataclasses.replace(report, repeats=repeats(stock(), again())))


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """A model to train: the callable, the context of its micro-batches, its clip, and its end.

    Attributes:
        reduce: called after the last backward of a step.
        index: index of this rank among the ranks with different batches.
    """

    entry: nn.Module
    no_sync: Callable[[], AbstractContextManager[Any]]
    clip: Callable[[float], torch.Tensor]
    close: Callable[[], None]
    index: int
    reduce: Callable[[], None] = lambda: None


def _split_stock(model: nn.Module, made: torch.optim.Optimizer) -> _Trained:
    copies = PlainCopies(model, made)
    return _Trained(
        entry=model,
        no_sync=nullcontext,
        clip=copies.clip,
        close=lambda: None,
        index=copies.index,
        reduce=copies.average,
    )


def _stock(model: nn.Module, made: torch.optim.Optimizer) -> _Trained:
    entry = DistributedDataParallel(model, find_unused_parameters=True) if _world_size() > 1 else model
    return _Trained(
        entry=entry,
        no_sync=getattr(entry, "no_sync", nullcontext),
        clip=lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        close=lambda: None,
        index=_rank(),
    )


def _with_engine(model: nn.Module, made: torch.optim.Optimizer, config: ZeroConfig) -> _Trained:
    engine = ZeroEngine(model, [made], dataclasses.replace(config, report=False), find_unused_parameters=True)
    return _Trained(
        entry=model, no_sync=engine.no_sync, clip=engine.clip_grad_norm_, close=engine.close, index=engine.groups.rank
    )


def _adding_in_float32(config: ZeroConfig, model: nn.Module) -> ZeroConfig:
    """Makes reductions use float32 on accelerators. NCCL adds 16-bit gradients in 16 bits, which would look like an error."""
    is_on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if is_on_host or config.reduce_dtype != AUTO or config.comm.quantizes:
        return config
    return dataclasses.replace(config, reduce_dtype="float32")


def _record(
    job: _Job, folder: Path, prepare: Callable[[nn.Module, torch.optim.Optimizer], _Trained]
) -> Callable[[], Recording]:
    """Trains a copy of the model; returns a reader of the recording, on rank 0."""
    folder.mkdir()
    with _to_train(job.model) as model:
        recorder = _train(job, model, folder, prepare)
    for rank, trace in enumerate(_from_all_ranks(recorder.trace)):
        write_trace(folder, rank, trace)
    return recorder.read


@contextmanager
def _to_train(model: nn.Module) -> Iterator[nn.Module]:
    """Yields a copy of the model, or a split model itself, whose values are restored afterwards."""
    if not is_split(model):
        yield copy.deepcopy(model)
        return
    kept = LocalValues(model)
    yield model
    kept.put_back()


def _train(
    job: _Job, model: nn.Module, folder: Path, prepare: Callable[[nn.Module, torch.optim.Optimizer], _Trained]
) -> Recorder:
    made = job.optimizer(model)
    trained = prepare(model, made)
    recorder = Recorder(folder, job.steps, lambda: [model])
    recorder.watch(made)
    seed_everything(job.seed + trained.index)
    for step in range(job.steps):
        for micro in range(job.accumulation):
            batch = job.batches[step * job.accumulation + micro]
            with nullcontext() if micro == job.accumulation - 1 else trained.no_sync():
                value = job.loss(trained.entry, batch) / job.accumulation
                recorder.loss(value)
                value.backward()
        trained.reduce()
        if job.max_norm is not None:
            recorder.norm(trained.clip(job.max_norm))
        made.step()
        made.zero_grad()
    trained.close()
    return recorder


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def _loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    arguments = batch if isinstance(batch, tuple | list) else (batch,)
    output = model(**batch) if isinstance(batch, Mapping) else model(*arguments)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise ValueError(
            f"hf_zero parity: {type(model).__name__} returned {type(output).__name__} without a loss. Pass `loss`, a function "
            "of the model and a batch."
        )
    return found


def seed_everything(seed: int) -> None:
    """Seeds Python's, numpy's and torch's random numbers."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def _same_random_numbers_afterwards() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _from_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * _world_size()
    if _world_size() == 1:
        return [value]
    dist.all_gather_object(found, value)
    return found


def _on_all_ranks(judge: Callable[[], ParityReport]) -> ParityReport:
    """Returns rank 0's report, or raises its error, on every rank."""
    found: list[Any] = [None]
    if _rank() == 0:
        try:
            found = [judge()]
        except RuntimeError as error:
            found = [error]
    if _world_size() > 1:
        dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]
