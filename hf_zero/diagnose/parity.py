"""The same training steps under DDP and under the engine, compared."""

import copy
import dataclasses
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

from ..config import AUTO, ConfigLike, ZeroConfig
from ..engine.engine import ZeroEngine
from .parity_report import ParityReport, compare, repeats
from .recorder import Recorder
from .recording import Recording, write_trace
from .split_copies import LocalValues, PlainCopies, is_split

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
LossOf = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is trained in both runs."""

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

    Both runs start from the model's weights as they are, with the same random numbers and batches; the model itself is left as
    it is. Without a process group, or at one rank, the run to compare with is the plain model. A model that transformers has
    split over ranks (tensor, expert parallelism) is compared with its own run, gradients averaged over its copies by a plain
    all-reduce; it is trained itself, and has its values again afterwards, in new parameters. Collective.

    Args:
        model: in train mode or not, on the device to train on.
        batches: this rank's, each what `loss` takes; the ranks of one copy of a split model need the same.
        config: anything `ZeroConfig.of` takes. On an accelerator gradients are added in float32, unless `reduce_dtype` or
            `comm.gradients` has another dtype.
        optimizer: makes one for a copy of the model; by default AdamW with learning rate 1e-3.
        loss: of a model and a batch; by default the loss that the model returns for `model(**batch)`, or `model(*batch)` where a
            batch is no mapping.
        steps: optimizer steps, fewer where there are fewer batches.
        accumulation: micro-batches a step.
        max_norm: clips the gradients of each step.
        tolerance: relative difference that passes; None asks for equal bits where they are to be expected, and otherwise
            for what the set-up makes to be expected.
        seed: of the random numbers of each run, to which each rank's number is added.

    Returns:
        The same report on all ranks; `passed` is the verdict, and it prints as a few sentences.

    Raises:
        ParityError: there are fewer batches than one step takes. ConfigError, ValueError: the engine does not train this model.
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
    """A model to train: what is called, what its micro-batches run in, how it is clipped, what ends it.

    Attributes:
        reduce: what is left to do behind the last backward of a step.
        place: of this rank among those with batches of their own.
    """

    entry: nn.Module
    no_sync: Callable[[], AbstractContextManager[Any]]
    clip: Callable[[float], torch.Tensor]
    close: Callable[[], None]
    place: int
    reduce: Callable[[], None] = lambda: None


def _split_stock(model: nn.Module, made: torch.optim.Optimizer) -> _Trained:
    copies = PlainCopies(model, made)
    return _Trained(
        entry=model,
        no_sync=nullcontext,
        clip=copies.clip,
        close=lambda: None,
        place=copies.place,
        reduce=copies.average,
    )


def _stock(model: nn.Module, made: torch.optim.Optimizer) -> _Trained:
    entry = DistributedDataParallel(model, find_unused_parameters=True) if _world_size() > 1 else model
    return _Trained(
        entry=entry,
        no_sync=getattr(entry, "no_sync", nullcontext),
        clip=lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        close=lambda: None,
        place=_rank(),
    )


def _with_engine(model: nn.Module, made: torch.optim.Optimizer, config: ZeroConfig) -> _Trained:
    engine = ZeroEngine(model, [made], dataclasses.replace(config, report=False), find_unused_parameters=True)
    return _Trained(
        entry=model, no_sync=engine.no_sync, clip=engine.clip_grad_norm_, close=engine.close, place=engine.groups.rank
    )


def _adding_in_float32(config: ZeroConfig, model: nn.Module) -> ZeroConfig:
    """NCCL adds 16-bit gradients in 16 bits, which would read as a fault of the engine; gloo adds them in float32."""
    is_on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if is_on_host or config.reduce_dtype != AUTO or config.comm.quantises:
        return config
    return dataclasses.replace(config, reduce_dtype="float32")


def _record(
    job: _Job, folder: Path, prepare: Callable[[nn.Module, torch.optim.Optimizer], _Trained]
) -> Callable[[], Recording]:
    """Trains a copy of the model; returns what reads the recording, on rank 0."""
    folder.mkdir()
    with _to_train(job.model) as model:
        recorder = _train(job, model, folder, prepare)
    for rank, trace in enumerate(_from_all_ranks(recorder.trace)):
        write_trace(folder, rank, trace)
    return recorder.read


@contextmanager
def _to_train(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of the model; one that is split over ranks itself, with its values given back afterwards."""
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
    seed_everything(job.seed + trained.place)
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
            f"hf_zero parity: {type(model).__name__} returned {type(output).__name__} without a loss. Give `loss`, a function of "
            "the model and a batch."
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
    """What rank 0 finds, a report or an error, on every rank."""
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
