"""Parts of an Accelerator with an engine: no_sync, the loss scaler, skipped steps, and the folder of a saved state."""

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
from ..engine.loss_scale import GradScaler, scale_over_shards
from ..extras import extra
from ..hooks.guards import mix_in
from ..hooks.weak import engine_attached_to
from ..step.sharded_optimizer import engine_stepped_by
from .environment import find_in_callers
from .state_io import ZERO_FOLDER, state_bytes

if TYPE_CHECKING:
    # Mixed into accelerate's optimizers at run time; the type checker treats their attributes as inherited.
    from accelerate.optimizer import AcceleratedOptimizer as _OptimizerBase
else:
    _OptimizerBase = object

# ---- `model.no_sync()` on a prepared model, for loops written for DistributedDataParallel ----

_NAME = "no_sync"


class NoSync:
    """Replaces the model's `no_sync`: micro-batches inside only accumulate.

    Copies and pickles of the model get a `no_sync` without effect.
    """

    def __init__(self, engine: ZeroEngine | None = None):
        # A weak reference, because a model of stages 0 to 2 does not keep its engine. Without an engine, no_sync has no
        # effect.
        self._engine = weakref.ref(engine) if engine is not None else lambda: None

    def __call__(self) -> AbstractContextManager[None]:
        """Opens `ZeroEngine.no_sync`. Raises `NotImplementedError` for accelerate's LocalSGD."""
        engine = self._engine()
        if engine is None:
            return nullcontext()
        # LocalSGD is recognized by the caller's frame, because it calls no_sync in its own module like any script.
        _refuse_local_sgd(sys._getframe(1))
        return engine.no_sync()

    def __deepcopy__(self, memo: dict) -> "NoSync":
        return NoSync()

    def __reduce__(self):
        return NoSync, ()


def add_no_sync(engine: ZeroEngine, *holders: nn.Module) -> None:
    """Adds `no_sync` to each of the modules, unless its class already defines `no_sync`."""
    for holder in holders:
        # An existing NoSync may belong to a former, closed engine.
        if isinstance(vars(holder).get(_NAME), NoSync) or not hasattr(holder, _NAME):
            # Assigned in `vars` because a compiled wrapper's setattr sets the attribute on the inner module.
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


# ---- The loss scaler: replaces accelerate's for float16 training; the ranks agree on an overflow ----


def seat_scaler(accelerator: Accelerator, models: Iterable[nn.Module]) -> None:
    """Adds a loss scaler to the accelerator if its settings, the config or the models' dtype need one.

    Optimizers prepared later step with this scaler, and `accelerator.backward` scales the loss.
    """
    asked = accelerator.mixed_precision == "fp16"
    if accelerator.scaler is None and (asked or _trains_float16(accelerator, models)):
        handler = accelerator.scaler_handler
        accelerator.scaler = GradScaler(accelerator.device.type, **(handler.to_kwargs() if handler else {}))
        # On a CPU accelerate silently ignores fp16.
        accelerator.native_amp = accelerator.native_amp or asked
    if accelerator.scaler is not None:
        # Also for a scaler made by accelerate: otherwise each rank looks for overflows in its own shards only, and the ranks
        # skip different steps.
        scale_over_shards(accelerator.scaler)


def unscale(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Unscales the gradients of an engine's optimizers before a clip, unless already done. Collective."""
    for sharded in engine.optimizers if accelerator.scaler is not None else ():
        if not accelerator.scaler.has_unscaled(sharded.optimizer):
            accelerator.scaler.unscale_(sharded.optimizer)


def _trains_float16(accelerator: Accelerator, models: Iterable[nn.Module]) -> bool:
    param_dtype = accelerator.zero_config.param_dtype
    if param_dtype != AUTO:
        return param_dtype == "float16"
    # Asks `wanted_dtype`, because a parameter still in its checkpoint file has the file's dtype.
    return any(p.requires_grad and wanted_dtype(p) == torch.float16 for model in models for p in model.parameters())


# ---- Do all ranks train with the same arguments, data and schedule? ----
#
# The engine itself compares the settings visible to it (parameter groups, dropout, clipping); see `SharedSettings`. The
# arguments below are not visible to the engine, or only once they make a step differ.

_SHARED_ARGUMENTS = """
    learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim optim_args optim_target_modules
    lr_scheduler_type lr_scheduler_kwargs warmup_steps num_train_epochs max_steps per_device_train_batch_size
    gradient_accumulation_steps average_tokens_across_devices seed data_seed full_determinism train_sampling_strategy
    length_column_name dataloader_drop_last ignore_data_skip label_smoothing_factor neftune_noise_alpha fp16 bf16
    activation_checkpointing gradient_checkpointing save_strategy save_steps eval_strategy eval_steps eval_delay
    load_best_model_at_end metric_for_best_model greater_is_better
"""
"""TrainingArguments that must be equal on all ranks. Paths, logging, data loader workers and Hub settings may differ."""


def refuse_other_arguments(trainer: Any) -> None:
    """Raises `ValueError` on all ranks of a Trainer whose arguments or number of training samples differ. Collective."""
    args = trainer.args
    names = [name for name in _SHARED_ARGUMENTS.split() if hasattr(args, name)]
    facts = {f"TrainingArguments.{name}": str(getattr(args, name)) for name in names}
    facts["samples of train_dataset"] = _length_of(trainer.train_dataset)
    refuse_disagreement(facts, exchange_between_ranks)


def refuse_other_loops(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Raises `ValueError` on all ranks if their data loaders, schedulers or accumulation steps differ. Collective."""
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
        # Closed, so the script can prepare the model again.
        engine.close()
        raise


def _length_of(dataset: Any) -> str:
    try:
        return str(len(dataset))
    except (TypeError, NotImplementedError):
        # The length of streamed data is unknown; datasets raise one of these errors.
        return "unknown"


def _schedule_of(scheduler: Any) -> str:
    """Returns a scheduler's class and numeric attributes, including the arguments of transformers' partial functions."""
    found = {name: value for name, value in vars(scheduler).items() if isinstance(value, int | float | str)}
    for function in getattr(scheduler, "lr_lambdas", ()):
        if isinstance(function, partial):
            found |= {name: value for name, value in function.keywords.items() if isinstance(value, int | float | str)}
    return f"{type(scheduler).__name__} {found}"


# ---- Reports steps skipped by `nonfinite: skip` to accelerate and Trainer ----


def tell_of_skipped_steps(engine: ZeroEngine, prepared: Iterable[AcceleratedOptimizer]) -> None:
    """Makes `accelerator.optimizer_step_was_skipped` true after a skipped step, as after a float16 overflow.

    Prepared schedulers and Trainer read this attribute and keep the learning rate unchanged.

    Args:
        engine: the engine.
        prepared: the accelerator's optimizers; only the engine's own ones are changed.
    """
    mine = {id(sharded.optimizer) for sharded in engine.optimizers}
    for accelerated in prepared:
        # With a loss scaler, accelerate already detects skipped steps.
        if id(accelerated.optimizer) in mine and accelerated.scaler is None:
            mix_in(accelerated, _SkipsBadSteps)


class _SkipsBadSteps(_OptimizerBase):
    """Mixed into accelerate's wrapper of an optimizer stepped by an engine."""

    @property
    def step_was_skipped(self) -> bool:
        engine = engine_stepped_by(self.optimizer)
        return super().step_was_skipped if engine is None else engine.bad_steps.was_skipped


# ---- Refuses training without an engine, at the first forward or step ----


def refuse_step_without_engine(optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
    """Refuses steps of an optimizer prepared without a model, until an engine is built for the optimizer."""
    raise RuntimeError(
        f"hf_zero: {type(optimizer).__name__} steps without the engine: it was prepared, and the model that it trains was not. "
        "Call accelerator.prepare(model, optimizer), also in separate calls, before training."
    )


def refuse_training_alone(model: nn.Module, called: nn.Module, _args: tuple) -> None:
    """Refuses the training forward of a model without a training engine: each rank would train its own copy.

    Args:
        model: the prepared model.
        called: the module called by the script, for example a compiled wrapper.
    """
    if not (called.training and torch.is_grad_enabled()):
        return
    # Also ask the parameters' engines: a submodule of a trained model may be prepared for evaluation.
    holders: list[nn.Module | nn.Parameter] = [model, *model.parameters()]
    engine, *others = map(engine_attached_to, holders)
    if any(each is not None and not each.evaluates for each in (engine, *others)):
        return
    if find_in_callers(lambda candidate: isinstance(candidate, DistributedDataParallel)) is not None:
        # A plain Trainer or Accelerator now trains the model.
        return
    # An evaluating engine has frozen the parameters for this forward.
    if engine is not None or any(p.requires_grad for p in model.parameters()):
        raise RuntimeError(
            f"hf_zero: {type(model).__name__} was prepared without its optimizer, so its gradients would stay on each rank. "
            "Call accelerator.prepare(model, optimizer) (also in separate calls) before training; for inference use "
            "torch.no_grad() or model.eval()."
        )


# ---- Split models (tensor or sequence parallelism) in accelerate: their batches and their saves ----


def mesh_of_batches(device_type: str, size: int, name: str = "tp_size") -> DeviceMesh:
    """Makes a device mesh for accelerate's data loaders: ranks that compute a batch together get the same batches.

    Args:
        device_type: of the mesh.
        size: number of ranks that compute a batch together.
        name: the setting's name, for the error.

    Raises:
        ConfigError: `size` does not divide the number of ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if size < 1 or ranks % size:
        raise ConfigError(f"hf_zero: {name} is {size}, which does not divide the {ranks} ranks of this run.")
    # Also named "tp" for sequence parallelism: the loaders give the ranks of this dimension the same whole batches.
    return init_device_mesh(device_type, (ranks // size, size), mesh_dim_names=("dp_shard", "tp"))


def refuse_other_split(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Raises `ConfigError` if accelerate deals batches for a number of ranks different from the model's split."""
    ranks = engine.world_groups.world_size // engine.groups.world_size
    dealt = getattr(accelerator.parallelism_config, "tp_size", 1)
    if ranks != dealt:
        # The engine has replaced the parameters. Unless closed, a second try would find the model in use.
        engine.close()
        raise ConfigError(
            f"hf_zero: the model is split over {ranks} rank{'s' * (ranks > 1)} and tp_size of the plugin is {dealt}, by which "
            f"accelerate deals batches. Give it the model's: ZeroPlugin(..., tp_size={ranks})."
        )


def cut_sequences(accelerator: Accelerator, engine: ZeroEngine) -> None:
    """Makes the engine's model split its sequences over `sp_size` ranks if `sp_size` is above 1. Collective.

    Raises:
        ConfigError: the model or a setting does not support sequence parallelism; the engine is closed.
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
    """Hides split models from accelerate, which saves and loads whole models; the engine saves split ones as shards.

    Yields the split models stored whole in the checkpoint, with the number of each one's weights file.

    Args:
        accelerator: the Accelerator.
        in_rows: models stored as shards in the checkpoint to load. accelerate has numbered the files of the remaining models.
    """
    held = accelerator._models
    split = [engine.model for engine in accelerator.zero_engines if engine.state.is_split]
    bare = {model: accelerator.unwrap_model(model, keep_torch_compile=False) for model in held}
    numbered = [model for model in held if bare[model] not in (split if in_rows is None else in_rows)]
    whole = {bare[model]: number for number, model in enumerate(numbered) if bare[model] in split}
    # Keep an empty stand-in: if a model were left out, the next model would get its file number.
    accelerator._models = [_Elsewhere() if bare[m] in whole else m for m in numbered]
    # Trailing stand-ins are not needed, and a Trainer checkpoint with an index has no file of accelerate's name.
    while accelerator._models and isinstance(accelerator._models[-1], _Elsewhere):
        accelerator._models.pop()
    try:
        yield whole
    finally:
        accelerator._models = held


class _Elsewhere(nn.Module):
    """Stands in for a model whose weights file accelerate skips."""

    def load_state_dict(self, *_args: Any, **_kwargs: Any) -> Any:
        return [], []


# ---- The folder of `accelerator.save_state`: temporary until complete, then renamed ----

logger = get_logger(__name__)

_NUMBERED = re.compile(r"^checkpoint_(\d+)$")


@contextmanager
def folder_to_fill(
    accelerator: Accelerator, engine: ZeroEngine, output_dir: str | None
) -> Iterator[tuple[Path, Path, str]]:
    """Yields the folder to write a state to, its final name, and the ID of the save. Collective.

    A folder with files other than a former state is filled in place. There, the manifest is written last and marks the state
    as complete.

    Raises:
        ValueError: no folder is given, the name is a file's, or the folder of accelerate's automatic naming already exists.
        CommunicationError: a rank does not join the save.
    """
    with engine.transport.watch.saving(), _folder_to_fill(accelerator, engine, output_dir) as folders:
        yield folders


@contextmanager
def _folder_to_fill(
    accelerator: Accelerator, engine: ZeroEngine, output_dir: str | None
) -> Iterator[tuple[Path, Path, str]]:
    # Before any folder is created: if a rank does not join the save, the barrier names the rank within the time limit.
    engine.world.barrier("accelerator.save_state", engine.config.comm.limit_s)
    naming = accelerator.project_configuration
    is_automatic = naming.automatic_checkpoint_naming
    if is_automatic:
        final = _states_of(accelerator) / f"checkpoint_{naming.iteration}"
    elif output_dir is not None:
        final = Path(output_dir).expanduser()
        # A link is kept and its target, perhaps on another disk, is replaced.
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
        # For example if folders are named by each rank's clock. Each rank would write a part, and no folder would be complete.
        final = Path(folders[0])
        if is_automatic:
            # The next `load_state` and the rotation look for states here as well.
            naming.project_dir = told[0][1]
        # accelerate's logger prints on the main process only.
        logger.warning(
            f"hf_zero: the ranks save their state to different folders: {shown(', '.join(folders[:4]))}. All ranks write to rank "
            "0's: give save_state the same one on every rank."
        )
    # Here and below, all ranks use rank 0's answer: if the answers differed, the ranks without an error would wait for the
    # others in the next exchange.
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
    # Otherwise accelerate would append its own number to the temporary folder.
    naming.automatic_checkpoint_naming = False
    try:
        yield temporary, final, save
        # After the caller has written accelerate's own files: the rename publishes all files at once.
        commit(temporary, final, disk=disk, exchange=exchange)
    except BaseException:
        abandon(temporary, disk=disk)
        raise
    finally:
        naming.automatic_checkpoint_naming = is_automatic
    if is_automatic and naming.total_limit is not None and disk.leads:
        # After the commit, so a failed save removes no old state. The new state always stays, as in accelerate with a limit of
        # 0.
        for old in numbered_states(accelerator)[: -max(naming.total_limit, 1)]:
            discard(old)


def numbered_states(accelerator: Accelerator) -> list[Path]:
    """Lists the states named by accelerate's automatic naming, oldest first."""
    named = _states_of(accelerator).glob("checkpoint_*")
    found = [path for path in named if _NUMBERED.match(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint_")))


def _holds_something_else(folder: Path) -> bool:
    names = set(files_below(folder))
    try:
        vouched = {*Manifest.read(folder / ZERO_FOLDER).files, f"{ZERO_FOLDER}/{MANIFEST_NAME}"}
    except CheckpointError:
        # Not one of our states, or a damaged one. Its files may be the user's, so a rename must not remove them.
        vouched = set()
    return not names <= vouched


def _states_of(accelerator: Accelerator) -> Path:
    return Path(accelerator.project_dir) / "checkpoints"


def refuse_unless_state(folder: Path) -> None:
    """Raises `ValueError` for a folder not written by `save_state` with an engine."""
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
