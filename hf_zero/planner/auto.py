"""`stage: auto`: plans in `prepare` and at the start of training."""

import dataclasses
import inspect
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ..buckets.precision import resolve_casts
from ..config import AUTO, ConfigError, ZeroConfig
from ..device import ranks_on_this_host
from ..engine.models import joined
from ..forecast.fit import CLOSE, FITS, RESERVE, NothingFitsError, PlanError, Room, of, size
from ..forecast.peak import Activations, AtStart
from ..integrations.callers import trainer_in_callers
from ..integrations.global_batch import micro_batches_of
from ..offload.files import free_disk_bytes
from .batches import batch_of, inner_model, longest
from .candidates import candidates_of
from .layouts import COMMUNICATORS_BYTES, WORKSPACES_BYTES, Job
from .memory_savers import parts_that_help
from .meta_models import optimizer_like_trainers
from .request import host_machine
from .search import Candidate, Choice, Machine, advice_on_files, choose
from .set_ups import SetUp, set_ups
from .text_losses import TextLoss, text_trainer
from .trace import free_for_training, reserve_on, trace

# ---- `stage: auto`: the planner inside a run, using the memory free on all ranks ----
#
# [Note: one choice on all ranks] Each rank reports its free memory. Rank 0 plans with the minimum and broadcasts its choice,
# or the reason why there is none. So all ranks build the same engine. These two exchanges happen before training; steps are
# not affected.

_LONGEST = 2048
_ROWS = 8
"""Samples of a micro-batch if its data loader is unknown."""

_TRIED_BUCKETS: tuple[int | str, ...] = (AUTO, "8MiB", "64MiB")
_TRIED_PREFETCH = (1, 2, 0)
_PAYS = 0.97
"""A non-default setting must reduce the step time to this fraction."""

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The assumed micro-batch, and the source of the assumption.

    Attributes:
        rows: samples.
        length: tokens per sample.
        source: where both numbers are from, in words.
        micro_batches: micro-batches per step.
        sp_size: number of ranks that compute a sequence together.
        texts: the texts of a Trainer whose loss computes the model's inputs; `length` is unused then.
    """

    rows: int
    length: int
    source: str
    micro_batches: int = 1
    sp_size: int = 1
    texts: "Texts | None" = None

    @property
    def shape(self) -> str:
        return f"{self.rows} x {self.length}" if self.texts is None else f"{self.rows} rows of texts"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Traces the loss of a sentence-transformers Trainer with samples of its data.

    Attributes:
        trained: the module with all trained parameters (`joined`).
        among: as of `_first_batch`.
    """

    accelerator: Accelerator
    trained: nn.Module
    trainer: Any
    among: int = 0

    def batch(self) -> Any:
        """Returns a micro-batch of the data. Raises `PlanError` if the dataset cannot be indexed."""
        return _first_batch(self.accelerator, self.among)

    def activations(self, batch: Any, **how: Any) -> Activations:
        """Traces the loss, or the model alone if the loss needs values. `how`: arguments of `trace`."""
        ways = [
            TextLoss(self.trained, self.trainer, self.accelerator.num_processes, only_encodes=only_encodes)
            for only_encodes in (False, True)
        ]
        with _random_numbers_given_back():
            with suppress(PlanError):
                return trace(ways[0], batch, tokens=0, **how)
            return trace(ways[1], batch, tokens=0, **how)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The choice of `auto`.

    Attributes:
        config: the complete config.
        settings: the chosen settings, nested, without settings set by the user.
        lines: the choice and its reasons, to print.
        rejected: the settings of the fastest set-up that is too large; None if there is none.
    """

    config: ZeroConfig
    settings: Mapping[str, Any]
    lines: tuple[str, ...] = ()
    rejected: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _Free:
    device: int
    host: int
    disk: int | None


@dataclass(kw_only=True)
class _Answer:
    """Rank 0's answer to all ranks."""

    settings: dict[str, Any] = field(default_factory=dict)
    rejected: dict[str, Any] | None = None
    lines: tuple[str, ...] = ()
    fault: str | None = None


def assume(
    model: nn.Module, rows: int | None, length: int | None, micro_batches: int = 1, sp_size: int = 1
) -> MicroBatch:
    """Returns the micro-batch to plan with: known values, or the model's longest sample and a usual number of samples."""
    most = longest(inner_model(model))
    from_model = min(_LONGEST, most or _LONGEST)
    known = "the data loader" if rows is not None else "assumed, because no data loader was prepared"
    how_long = "as set" if length is not None else "the model's longest" if most and most <= _LONGEST else "assumed"
    return MicroBatch(
        rows=rows or _ROWS,
        length=min(length or from_model, most or sys.maxsize),
        source=f"rows: {known}; length: {how_long}",
        micro_batches=micro_batches,
        sp_size=sp_size,
    )


def choose_config(
    config: ZeroConfig,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    device: torch.device,
    mixed_precision: str,
    batch: MicroBatch,
) -> Chosen:
    """Returns the complete config for `stage: auto`, equal on all ranks; rank 0 prints the choice. Collective.

    Args:
        config: the user's config.
        model: the model.
        optimizers: over the model's parameters; if empty, plans with Trainer's AdamW.
        device: the training device.
        mixed_precision: accelerate's setting.
        batch: the micro-batch to plan with.

    Raises:
        PlanError: on every rank; `NothingFitsError` if every set-up is too large.
    """
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    kept, decides = _kept(config), not together or dist.get_rank() == 0
    # Trace first, so memory of libraries loaded by the trace no longer counts as free.
    traced = _activations(model, batch, mixed_precision, config.param_dtype, device) if decides else (None, None)
    mine = _Free(
        device=free_for_training(device) + _held_bytes(model, device),
        host=free_for_training(torch.device("cpu")),
        disk=None
        if config.offload.nvme_path is None
        else free_disk_bytes(config.offload.files_folder) // ranks_on_this_host(),
    )
    everyones: list[Any] = [mine]
    if together:
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
    answers: list[_Answer | None] = [None]
    if decides:
        answers = [_answer(config, kept, model, optimizers, everyones, device, mixed_precision, batch, traced)]
    if together:
        dist.broadcast_object_list(answers, src=0, device=device if device.type == "cuda" else None)
    answer = answers[0]
    if answer is None:
        raise AssertionError("hf_zero: bug: rank 0 sent no choice. Open an issue with this traceback.")
    if answer.fault is not None and answer.rejected is not None:
        raise NothingFitsError(answer.fault, answer.rejected)
    if answer.fault is not None:
        raise PlanError(answer.fault)
    if decides:
        print("".join(f"hf_zero: {line}\n" for line in answer.lines), file=sys.stderr, end="", flush=True)
    return Chosen(
        config=ZeroConfig.from_dict({**kept, **answer.settings}),
        settings=answer.settings,
        lines=answer.lines,
        rejected=answer.rejected,
    )


def _answer(
    config: ZeroConfig,
    kept: dict[str, Any],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    free: Sequence[_Free],
    device: torch.device,
    mixed_precision: str,
    batch: MicroBatch,
    traced: tuple[Activations | None, str | None],
) -> _Answer:
    """Computes rank 0's answer. An error in the answer is raised on all ranks."""
    try:
        activations, unknown = traced
        disks = [each.disk for each in free if each.disk is not None]
        room = Room(
            device=min(each.device for each in free),
            host=min(each.host for each in free),
            disk=min(disks, default=0),
            reserve=reserve_on(device) if activations is not None else RESERVE["activations unknown"],
        )
        job = Job(
            model=joined([model], optimizers),
            optimizers=list(optimizers) or [optimizer_like_trainers(model)],
            device=device,
            world_size=len(free),
            ranks_a_node=ranks_on_this_host(),
            activations=activations,
            accumulates=batch.micro_batches > 1,
            runtime_bytes=_still_to_come_bytes(device, len(free)),
            free_bytes=room.device,
        )
        is_16_bit = mixed_precision != "no" or any(p.itemsize == 2 for p in model.parameters())
        machine = _machine(device, len(free), is_16_bit or config.param_dtype in ("bfloat16", "float16"))
        wanted = set_ups(
            kept,
            world_size=len(free),
            on_host=job.on_host,
            nvme_path=config.offload.nvme_path,
        )
        candidates, faults = candidates_of(job, wanted, machine, batch.micro_batches, mixed_precision)
        if not candidates:
            raise PlanError(f"hf_zero: stage: auto found no set-up: {'; '.join(faults)}")
        choice = choose(candidates, room)
        how = (mixed_precision, config.param_dtype, device)
        halves = None if batch.rows % 2 or batch.texts is not None else replace(batch, rows=batch.rows // 2)
        helps = parts_that_help(
            job,
            wanted,
            machine,
            batch.micro_batches,
            mixed_precision,
            room,
            choice,
            recomputed=lambda: _activations(model, batch, *how, recomputes=True)[0],
            halved=lambda: None if halves is None else _activations(model, halves, *how)[0],
        )
        helps += advice_on_files(candidates, room, machine, sum(p.numel() for p in model.parameters()))
        if choice.candidate is None:
            least = choice.rejected
            return _Answer(
                rejected=None if least is None else dict(least.forecast.settings),
                fault="hf_zero: stage: auto. " + " ".join([*choice.why, *helps]),
            )
        tuned = _tune(job, choice.candidate, kept, room, machine, batch, mixed_precision)
        return _said(choice, tuned, kept, room, batch, unknown, helps)
    except (ConfigError, ValueError) as error:
        return _Answer(fault=str(error))


def _kept(config: ZeroConfig) -> dict[str, Any]:
    """Returns all non-default settings, nested, without the stage."""

    def differing(value: Any, default: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for each in dataclasses.fields(value):
            mine, usual = getattr(value, each.name), getattr(default, each.name)
            if dataclasses.is_dataclass(mine):
                inner = differing(mine, usual)
                if inner:
                    found[each.name] = inner
            elif mine != usual:
                found[each.name] = list(mine) if isinstance(mine, tuple) else mine
        return found

    return {name: value for name, value in differing(config, ZeroConfig()).items() if name != "stage"}


def _held_bytes(model: nn.Module, device: torch.device) -> int:
    """Returns the bytes of the model's own tensors on the device, which every forecast also includes."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type == device.type)


def _activations(
    model: nn.Module,
    batch: MicroBatch,
    mixed_precision: str,
    param_dtype: str,
    device: torch.device,
    *,
    recomputes: bool = False,
) -> tuple[Activations | None, str | None]:
    how: dict[str, Any] = {
        "shape": batch.shape,
        "autocast": _AUTOCAST.get(mixed_precision),
        "param_dtype": param_dtype,
        "recomputes": recomputes,
        "on_host": device.type == "cpu",
        "sp_size": batch.sp_size,
    }
    try:
        if batch.texts is not None:
            return batch.texts.activations(batch.texts.batch(), **how), None
        tokens = batch.rows * -(-batch.length // batch.sp_size)
        return trace(model, lambda: batch_of(model, batch.rows, batch.length), tokens=tokens, **how), None
    except PlanError as error:
        return None, str(error).removeprefix("hf_zero: ")


def _machine(device: torch.device, ranks: int, is_16_bit: bool) -> Machine:
    here = min(ranks, ranks_on_this_host())
    nodes = max(1, ranks // max(1, here))
    if device.type == "cpu":
        return host_machine(nodes=nodes, ranks_a_node=here)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Machine.of(name, nodes=nodes, ranks_a_node=here, is_16_bit=is_16_bit)


def _still_to_come_bytes(device: torch.device, ranks: int) -> int | None:
    """Returns the bytes on a device that libraries allocate after the plan; None on the host.

    Excludes the device's context, which already exists when free memory is read.
    """
    if device.type == "cpu":
        return None
    return WORKSPACES_BYTES + (COMMUNICATORS_BYTES if ranks > 1 else 0)


def _tune(
    job: Job,
    chosen: Candidate,
    kept: Mapping[str, Any],
    room: Room,
    machine: Machine,
    batch: MicroBatch,
    mixed_precision: str,
) -> Candidate:
    """Finds the fastest bucket size and prefetch depth, unless set by the user.

    For a set-up whose memory is close to the limit, the ones with the least memory are chosen instead.
    """
    best, is_close = chosen, room.fit_of(chosen.forecast) == CLOSE
    choices: list[dict[str, Any]] = []
    if "bucket_bytes" not in kept:
        choices += [{"bucket_bytes": size} for size in _TRIED_BUCKETS if size != AUTO]
    if chosen.forecast.settings.get("stage") == 3 and "prefetch_units" not in kept:
        choices += [{"prefetch_units": depth} for depth in _TRIED_PREFETCH if depth != ZeroConfig.prefetch_units]
    for more in choices if job.activations is not None else ():
        settings = {**best.forecast.settings, **more}
        tried, _ = candidates_of(
            job, [SetUp(name=chosen.name, settings=settings)], machine, batch.micro_batches, mixed_precision
        )
        for each in tried:
            quicker = each.step is not None and best.step is not None and each.step.step_s < _PAYS * best.step.step_s
            smaller = each.forecast.device_bytes < best.forecast.device_bytes
            if smaller if is_close else quicker and room.fit_of(each.forecast) == FITS:
                best = each
    return best


def _said(
    choice: Choice,
    tuned: Candidate,
    kept: Mapping[str, Any],
    room: Room,
    batch: MicroBatch,
    unknown: str | None,
    helps: Sequence[str],
) -> _Answer:
    settings = dict(tuned.forecast.settings)
    config = resolve_casts(ZeroConfig.from_dict(settings), "no")
    name = f"{tuned.name} (nothing sharded, as DDP)" if settings["stage"] == 0 else tuned.name
    fits = room.fit_of(tuned.forecast) == FITS
    left_out = "; ".join(
        f"{each.name} is {room.describe(each.forecast)}" for each in (choice.close, choice.rejected) if each is not None
    )
    buckets = "sized for the model" if config.bucket_bytes == AUTO else f"{size(int(config.bucket_bytes))} each"
    ahead = (
        f", {config.prefetch_units} unit{'s' * (config.prefetch_units != 1)} gathered ahead"
        if config.stage == 3
        else ""
    )
    wire = (
        "as they are" if not config.comm.quantizes else f"in {config.comm.gradients}, weights in {config.comm.weights}"
    )
    logits = tuned.forecast.device.get("logits", 0)
    lines = (
        f"stage: auto is {name}, which {choice.claim}",
        f"it {'fits' if fits else 'is close'}: {of(tuned.forecast.device_bytes, room.device)} on the rank with the least "
        f"memory, including the model{f', {size(logits)} for logits' if logits else ''}; a set-up fits if {room.reserve:.0%} "
        "stays free",
        f"for a micro-batch of {batch.shape}"
        + (f" over {batch.sp_size} ranks" if batch.sp_size > 1 else "")
        + f" ({batch.source})"
        + (f"; activations are not counted: {unknown}" if unknown else ""),
        f"rejected: {left_out}" if left_out else "no other set-up was rejected",
        f"buckets are {buckets}{ahead}; gradients are sent {wire}. To keep this choice: {_as_flag(settings)}",
        *helps,
    )
    return _Answer(
        settings={key: value for key, value in settings.items() if key not in kept or value != kept[key]},
        rejected=None if choice.rejected is None else dict(choice.rejected.forecast.settings),
        lines=lines,
    )


def _as_flag(settings: Mapping[str, Any], prefix: str = "") -> str:
    """Returns nested settings as text for --zero."""
    parts = []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            parts.append(_as_flag(value, f"{prefix}{name}."))
        else:
            parts.append(f"{prefix}{name}={str(value).lower() if isinstance(value, bool) else value}")
    return ",".join(parts)


# ---- `stage: auto` when accelerate prepares a model, with the information available at this point ----

_TEXTS = 1000
"""Number of samples among which `auto` looks for the longest ones."""

_UNSET_LENGTH = 10**6
"""Tokenizers without a maximum length report 1e30."""


def config_for(config: ZeroConfig, accelerator: Accelerator, args: Sequence[Any]) -> ZeroConfig:
    """Returns the config for a model among `args`; unchanged without a model or with a known stage. Collective."""
    model = next((arg for arg in args if isinstance(arg, nn.Module)), None)
    if not config.is_open or model is None:
        return config
    parameters = set(model.parameters())
    prepared = [getattr(each, "optimizer", each) for each in accelerator._optimizers]
    optimizers = [
        each
        for each in (*(arg for arg in args if isinstance(arg, torch.optim.Optimizer)), *prepared)
        if any(p in parameters for group in each.param_groups for p in group["params"])
    ]
    return choose_config(
        config,
        model,
        optimizers,
        device=accelerator.device,
        mixed_precision=accelerator.mixed_precision,
        batch=_micro_batch(accelerator, model, args, optimizers),
    ).config


def _micro_batch(
    accelerator: Accelerator, model: nn.Module, args: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]
) -> MicroBatch:
    rows: Any = None
    length: Any = None
    loaders = [*(arg for arg in args if isinstance(arg, DataLoader)), *accelerator._dataloaders]
    if loaders:
        sampler = getattr(loaders[0], "batch_sampler", None)
        rows = getattr(sampler, "batch_size", None) or getattr(loaders[0], "batch_size", None)
        if getattr(sampler, "split_batches", False) or (loaders[0] in args and accelerator.split_batches):
            rows = rows and max(1, rows // accelerator.num_processes)
    trainer = trainer_in_callers()
    if trainer is not None:
        rows = rows or trainer.args.train_batch_size
        tokenizer = getattr(trainer, "processing_class", None)
        length = getattr(trainer.args, "max_length", None) or getattr(tokenizer, "model_max_length", None)
    is_length = isinstance(length, int) and 0 < length < _UNSET_LENGTH
    found = assume(
        model,
        rows if isinstance(rows, int) else None,
        length if is_length else None,
        micro_batches_of(accelerator),
        _sp_size_of(accelerator),
    )
    if not text_trainer(trainer):
        return found
    texts = Texts(accelerator=accelerator, trained=joined([model], optimizers), trainer=trainer, among=_TEXTS)
    source = f"{found.source.partition(';')[0]}; texts: the longest of the first {_TEXTS:,}"
    return dataclasses.replace(found, texts=texts, source=source)


# ---- Activations and peak memory, forecast on rank 0 from the first samples of the data ----
#
# [Note: the first rows] The first samples of a prepared data loader's dataset, as many as a micro-batch has, are collated by
# its `collate_fn`. The sampler is not used, and random states are restored, so the run sees the same batches as without the
# forecast.


def forecast_at_start(
    accelerator: Accelerator,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    config: ZeroConfig,
) -> AtStart:
    """Forecasts a rank's peak.

    Args:
        accelerator: the Accelerator.
        models: the models, before they have an engine.
        optimizers: over the models' parameters.
        config: the engine's config.
    """
    try:
        model = models[0]
        if len(models) > 1:
            raise PlanError(f"hf_zero: {len(models)} models are trained together")
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            raise PlanError("hf_zero: the model is split over ranks")
        together, trainer = joined(models, optimizers), trainer_in_callers()
        batch = _first_batch(accelerator)
        texts = Texts(accelerator=accelerator, trained=together, trainer=trainer) if text_trainer(trainer) else None
        batch = _named(batch, model) if texts is None else batch
        shape = _shape_of(batch)

        def traced(sp_size: int = 1) -> Activations:
            how: dict[str, Any] = {
                "shape": shape,
                "autocast": _AUTOCAST.get(accelerator.mixed_precision),
                "param_dtype": config.param_dtype,
                "on_host": accelerator.device.type == "cpu",
                "sp_size": sp_size,
            }
            if texts is not None:
                return texts.activations(batch, **how)
            with _random_numbers_given_back():
                return trace(model, batch, tokens=0, **how)

        job = Job(
            model=together,
            optimizers=optimizers,
            device=accelerator.device,
            world_size=accelerator.num_processes,
            ranks_a_node=ranks_on_this_host(),
            activations=traced(),
            accumulates=micro_batches_of(accelerator) > 1,
        )
        own, sp_size = job, _sp_size_of(accelerator)
        if sp_size > 1:
            own = dataclasses.replace(job, activations=traced(sp_size))
        return AtStart(batch=shape, ours=own.forecast("", {}, config), ddp=job.forecast_ddp())
    except (ConfigError, ValueError) as error:
        # Includes PlanError. If the engine refuses the config, it raises its own error later.
        return AtStart(batch=str(error).removeprefix("hf_zero: "))


def _sp_size_of(accelerator: Accelerator) -> int:
    return getattr(accelerator.parallelism_config, "sp_size", 1)


def _first_batch(accelerator: Accelerator, among: int = 0) -> Any:
    """Returns the data loader's batch of the first samples; see [Note: the first rows].

    Args:
        among: use the samples with the most characters among this number of first samples; 0 uses the first ones.
    """
    loader = next(iter(accelerator._dataloaders), None)
    if loader is None:
        raise PlanError("hf_zero: no data loader was prepared before or with the model")
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    rows = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_indexed or collate is None or not isinstance(rows, int):
        raise PlanError("hf_zero: the data set's rows cannot be read by index")
    if getattr(loader.batch_sampler, "split_batches", False):
        rows = max(1, rows // accelerator.num_processes)
    try:
        with _random_numbers_given_back():
            first = [dataset[number] for number in range(min(max(rows, among), len(dataset)))]
            batch = collate(sorted(first, key=_characters, reverse=True)[:rows] if among else first)
    except Exception as error:
        # Catch all, because this calls the script's code.
        raise PlanError(
            f"hf_zero: the first rows of the data cannot be collated ({type(error).__name__}: {str(error)[:100]})"
        ) from error
    return batch


def _characters(row: Any) -> int:
    """Counts the characters of a row's texts, also of lists of texts."""
    if isinstance(row, str):
        return len(row)
    values = row.values() if isinstance(row, Mapping) else row if isinstance(row, list | tuple) else ()
    return sum(map(_characters, values))


def _named(batch: Any, model: nn.Module) -> Mapping[str, Any]:
    """Returns a batch as keyword arguments of the model's forward.

    The tensors of a tuple are interpreted as the model's input, an attention mask if there are three, and labels, in this
    order.
    """
    if isinstance(batch, Mapping):
        return batch
    tensors = [batch] if torch.is_tensor(batch) else batch
    kinds = inspect.signature(model.forward).parameters
    names = [name for name, kind in kinds.items() if kind.kind is kind.POSITIONAL_OR_KEYWORD]
    if not (isinstance(tensors, list | tuple) and tensors and all(map(torch.is_tensor, tensors)) and names):
        raise PlanError("hf_zero: batches are neither the keyword arguments of a forward nor tensors")
    main = getattr(model, "main_input_name", None)
    found = {main if main in names else names[0]: tensors[0]}
    if len(tensors) > 1 and "labels" in names:
        found["labels"] = tensors[-1]
    if len(tensors) == 3 and "attention_mask" in names:
        found["attention_mask"] = tensors[1]
    return found


def _shape_of(batch: Mapping[str, Any]) -> str:
    largest = max((value for value in batch.values() if torch.is_tensor(value)), key=torch.Tensor.numel, default=None)
    texts = [value for value in batch.values() if isinstance(value, list)]
    if texts:
        # A cross-encoder's loss tokenizes these texts itself.
        return f"{len(texts[0])} rows of texts"
    return "" if largest is None else " x ".join(map(str, largest.shape))


@contextmanager
def _random_numbers_given_back() -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    pythons, numpys = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(pythons)
        if numpys is not None:
            numpy.random.set_state(numpys)
