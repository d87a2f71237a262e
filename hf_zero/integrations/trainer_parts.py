"""Parts of Trainer's loop: figures of a step, loading, micro-batches in parts, samples per step."""

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import SaveStrategy
from transformers.utils import is_peft_available

from ..buckets.packed import added_scales
from ..checkpoint.files import CheckpointError, read_fault, shown
from ..checkpoint.manifest import Manifest
from ..checkpoint.reader import load_tensors
from ..config import ConfigError, ZeroConfig
from ..config.zero import changed
from ..device import peak_bytes
from ..engine.engine import ZeroEngine
from ..engine.report_tables import CommReport
from ..engine.state import EngineState
from ..extras import extra
from ..hooks.replaced import replaced
from ..hooks.weak import engine_attached_to
from ..layout.intervals import Interval
from ..optimizer.bucket_state import is_of_torch, unsaved_state
from .elastic import Batch, DataPosition, same_global_batch
from .state_io import ZERO_FOLDER, SavedOptimizers, refuse_other_state

# ---- The frozen model below adapters: not saved with the adapters, but identified by a checksum ----


class FrozenBase:
    """Identifies the frozen base model of an adapter checkpoint."""

    def __init__(self, engine: ZeroEngine):
        self._engine = engine
        self._checksum: str | None = None

    def checksum(self) -> str | None:
        """Returns the XXH3 64-bit hash, in hexadecimal, of the frozen parameters and their names; None without adapters.

        Collective. The parameters are read only once, because they do not change; at stage 3 they are gathered one at a time.
        """
        if self._checksum is None and _has_adapters(self._engine.model):
            digest = xxhash.xxh3_64()
            # Exclude these scales, because they are parameters of the model only at stage 3, and the checksum must be equal
            # for all stages.
            scales = added_scales(self._engine.model)
            for name, parameter in self._engine.model.named_parameters():
                if not parameter.requires_grad and parameter not in scales:
                    with self._engine.gathered(parameter):
                        # View as bytes: numpy has no bfloat16, and the hash is over the bits anyway.
                        values = parameter.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
                        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
                        digest.update(values.numpy())
            self._checksum = digest.hexdigest()
        return self._checksum


def refuse_other_base(engine: ZeroEngine, checkpoint: Path) -> None:
    """Refuses a checkpoint's adapters unless they belong to this model's frozen parameters. Collective.

    Raises:
        CheckpointError: on every rank.
    """
    saved = Manifest.read(checkpoint / ZERO_FOLDER).base if (checkpoint / ZERO_FOLDER).is_dir() else None
    here = FrozenBase(engine).checksum() if saved is not None else None
    if saved != here:
        raise CheckpointError(
            f"hf_zero: the adapters of {checkpoint} were trained on another base model: its frozen parameters have checksum "
            f"{saved} there and {here} here. Load the base that the run began with, or start without resume_from_checkpoint."
        )


def _has_adapters(model: torch.nn.Module) -> bool:
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


# ---- Reads the optimizer file of a plain Trainer run into an engine ----

_TELLING = (
    *("betas", "momentum", "momentum_decay", "alpha", "rho", "lr_decay", "etas"),
    *("clip_threshold", "beta2_decay", "ns_steps"),
)
"""Settings that distinguish kinds of optimizers."""


@contextmanager
def open_plain(file: Path, engine_state: EngineState) -> Iterator[SavedOptimizers]:
    """Opens the whole optimizer state written by Trainer without hf_zero (`optimizer.pt`), for `load_state`.

    The file is memory-mapped, so a rank reads only the bytes of its own shards.

    Raises:
        CheckpointError: the optimizer, its groups or the parameters' sizes are different.
    """
    try:
        saved = load_tensors(file)
    except Exception as error:
        raise CheckpointError(f"hf_zero: {file} {read_fault(error)}. Resume from another checkpoint.") from error
    [(optimizer, group_names)] = engine_state.groups()
    indices = [list(group["params"]) for group in saved["param_groups"]]
    if [len(group) for group in indices] != [len(names) for names in group_names]:
        raise CheckpointError(
            f"hf_zero: {file} has groups of {[len(group) for group in indices]} parameters, and the optimizer has groups of "
            f"{[len(names) for names in group_names]}. Resume with the settings that the checkpoint was made with."
        )
    for group, theirs in zip(optimizer.param_groups, saved["param_groups"]):
        _refuse_other_optimizer(type(optimizer).__name__, group, theirs, file)
    state: dict[str, dict[str, Any]] = {}
    for names, numbers in zip(group_names, indices):
        for name, number in zip(names, numbers):
            state[name] = saved["state"].get(number, {})
    shapes = engine_state.shapes()
    elementwise = {
        name: [k for k, v in values.items() if torch.is_tensor(v) and v.dim() > 0 and tuple(v.shape) == shapes[name]]
        for name, values in state.items()
    }
    for name, values in state.items():
        for kind, value in values.items():
            # Factors of rows or columns (Adafactor) have only some of the parameter's dimensions.
            if torch.is_tensor(value) and not {1, *shapes[name]}.issuperset(value.shape):
                raise CheckpointError(
                    f"hf_zero: {file}: {kind} of {name!r} has shape {tuple(value.shape)}, and the parameter has {shapes[name]}. "
                    "Resume with the model that the checkpoint was made with."
                )

    for group, names, theirs in zip(optimizer.param_groups, group_names, saved["param_groups"]):
        taken = {key: value for key, value in theirs.items() if key != "params"}
        # Checking one matrix per group suffices, because a group has one optimizer and one set of settings.
        for name in [name for name in names if len(shapes[name]) == 2][:1]:
            refuse_other_state(file, optimizer, group, taken, state[name])

    def read(kind: str, name: str, interval: Interval) -> torch.Tensor:
        return state[name][kind].reshape(-1)[interval.start : interval.stop].clone()

    def scalars_of(name: str) -> dict[str, Any]:
        return {kind: _own(value) for kind, value in state[name].items() if kind not in elementwise[name]}

    yield SavedOptimizers(
        settings=[
            (group, {key: value for key, value in saved_group.items() if key != "params"})
            for group, saved_group in zip(optimizer.param_groups, saved["param_groups"])
        ],
        read=read,
        kinds_of=lambda name: elementwise[name],
        scalars_of=scalars_of,
        own_values=[(optimizer, {k: v for k, v in saved.items() if k not in ("state", "param_groups")})],
        origin="plain Trainer",
    )


def _refuse_other_optimizer(kind: str, group: dict[str, Any], saved: dict[str, Any], file: Path) -> None:
    """Compares the settings, because the file does not name the class: Adam has betas, SGD has momentum."""
    for setting in _TELLING:
        if (setting in saved) != (setting in group):
            has, here = ("has", "has not") if setting in saved else ("does not have", "has")
            raise CheckpointError(
                f"hf_zero: {file} is of an optimizer that {has} the setting {setting!r}, which this run's {kind} {here}. Resume "
                "with the same optimizer, or start afresh from the saved model."
            )


def _own(value: Any) -> Any:
    # Cloned, because a view of the mapped file would keep the whole file open.
    return value.clone() if torch.is_tensor(value) else value


# ---- The engine's settings in the run configuration stored by trackers ----


class _Settings(NamedTuple):
    """Replaces `parallelism_config`, on which training arguments call `to_json` when trackers read the arguments."""

    config: ZeroConfig

    def to_json(self) -> dict[str, Any]:
        return changed(self.config)


@contextmanager
def told_to_trackers(trainer: Any) -> Iterator[None]:
    """Shows the engine's settings in the training arguments while callbacks set up their trackers.

    With `--zero` the arguments already contain them. Removed afterwards, because Trainer saves its arguments, and programs
    without hf_zero must be able to load them.
    """
    args, handler = trainer.args, trainer.callback_handler
    if args.parallelism_config is not None:
        yield
        return
    stock = handler.on_train_begin

    def begin(*passed: Any, **named: Any) -> Any:
        args.parallelism_config = _Settings(trainer.accelerator.zero_config)
        try:
            return stock(*passed, **named)
        finally:
            args.parallelism_config = None

    with replaced(handler, "on_train_begin", begin):
        yield


# ---- Bytes, waits and seconds per step as `zero/...` in Trainer's log: means since the last entry ----

_MIB = 2**20


def _refuse_unsaved_state(args: TrainingArguments, engine: ZeroEngine) -> None:
    """Raises ConfigError if Trainer is set to save optimizer state that no checkpoint can store."""
    if args.save_strategy == SaveStrategy.NO or args.save_only_model:
        return
    for optimizer, _ in engine.state.groups():
        unsaved = None if is_of_torch(optimizer) else unsaved_state(optimizer)
        if unsaved is not None:
            raise ConfigError(
                f"hf_zero: {unsaved}, so no checkpoint can hold it. Set `save_strategy='no'` or `save_only_model=True`, or use "
                "another optimizer."
            )


class StepFigures(TrainerCallback):
    """Measures a Trainer's figures on the logging rank. A callback, to exclude work before the first step."""

    def __init__(self) -> None:
        self._before: CommReport | None = None
        self._step = 0
        self._rows_of_a_step = 0
        self._clock = _StepClock()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        engine = None if model is None else engine_attached_to(model)
        if engine is not None:
            _refuse_unsaved_state(args, engine)
        self._before = None if engine is None else engine.comm_report()
        self._step = state.global_step
        self._rows_of_a_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._clock = _StepClock()

    def on_step_begin(self, args, state, control, **kwargs):
        self._clock.go_on()

    def on_step_end(self, args, state, control, **kwargs):
        self._clock.step_ended()

    def on_evaluate(self, args, state, control, **kwargs):
        self._clock.stand_still()

    def on_save(self, args, state, control, **kwargs):
        self._clock.stand_still()

    def since_the_last(self, engine: ZeroEngine, step: int, *, all_of_them: bool) -> dict[str, float]:
        """Returns the mean figures of a step since the last call, or since the start of training.

        Figures without meaning in this run are omitted, for example bytes sent with one rank or between nodes with one node.

        Args:
            engine: the engine.
            step: the current step.
            all_of_them: False returns only peak memory and samples per second, to keep Trainer's printed lines short.
        """
        now, before, steps = engine.comm_report(), self._before, step - self._step
        self._before, self._step = now, step
        figures = {"zero/peak_mib": round(peak_bytes(engine.device) / _MIB, 1)}
        if now.gradient_error is not None:
            figures["zero/gradient_error"] = round(now.gradient_error, 6)
        seconds = self._clock.taken()
        if steps > 0 and seconds > 0:
            figures["zero/samples_per_s"] = float(f"{steps * self._rows_of_a_step / seconds:.5g}")
        if not all_of_them:
            return figures
        if steps > 0 and seconds > 0:
            figures["zero/steps_per_s"] = float(f"{steps / seconds:.5g}")
        if before is not None and steps > 0 and now.bytes_sent:
            figures["zero/sent_mib"] = round((now.bytes_sent - before.bytes_sent) / steps / _MIB, 3)
            figures["zero/wait_s"] = round((now.wait_seconds - before.wait_seconds) / steps, 4)
            if now.bytes_between:
                figures["zero/between_nodes_mib"] = round((now.bytes_between - before.bytes_between) / steps / _MIB, 3)
        return figures


class _StepClock:
    """Measures seconds of training, excluding the time between two steps if there was an evaluation or a save."""

    def __init__(self) -> None:
        self._since_s = self._ended_s = time.perf_counter()
        self._aside_s = 0.0
        self._stands_still = False

    def go_on(self) -> None:
        if self._stands_still:
            self._aside_s += time.perf_counter() - self._ended_s
            self._stands_still = False

    def step_ended(self) -> None:
        self._ended_s = time.perf_counter()

    def stand_still(self) -> None:
        self._stands_still = True

    def taken(self) -> float:
        """Returns the seconds since the last call."""
        now_s = time.perf_counter()
        seconds = now_s - self._since_s - self._aside_s
        self._since_s = self._ended_s = now_s
        self._aside_s = 0.0
        return seconds


# ---- Clear errors for checkpoint files loaded by Trainer and torch ----


@contextmanager
def named_when_damaged(path: str | Path | None, what: str) -> Iterator[None]:
    """Replaces any error while loading a file by a `CheckpointError` with the file's name.

    Args:
        path: the file; None if the loader has nothing to load.
        what: the loaded content, in words ("the random states").
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # Catch all, because each loader raises its own errors for a pickle with unexpected content.
        raise CheckpointError(
            f"hf_zero: {what} of {path} cannot be loaded ({type(error).__name__}: {_reason(error)}). Nothing was trained: "
            "restore the file, or resume from another checkpoint."
        ) from error


@contextmanager
def named_when_of_another_model(checkpoint: Path, model_name: str) -> Iterator[None]:
    """Replaces any error while loading weights into a model by a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"hf_zero: the weights of {checkpoint} do not fit this run's {model_name} ({_reason(error)}). Nothing was trained: "
            "build the model with the config.json of the checkpoint, or resume from a checkpoint of this model."
        ) from error


def _reason(error: Exception) -> str:
    # torch names the model in the first line, and one tensor in each following line.
    return shown("; ".join(line.strip() for line in str(error).splitlines()[:3]), 400)


# ---- Trainer's micro-batches in parts, after an out-of-memory error ----


def pass_of(
    trainer: Trainer, stock: Any, model: nn.Module, num_items_in_batch: Any
) -> Callable[[Any, float], torch.Tensor]:
    """Returns a function that runs a training step on some samples of a micro-batch.

    Args:
        trainer: the Trainer.
        stock: the Trainer's own `training_step`.
        model: the prepared model.
        num_items_in_batch: divides the loss of the whole step. If the loss is a sum over items, parts of it are sums too.
    """
    is_sum = _is_sum(trainer, model, num_items_in_batch)

    def run(inputs: Any, weight: float) -> torch.Tensor:
        # Parts of a sum are added unweighted. A part of weight 0 runs only because other ranks wait for its collectives, and
        # must add nothing.
        with _weighted_loss(trainer, float(weight > 0) if is_sum else weight):
            return stock(model, inputs, num_items_in_batch)

    return run


def ignores_num_items(head: nn.Module) -> bool:
    """Whether a model's loss remains a mean for any `num_items_in_batch`, judged by the source of its forward."""
    try:
        source = inspect.getsource(type(head).forward)
    except (OSError, TypeError):
        # Without source code (a compiled or generated class), assume not.
        return False
    return "loss_function" not in source and "num_items_in_batch" not in source and "CrossEntropyLoss" in source


def _is_sum(trainer: Any, model: nn.Module, num_items_in_batch: Any) -> bool:
    """Whether the loss is divided by the items of the whole step: Trainer's rule, with exceptions for some heads."""
    said = getattr(trainer, "loss_is_scaled_for_ga", None)
    if said is not None:
        return bool(said)
    if trainer.compute_loss_func is not None:
        return True
    accepts = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return bool(accepts and not ignores_num_items(trainer.accelerator.unwrap_model(model, keep_torch_compile=False)))


@contextmanager
def _weighted_loss(trainer: Any, weight: float) -> Iterator[None]:
    if weight == 1.0:
        yield
        return
    compute_loss = trainer.compute_loss

    def weighted(*args: Any, **kwargs: Any) -> Any:
        found = compute_loss(*args, **kwargs)
        return (found[0] * weight, *found[1:]) if isinstance(found, tuple) else found * weight

    with replaced(trainer, "compute_loss", weighted):
        yield


@contextmanager
def whole_logits(engine: ZeroEngine | None, sp_size: int, *, wanted: bool) -> Iterator[None]:
    """Gathers the logits of sequences split over ranks only if wanted, because whole logits may not fit on one rank."""
    parallel = None if engine is None or sp_size == 1 else extra("sequence", "sequence_parallel_of")(engine.model)
    if parallel is None:
        yield
        return
    parallel.wants_logits, before = wanted, parallel.wants_logits
    try:
        yield
    finally:
        parallel.wants_logits = before


# ---- Evaluators of sentence-transformers at stage 3 ----
#
# sentence-transformers' Trainer runs an evaluator on rank 0, which sends each rank a part of the texts. Parts may have
# different numbers of batches or no text. At stage 3, ranks would wait for a forward that another rank does not run.


@contextmanager
def evaluators_on_all_ranks() -> Iterator[None]:
    """Runs evaluators with all texts on every rank if the model is sharded, as sentence-transformers does under FSDP."""
    module: Any = sys.modules.get("sentence_transformers.base.trainer")
    shared = getattr(module, "distributed_evaluation", None)
    if shared is None:
        yield
        return

    def evaluation(model: nn.Module, enabled: bool = True) -> Any:
        engine = engine_attached_to(model)
        return shared(model, enabled=enabled and (engine is None or engine.config.stage < 3))

    with replaced(module, "distributed_evaluation", evaluation):
        yield


# ---- A resumed Trainer keeps the number of samples per step and the data position, on any number of ranks ----


class RowsOfAStep:
    """Computes the number of samples per step of one Trainer, and the data position.

    Attributes:
        steps_in_epoch: micro-batches of one rank in a pass over the data; set when training begins.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._former: DataPosition | None = None
        self.steps_in_epoch = 0

    def go_on_from(self, checkpoint: str) -> None:
        """Sets accumulation, and the micro-batch size if necessary, for as many samples per step as the checkpoint's run.

        Raises:
            CheckpointError: the checkpoint's data position file is damaged.
            ValueError: a step has fewer samples than there are ranks.
        """
        self._former = DataPosition.read(Path(checkpoint))
        if self._former is None:
            self._say(f"{checkpoint} does not say how many rows a step took, so the training arguments do.")
            return
        args, now, wanted = self._trainer.args, self._batch, self._former.global_rows
        if now.global_rows == wanted:
            return
        batch = same_global_batch(wanted, rows=now.rows, world_size=now.world_size)
        args.gradient_accumulation_steps = batch.accumulation
        # Divided, because `train_batch_size` multiplies by the GPUs of this process again.
        args.per_device_train_batch_size = batch.rows // max(1, args.n_gpu)
        self._trainer._train_batch_size = args.train_batch_size
        if batch.global_rows == wanted:
            self._say(
                f"a step takes {wanted} rows as before the restart: {batch}. By the training arguments it were {now}."
            )
        else:
            self._say(
                f"a step took {wanted} rows, which {batch.world_size} ranks cannot share evenly: from here it takes {batch}. "
                "Learning rate and schedule go on by steps, as they are."
            )

    def skipped_batches(self, epochs: int, batches: int) -> tuple[int, int]:
        """Returns the passes over the data, and a rank's micro-batches of the next pass, trained before the checkpoint.

        Args:
            epochs, batches: Trainer's own values, computed with the present step size.
        """
        former, now = self._former, self._batch
        if former is None or former.global_rows == now.global_rows or self._trainer.args.ignore_data_skip:
            return epochs, batches
        steps, again = divmod(former.rows, now.global_rows)
        if again:
            self._say(f"steps have another size now: {again} rows before the checkpoint are trained on once more.")
        return former.epoch, steps * now.accumulation

    def position(self) -> DataPosition:
        """Returns the data position after a step."""
        done = self._trainer.state.epoch or 0.0
        # Rounded, because Trainer's epoch is a floating-point quotient and may be slightly below a whole batch.
        batches = round(done * self.steps_in_epoch)
        epoch, batches = divmod(batches, max(1, self.steps_in_epoch))
        # Keep the original number of samples: a restart on ranks that cannot share them evenly must not pass on its own
        # number.
        wanted = self._batch.global_rows if self._former is None else self._former.global_rows
        return DataPosition(global_rows=wanted, epoch=epoch, rows=batches * self._batch.rows_of_a_round)

    @property
    def _batch(self) -> Batch:
        args, trainer = self._trainer.args, self._trainer
        in_all = trainer.get_total_train_batch_size(args)
        # From the Trainer, because the arguments do not follow `auto_find_batch_size`.
        rows, accumulation = trainer._train_batch_size, args.gradient_accumulation_steps
        # With split batches, each batch is dealt to all ranks, so the number of ranks does not matter.
        ranks = 1 if args.accelerator_config.split_batches else in_all // (rows * accumulation)
        return Batch(rows=rows, accumulation=accumulation, world_size=ranks)

    def _say(self, what: str) -> None:
        if self._trainer.is_world_process_zero():
            print(f"hf_zero: {what}", file=sys.stderr, flush=True)
