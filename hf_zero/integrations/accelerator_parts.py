"""Parts of an Accelerator with an engine: no_sync, scaler, skipped steps, states."""

import re
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ..buckets.precision import wanted_dtype
from ..checkpoint.commit import Disk, abandon, begin, commit, discard
from ..checkpoint.files import CheckpointError, files_below, no_folder, shown
from ..checkpoint.manifest import MANIFEST_NAME, Manifest, new_save
from ..checkpoint.structure import is_foreign
from ..comm.all_or_none import exchange_between_ranks
from ..config import AUTO, ConfigError
from ..engine.assemble import refuse_disagreement
from ..engine.engine import ZeroEngine
from ..extras import extra
from ..hooks.guards import mix_in
from ..hooks.weak import engine_attached_to
from ..optimizer.loss_scale import GradScaler, scale_over_shards
from ..optimizer.sharded_optimizer import engine_stepped_by
from .environment import find_in_callers
from .state_io import ZERO_FOLDER, state_bytes

if TYPE_CHECKING:
    # Mixed into accelerate's optimizers: a type checker takes their attributes for inherited.
    from accelerate.optimizer import AcceleratedOptimizer as _OptimizerBase
else:
    _OptimizerBase = object

# ---- `model.no_sync()` on a prepared model, for loops that were written for DistributedDataParallel ----

_NAME = "no_sync"


class NoSync:
    """Replaces the model's `no_sync`: micro-batches inside only accumulate.

    A copy or pickle of the model gets one that does nothing.
    """

    def __init__(self, engine: ZeroEngine | None = None):
        # Weak: a model of stages 0 to 2 does not keep its engine. Without the engine, no_sync does nothing.
        self._engine = weakref.ref(engine) if engine is not None else lambda: None

    def __call__(self) -> AbstractContextManager[None]:
        """Opens `ZeroEngine.no_sync`. Raises `NotImplementedError` for accelerate's LocalSGD."""
        engine = self._engine()
        if engine is None:
            return nullcontext()
        # The caller's frame: LocalSGD calls no_sync in its own module, and nothing else tells LocalSGD from a script.
        _refuse_local_sgd(sys._getframe(1))
        return engine.no_sync()

    def __deepcopy__(self, memo: dict) -> "NoSync":
        return NoSync()

    def __reduce__(self):
        return NoSync, ()


def add_no_sync(engine: ZeroEngine, *holders: nn.Module) -> None:
    """Gives each of the modules the method, unless its class has a `no_sync` of its own."""
    for holder in holders:
        # A NoSync that is there already may be of a former engine, which is closed.
        if isinstance(vars(holder).get(_NAME), NoSync) or not hasattr(holder, _NAME):
            # Not by setattr: a compiled wrapper hands that on to the module inside.
            vars(holder)[_NAME] = NoSync(engine)


def _refuse_local_sgd(caller: FrameType) -> None:
    if caller.f_globals.get("__name__") != "accelerate.local_sgd":
        return
    asked = getattr(caller.f_locals.get("self"), "local_sgd_steps", "N")
    raise NotImplementedError(
        f"hf_zero: LocalSGD(local_sgd_steps={asked}) steps a whole model on each rank, and here the ranks share one "
        f"optimizer's state. Set `comm.sync_every: {asked}` in hf_zero's config, and leave LocalSGD out or pass it "
        "enabled=False."
    )


# ---- The loss scaler in accelerate's place: made for float16, with ranks that agree on an overflow ----


def seat_scaler(accelerator: Accelerator, models: Iterable[nn.Module]) -> None:
    """Gives the accelerator a scaler if its settings, the config or the models' dtype ask for one.

    Optimizers that are prepared afterwards step through that scaler, and `accelerator.backward` scales the loss.
    """
    asked = accelerator.mixed_precision == "fp16"
    if accelerator.scaler is None and (asked or _trains_float16(accelerator, models)):
        handler = accelerator.scaler_handler
        accelerator.scaler = GradScaler(accelerator.device.type, **(handler.to_kwargs() if handler else {}))
        # On a CPU accelerate leaves fp16 out without a word.
        accelerator.native_amp = accelerator.native_amp or asked
    if accelerator.scaler is not None:
        # A scaler of accelerate's own too: each rank would look for overflows in its own rows, and ranks would skip different
        # steps.
        scale_over_shards(accelerator.scaler)


def unscale(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Unscales the gradients of an engine's optimizers, before they are clipped, if that has not been done. Collective."""
    for sharded in engine.optimizers if accelerator.scaler is not None else ():
        if not accelerator.scaler.has_unscaled(sharded.optimizer):
            accelerator.scaler.unscale_(sharded.optimizer)


def _trains_float16(accelerator: Accelerator, models: Iterable[nn.Module]) -> bool:
    param_dtype = accelerator.zero_config.param_dtype
    if param_dtype != AUTO:
        return param_dtype == "float16"
    # `wanted_dtype`: a parameter that lies in its file still has the dtype of the file.
    return any(p.requires_grad and wanted_dtype(p) == torch.float16 for model in models for p in model.parameters())


# ---- Do all ranks train with the same arguments, data and schedule? ----
#
# What the engine sees (groups of the optimizer, dropout, clipping) it compares by itself; see `SharedSettings`. These arguments
# it does not see, or only as late as they differ in a step.

_SHARED_ARGUMENTS = """
    learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim optim_args optim_target_modules
    lr_scheduler_type lr_scheduler_kwargs warmup_steps num_train_epochs max_steps per_device_train_batch_size
    gradient_accumulation_steps average_tokens_across_devices seed data_seed full_determinism train_sampling_strategy
    length_column_name dataloader_drop_last ignore_data_skip label_smoothing_factor neftune_noise_alpha fp16 bf16
    activation_checkpointing gradient_checkpointing save_strategy save_steps eval_strategy eval_steps eval_delay
    load_best_model_at_end metric_for_best_model greater_is_better
"""
"""Of TrainingArguments. Paths, logging, workers of data loaders and the Hub's settings may differ between ranks."""


def refuse_other_arguments(trainer: Any) -> None:
    """Raises `ValueError` on all ranks of a Trainer whose arguments or number of training samples differ. Collective."""
    args = trainer.args
    names = [name for name in _SHARED_ARGUMENTS.split() if hasattr(args, name)]
    facts = {f"TrainingArguments.{name}": str(getattr(args, name)) for name in names}
    facts["samples of train_dataset"] = _length_of(trainer.train_dataset)
    refuse_disagreement(facts, exchange_between_ranks)


def refuse_other_loops(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Raises `ValueError` on all ranks where what accelerate has prepared for the engine's loop differs. Collective."""
    facts = {"gradient_accumulation_steps": str(accelerator.gradient_accumulation_steps)}
    for number, loader in enumerate(accelerator._dataloaders):
        facts[f"samples of data loader {number}"] = _length_of(getattr(loader, "dataset", None))
        facts[f"batch size of data loader {number}"] = str(
            getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        )
    for number, accelerated in enumerate(accelerator._schedulers):
        facts[f"scheduler {number}"] = _schedule_of(accelerated.scheduler)
    try:
        refuse_disagreement(facts, partial(engine.world.exchange, purpose="accelerator.prepare"))
    except ValueError:
        # The script may prepare the model again.
        engine.close()
        raise


def _length_of(dataset: Any) -> str:
    try:
        return str(len(dataset))
    except (TypeError, NotImplementedError):
        # Data that is streamed has no length, and says so in one of these ways.
        return "unknown"


def _schedule_of(scheduler: Any) -> str:
    """Returns a scheduler's class and numbers, and those of transformers' schedules, which are partial functions."""
    found = {name: value for name, value in vars(scheduler).items() if isinstance(value, int | float | str)}
    for function in getattr(scheduler, "lr_lambdas", ()):
        if isinstance(function, partial):
            found |= {name: value for name, value in function.keywords.items() if isinstance(value, int | float | str)}
    return f"{type(scheduler).__name__} {found}"


# ---- Tells accelerate, and Trainer with it, of steps that `nonfinite: skip` leaves out ----


def tell_of_skipped_steps(engine: ZeroEngine, prepared: Iterable[AcceleratedOptimizer]) -> None:
    """Makes `accelerator.optimizer_step_was_skipped` true behind a skipped step, as behind an overflow in float16.

    Learning rates then stay as they are: prepared schedulers and Trainer ask for it.

    Args:
        prepared: the accelerator's optimizers; those of the engine are told.
    """
    mine = {id(sharded.optimizer) for sharded in engine.optimizers}
    for accelerated in prepared:
        # With a loss scaler accelerate finds out by itself.
        if id(accelerated.optimizer) in mine and accelerated.scaler is None:
            mix_in(accelerated, _SkipsBadSteps)


class _SkipsBadSteps(_OptimizerBase):
    """Mixed into accelerate's wrapper of an optimizer that an engine steps."""

    @property
    def step_was_skipped(self) -> bool:
        engine = engine_stepped_by(self.optimizer)
        return super().step_was_skipped if engine is None else engine.bad_steps.was_skipped


# ---- Refuses training without the engine in an Accelerator that has one, at the first forward or step ----


def refuse_step_without_engine(optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
    """Refuses steps of an optimizer that was prepared without a model, until an engine has it."""
    raise RuntimeError(
        f"hf_zero: {type(optimizer).__name__} steps without the engine: it was prepared, and the model that it trains was not. "
        "Call accelerator.prepare(model, optimizer), also in separate calls, before training."
    )


def refuse_training_alone(model: nn.Module, called: nn.Module, _args: tuple) -> None:
    """Refuses the training forward of a model without an engine that trains: each rank would train it alone.

    Args:
        called: what the script calls, a compiled model for example.
    """
    if not (called.training and torch.is_grad_enabled()):
        return
    # Of the parameters too: a part of a model that is trained may be prepared for evaluation.
    holders: list[nn.Module | nn.Parameter] = [model, *model.parameters()]
    engine, *others = map(engine_attached_to, holders)
    if any(each is not None and not each.evaluates for each in (engine, *others)):
        return
    if find_in_callers(lambda candidate: isinstance(candidate, DistributedDataParallel)) is not None:
        # A plain Trainer or Accelerator has it now.
        return
    # An engine that only evaluates has frozen the parameters for this forward.
    if engine is not None or any(p.requires_grad for p in model.parameters()):
        raise RuntimeError(
            f"hf_zero: {type(model).__name__} was prepared without its optimizer, so its gradients would stay on each rank. "
            "Call accelerator.prepare(model, optimizer) (also in separate calls) before training; for inference use "
            "torch.no_grad() or model.eval()."
        )


# ---- Split models in accelerate: the batches of their ranks, and their saves ----


def mesh_of_batches(device_type: str, size: int, name: str = "tp_size") -> DeviceMesh:
    """Makes the mesh by which accelerate's data loaders give ranks that compute a batch together the same batches.

    Args:
        size: how many ranks do.
        name: of the setting.

    Raises:
        ConfigError: `size` does not divide the ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if size < 1 or ranks % size:
        raise ConfigError(f"hf_zero: {name} is {size}, which does not divide the {ranks} ranks of this run.")
    # "tp" also for sequences: of all dimensions, the loaders give this one's ranks the same whole batches.
    return init_device_mesh(device_type, (ranks // size, size), mesh_dim_names=("dp_shard", "tp"))


def refuse_other_split(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Raises `ConfigError` for a model that is split over another number of ranks than accelerate deals batches by."""
    ranks = engine.world_groups.world_size // engine.groups.world_size
    dealt = getattr(accelerator.parallelism_config, "tp_size", 1)
    if ranks != dealt:
        # The engine has replaced the parameters: without the close, a second try would find a model that is taken.
        engine.close()
        raise ConfigError(
            f"hf_zero: the model is split over {ranks} rank{'s' * (ranks > 1)} and tp_size of the plugin is {dealt}, by which "
            f"accelerate deals batches. Give it the model's: ZeroPlugin(..., tp_size={ranks})."
        )


def cut_sequences(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Has the engine's model cut its batches over `sp_size` ranks, where that is above 1. Collective.

    Raises:
        ConfigError: the model, or a setting, does not go with that; the engine is closed.
    """
    size = getattr(accelerator.parallelism_config, "sp_size", 1)
    if size > 1:
        try:
            extra("sequence", "enable_sequence_parallel")(engine, size)
        except ConfigError:
            engine.close()
            raise


@contextmanager
def split_models_aside(
    accelerator: Any, in_rows: Collection[nn.Module] | None = None
) -> Iterator[dict[nn.Module, int]]:
    """Hides split models from accelerate, which saves and loads whole ones; theirs are rows.

    Returns split models that a checkpoint has whole, with the number of its weights file.

    Args:
        in_rows: models that the checkpoint to load has as rows; accelerate has numbered the files of the others.
    """
    held = accelerator._models
    split = [engine.model for engine in accelerator.zero_engines if engine.state.is_split]
    bare = {model: accelerator.unwrap_model(model, keep_torch_compile=False) for model in held}
    numbered = [model for model in held if bare[model] not in (split if in_rows is None else in_rows)]
    whole = {bare[model]: number for number, model in enumerate(numbered) if bare[model] in split}
    # A model that is left out would give its file to the next one.
    accelerator._models = [_Elsewhere() if bare[m] in whole else m for m in numbered]
    # The last models need no place, and Trainer's checkpoints have no file of accelerate's name where an index is.
    while accelerator._models and isinstance(accelerator._models[-1], _Elsewhere):
        accelerator._models.pop()
    try:
        yield whole
    finally:
        accelerator._models = held


class _Elsewhere(nn.Module):
    """Has the place of a model whose file accelerate is to pass over."""

    def load_state_dict(self, *_args: Any, **_kwargs: Any) -> Any:
        return [], []


# ---- The folder of `accelerator.save_state`: temporary, and renamed when it is whole ----

logger = get_logger(__name__)

_NUMBERED = re.compile(r"^checkpoint_(\d+)$")


@contextmanager
def folder_to_fill(
    accelerator: Accelerator, engine: ZeroEngine, output_dir: str | None
) -> Iterator[tuple[Path, Path, str]]:
    """Returns the folder to write a state to, its final name, and the ID of the save. Collective.

    A folder that holds something else than a former state is filled in place. There the manifest, written last, tells a whole
    state from a part of one.

    Raises:
        ValueError: no folder is given, or a file's name; accelerate's automatic naming comes to a folder that is there.
        CommunicationError: a rank does not come.
    """
    with engine.transport.watch.saving(), _folder_to_fill(accelerator, engine, output_dir) as folders:
        yield folders


@contextmanager
def _folder_to_fill(
    accelerator: Accelerator, engine: ZeroEngine, output_dir: str | None
) -> Iterator[tuple[Path, Path, str]]:
    # Before any folder is begun: a rank that does not come to the save is named here, within the time limit.
    engine.world.barrier("accelerator.save_state", engine.config.comm.limit_s)
    naming = accelerator.project_configuration
    is_automatic = naming.automatic_checkpoint_naming
    if is_automatic:
        final = _states_of(accelerator) / f"checkpoint_{naming.iteration}"
    elif output_dir is not None:
        final = Path(output_dir).expanduser()
        # A link stays one: what it leads to, perhaps on another disk, is replaced.
        final = final.resolve() if final.is_symlink() else final
    else:
        raise ValueError(
            "hf_zero: save_state() was called without a folder, and accelerate's automatic naming is off. Give the folder, or "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True) to the Accelerator."
        )
    exchange = engine.world.exchange
    told = exchange((str(final), accelerator.project_dir, new_save()), "save_state")
    folders, save = list(dict.fromkeys(folder for folder, _, _ in told)), told[0][2]
    if len(folders) > 1:
        # Named by each rank's clock, say: each would write a part of a state that no folder has whole.
        final = Path(folders[0])
        if is_automatic:
            # The next `load_state` and rotation look there as well.
            naming.project_dir = told[0][1]
        # accelerate's logger prints on the main rank.
        logger.warning(
            f"hf_zero: the ranks save their state to different folders: {shown(', '.join(folders[:4]))}. All ranks write to rank "
            "0's: give save_state the same one on every rank."
        )
    # Rank 0's answer for all ranks, here and below: where ranks saw different things, those that raise would leave the others
    # in the next exchange.
    if is_automatic and exchange(final.exists())[0]:
        raise ValueError(
            f"hf_zero: {final} is there already. Set accelerator.project_configuration.iteration to the number to go on with."
        )
    if exchange(final.exists() and not final.is_dir())[0]:
        raise ValueError(f"hf_zero: {final} is a file, and a state is a folder. Give save_state another name.")
    if exchange(_holds_something_else(final))[0]:
        yield final, final, save
        return
    disk = Disk.shared(engine.world_groups.rank, engine.world_groups.world_size)
    temporary = begin(final, needed_bytes=state_bytes(engine, disk), disk=disk, exchange=exchange)
    # accelerate would otherwise append a number of its own to the temporary folder.
    naming.automatic_checkpoint_naming = False
    try:
        yield temporary, final, save
        # Behind accelerate's own files, which the caller writes inside: the rename shows all of them or none.
        commit(temporary, final, disk=disk, exchange=exchange)
    except BaseException:
        abandon(temporary, disk=disk)
        raise
    finally:
        naming.automatic_checkpoint_naming = is_automatic
    if is_automatic and naming.total_limit is not None and disk.leads:
        # Behind the commit: a save that fails keeps all old states.
        # The new one always stays, as under accelerate with a limit of 0.
        for old in numbered_states(accelerator)[: -max(naming.total_limit, 1)]:
            discard(old)


def numbered_states(accelerator: Accelerator) -> list[Path]:
    """Lists the states of accelerate's automatic naming, the newest last."""
    named = _states_of(accelerator).glob("checkpoint_*")
    found = [path for path in named if _NUMBERED.match(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint_")))


def _holds_something_else(folder: Path) -> bool:
    names = set(files_below(folder))
    try:
        vouched = {*Manifest.read(folder / ZERO_FOLDER).files, f"{ZERO_FOLDER}/{MANIFEST_NAME}"}
    except CheckpointError:
        # Not one of our states, or a damaged one. Its files may be somebody's: none goes with a rename of the folder.
        vouched = set()
    return not names <= vouched


def _states_of(accelerator: Accelerator) -> Path:
    return Path(accelerator.project_dir) / "checkpoints"


def refuse_unless_state(folder: Path) -> None:
    """Raises `ValueError` for a folder that no `save_state` with the engine has written."""
    if not (folder / ZERO_FOLDER).is_dir() and is_foreign(folder):
        raise ValueError(
            f"hf_zero: {folder} is a checkpoint of DeepSpeed or FSDP; make one of it with `hf-zero convert {folder} OUT` and "
            "give OUT."
        )
    if not (folder / ZERO_FOLDER).is_dir():
        found = sorted(p.name for p in folder.iterdir())[:8] if folder.is_dir() else no_folder(folder)
        inside = [path for path in sorted(folder.glob("*")) if (path / ZERO_FOLDER).is_dir()]
        raise ValueError(
            f"hf_zero: {folder} is not a state saved with hf_zero: it has no {ZERO_FOLDER}/ folder ({found}). Give a folder "
            "that accelerator.save_state wrote in a run with the plugin"
            + (f"; {inside[-1].name} is inside: load_state({str(inside[-1])!r})." if inside else ".")
        )
