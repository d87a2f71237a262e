"""Trainer's checkpoints, each complete or absent, and shared weights files into which each rank writes its own part."""

import functools
import importlib
import os
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, logging
from transformers.integrations import WandbCallback
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, is_peft_available

from ..buckets.sharded_parameter import ShardedParametersError
from ..checkpoint.background import Background
from ..checkpoint.commit import abandon, begin, commit, discard
from ..checkpoint.disks import Disk, disk_asked, find_disk
from ..checkpoint.faults import CheckpointError
from ..checkpoint.live_pieces import LivePieces, Piece, dtype_name, edited_while_written, is_small, lay_out
from ..checkpoint.manifest import WEIGHTS, Manifest, SavedWeight, new_save
from ..checkpoint.on_all_ranks import done_on_all_ranks, on_all_ranks
from ..checkpoint.rows import write_live
from ..checkpoint.verify import newest_first, step_of
from ..comm.all_or_none import Exchange, Merge
from ..device import free_bytes
from ..engine.engine import ZeroEngine
from ..hooks.replaced import replaced
from ..hooks.weak import WeakHook
from ..layout.intervals import Interval
from ..presence.arrivals import CommunicationError
from ..presence.store_exchange import StoreExchange
from .data_position import DataPosition
from .frozen_base import FrozenBase
from .model_parallel import as_if_whole
from .progress_bars import progress_bar
from .resume import separate_disks, share_output_dir
from .run_facts import write_run
from .save_clock import SaveClock
from .state_io import ZERO_FOLDER, plan_state, seal_state, state_bytes, write_state
from .step_figures import StepFigures
from .trainer_stop import TrainerStop
from .weight_rows import WeightsPlan, saved_tensors_of, values_to_save, weight_rows

# ---- Model files written by all ranks at once, laid out by transformers ----
#
# transformers decides about names, tied weights, files and index: `save_pretrained` runs with empty tensors of the right
# shapes, and its function to write a file is replaced by one that allocates the file or only notes its contents. Each rank
# then writes the bytes of its own shard. Nothing is gathered, and no rank needs additional memory for parameters.

AFTER_A_FAILED_SAVE = "The earlier checkpoints and the training state are unchanged."


@dataclass(frozen=True, kw_only=True)
class _SavedFile:
    """A weights file requested by `save_pretrained`. `names` maps each saved name to the tensor's first name in the model."""

    path: Path
    names: dict[str, str]
    metadata: dict[str, str] | None


class Layout(ABC):
    """A layout of the model's values in a checkpoint, chosen for each save."""

    def plan(
        self, trainer: Trainer, engine: ZeroEngine, folder: Path, disk: Disk, exchange: Exchange
    ) -> WeightsPlan | None:
        """Saves everything of the model except its values, and returns this rank's part of the values. Collective.

        Returns:
            None on every rank if transformers would merge or split the model's tensors (experts that are one tensor in the
            model and many in its files), or if the layout cannot store them. In this case nothing in the folder is of use.

        Raises:
            CheckpointError: on every rank, if any rank could not create the files.
        """
        tensors = saved_tensors_of(engine.model)

        def make_files() -> dict[str, Any] | None:
            # Inside, parameters have the dtype of the saved values, which may differ from the dtype of forward and backward.
            with engine.sharded.gathered.without_values():
                files = _save_without_values(trainer, tensors, folder) if disk.leads else None
                return None if files is None else self._make(files, tensors, folder)

        # One rank per disk creates the files. All ranks need the offsets, and none may write before the files exist.
        layout = on_all_ranks(exchange, make_files, doing=f"write the model to {folder}", then=AFTER_A_FAILED_SAVE)[0]
        return None if layout is None else self._plan(engine, tensors, layout, folder)

    @abstractmethod
    def _make(
        self, files: list[_SavedFile], tensors: Mapping[str, torch.Tensor], folder: Path
    ) -> dict[str, Any] | None:
        """Creates this layout's files. Returns each tensor's position by its first name in the model.

        Returns None if the layout cannot store each tensor.
        """

    @abstractmethod
    def _plan(
        self, engine: ZeroEngine, tensors: Mapping[str, torch.Tensor], layout: dict[str, Any], folder: Path
    ) -> WeightsPlan: ...


class HfLayout(Layout):
    """Writes directly into the files read by `from_pretrained`; needs a disk shared by all ranks."""

    def _make(
        self, files: list[_SavedFile], tensors: Mapping[str, torch.Tensor], folder: Path
    ) -> dict[str, tuple[str, int]]:
        layout = {}
        for file in files:
            shapes = {name: (tensors[first].dtype, tensors[first].shape) for name, first in file.names.items()}
            begins = lay_out(file.path, shapes, file.metadata)
            # Adapters other than the default one have their own folders.
            below = file.path.relative_to(folder).as_posix()
            layout.update({first: (below, begins[name]) for name, first in file.names.items()})
        return layout

    def _plan(
        self,
        engine: ZeroEngine,
        tensors: Mapping[str, torch.Tensor],
        layout: dict[str, tuple[str, int]],
        folder: Path,
    ) -> WeightsPlan:
        pieces = []
        for name, interval, values in _own_values(engine, tensors, layout):
            file, begin = layout[name]
            offset = begin + interval.start * values.itemsize
            pieces.append(Piece(path=folder / file, offset=offset, values=values, name=name))
        return WeightsPlan(pieces=pieces)


class ShardedLayout(Layout):
    """Writes into each rank's own file, together with the optimizer state."""

    def _make(
        self, files: list[_SavedFile], tensors: Mapping[str, torch.Tensor], folder: Path
    ) -> dict[str, tuple[str, str, list[int]]] | None:
        if any(file.path.parent != folder for file in files):
            # Several adapters use the same names in their files.
            return None
        # Remove the index written by save_pretrained: this layout has no such files, and readers would report them as missing.
        (folder / SAFE_WEIGHTS_INDEX_NAME).unlink(missing_ok=True)
        return {
            first: (name, dtype_name(name, tensors[first].dtype), list(tensors[first].shape))
            for file in files
            for name, first in file.names.items()
        }

    def _plan(
        self,
        engine: ZeroEngine,
        tensors: Mapping[str, torch.Tensor],
        layout: dict[str, tuple[str, str, list[int]]],
        folder: Path,
    ) -> WeightsPlan:
        return WeightsPlan(
            rows=[
                (WEIGHTS, layout[first][0], interval, values)
                for first, interval, values in _own_values(engine, tensors, layout)
            ],
            weights={name: SavedWeight(dtype=dtype, shape=tuple(shape)) for name, dtype, shape in layout.values()},
        )


def can_write_parts(trainer: Trainer, stock_save: Any) -> bool:
    """Whether transformers' or peft's own code saves the Trainer's model, with exactly the tensors in the model.

    Args:
        trainer: the Trainer.
        stock_save: the Trainer's `save_model` without the engine's override.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return (
        model is trainer.model
        and any(isinstance(model, kind) and type(model).save_pretrained is kind.save_pretrained for kind in _savers())
        # A custom state_dict may rename, omit or compute tensors, but here the modules' own tensors are written.
        and type(model).state_dict is nn.Module.state_dict
        # Excludes adapters added to a transformers model by `add_adapter`.
        and not (isinstance(model, PreTrainedModel) and hasattr(model, "peft_config"))
        # A quantizer writes its own tensors instead of the model's.
        and getattr(model, "hf_quantizer", None) is None
        # The files of a subclass's own save, and the ranks on which they are written, are not known here.
        and stock_save is Trainer.save_model
        and type(trainer)._save is Trainer._save
        and not {"save_model", "_save"} & set(vars(trainer))
        # Otherwise each node has its own complete files, and a rank would have to write into the files of all nodes.
        and not trainer.args.save_on_each_node
        and all(_has_plain_state(module) for module in model.modules())
    )


def _savers() -> dict[Any, str]:
    """Returns the classes with a known `save_pretrained`, each with the function that writes a file."""
    known: dict[Any, str] = {PreTrainedModel: "transformers.modeling_utils.safe_save_file"}
    if is_peft_available():
        from peft import PeftModel

        known[PeftModel] = "peft.peft_model.safe_save_file"
    return known


def _has_plain_state(module: nn.Module) -> bool:
    return (
        type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        and type(module).get_extra_state is nn.Module.get_extra_state
        and not module._state_dict_hooks
        # The engine's own hook only checks for unsent writes and changes nothing.
        and all(isinstance(hook, WeakHook) for hook in module._state_dict_pre_hooks.values())
    )


def _save_without_values(
    trainer: Trainer, tensors: Mapping[str, torch.Tensor], folder: Path
) -> list[_SavedFile] | None:
    """Saves the model without its weights files, and returns their contents; None if the model's tensors do not match."""
    # Untouched memory is never allocated by the operating system, so these tensors cost only addresses. Tied weights stay one
    # tensor.
    empty: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        empty.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype))
    first_name: dict[int, str] = {}
    for name, tensor in tensors.items():
        first_name.setdefault(id(empty[id(tensor)]), name)
    files: list[_SavedFile] = []
    is_whole = True

    def note(saved: dict[str, torch.Tensor], path: str, metadata: dict | None = None) -> None:
        nonlocal is_whole
        # A tensor not among these is copied or computed, so no rank has its values in the form in which they would be written.
        is_whole = is_whole and all(id(tensor) in first_name for tensor in saved.values())
        if is_whole:
            names = {name: first_name[id(tensor)] for name, tensor in saved.items()}
            files.append(_SavedFile(path=Path(path), names=names, metadata=metadata))

    with _written_by(note):
        try:
            trainer._save(str(folder), state_dict={name: empty[id(tensor)] for name, tensor in tensors.items()})
        except ShardedParametersError:
            # The saved tensors are computed from values on other ranks, for example by a prompt encoder.
            return None
    return files if is_whole else None


@contextmanager
def _written_by(save_file: Callable[..., None]) -> Iterator[None]:
    """Replaces the functions by which `save_pretrained` writes a file."""
    with ExitStack() as stack:
        for saver in _savers().values():
            module, _, name = saver.rpartition(".")
            stack.enter_context(replaced(importlib.import_module(module), name, save_file))
        yield


def _own_values(
    engine: ZeroEngine, tensors: Mapping[str, torch.Tensor], layout: Mapping[str, Any]
) -> Iterator[tuple[str, Interval, torch.Tensor]]:
    """Yields this rank's parts of the saved tensors: first name in the model, interval of elements, live values."""
    name_of: dict[int, str] = {}
    for name, tensor in tensors.items():
        name_of.setdefault(id(tensor), name)
    for own in engine.state.own_weights():
        # Parameters outside of the model have no name in its files.
        name = name_of.get(id(own.parameter), "")
        if name in layout:
            yield name, own.interval, own.values
    if engine.groups.rank == 0:
        # Buffers, and below stage 3 frozen parameters, are the same on every rank.
        sharded = {id(p) for p in engine.state.bucketed_parameters()}
        for name in layout:
            if id(tensors[name]) not in sharded:
                yield name, Interval(0, tensors[name].numel()), values_to_save(tensors[name])


# ---- A Trainer's saves: complete or absent, blocking or asynchronous ----

logger = logging.get_logger(__name__)

_GLANCE_S = 0.1
_PATIENCE_S = 10.0
"""Time to wait for the other ranks' part of a save if an exception ends this rank."""


class CheckpointSaver:
    """Saves one Trainer's checkpoints, one at a time, blocking or asynchronously. Created on all ranks.

    Args:
        trainer: the Trainer.
        engine: the engine whose state is saved.
        stock_save: the Trainer's `save_model` without the engine's override.

    Attributes:
        engine: the engine whose state is saved.
    """

    def __init__(self, trainer: Trainer, engine: ZeroEngine, stock_save: Callable):
        self._trainer = trainer
        self.engine = engine
        self._writes_parts = can_write_parts(trainer, stock_save)
        self._base = FrozenBase(engine)
        self._background = Background(engine.device)
        self._may_be_async = engine.config.checkpoint.async_save
        mine = (uuid.uuid4().hex, secrets.token_bytes(32)) if engine.world_groups.rank == 0 else ("", b"")
        # Sent through the process group instead of the store, because anyone with access to the store must not learn the
        # secret.
        name, secret = engine.world.exchange(mine, "first save of a Trainer")[0]
        self._store_exchange = StoreExchange(engine.world_groups, name, secret, engine.config.comm.limit_s)
        self._former_best: str | None = None
        self._live: LivePieces | None = None
        self._writing: LivePieces | None = None
        self._written: tuple[str, LivePieces] | None = None
        for sharded in engine.optimizers:
            # A step changes the values in place, so a hook before each step copies the values not yet written by a save.
            copies = WeakHook(self, CheckpointSaver._before_step)
            sharded.optimizer.register_step_pre_hook(copies)
            # Schedule-free optimizers also write to parameters in `train()`, called by Trainer after an evaluation.
            for name in ("train", "eval"):
                if callable(getattr(sharded.optimizer, name, None)):
                    setattr(sharded.optimizer, name, _called_after(copies, getattr(sharded.optimizer, name)))
        self._stall_s = 0.0
        self._clock: SaveClock | None = None
        self._by_clock: Path | None = None
        self._superseded: Path | None = None
        self._filling: Disk | None = None
        self._is_asked_for_state = False

    def take_stall_s(self) -> float:
        """Returns the seconds for which saves have blocked training since the last call."""
        taken, self._stall_s = self._stall_s, 0.0
        return taken

    def _held_up(self, began_s: float, what: str) -> None:
        stall_s = time.perf_counter() - began_s
        self._stall_s += stall_s
        recorder = self._trainer.accelerator.zero_recorder
        if recorder is not None:
            recorder.stall(stall_s, what)

    def save(
        self,
        trial: object,
        position: DataPosition | None,
        *,
        is_awaited: bool = False,
        stop: TrainerStop | None = None,
    ) -> None:
        """Writes Trainer's checkpoint of a save step, under a temporary name until everything is on disk. Collective.

        Args:
            trial: the trial of a hyperparameter search, or None.
            position: the position of training in its data.
            is_awaited: the caller reads the checkpoint next, so the save must be complete on return.
            stop: holds the clock that requests saves by time.

        Raises:
            CheckpointError: on every rank, if any rank could not write, or could not finish the previous save. Former
                checkpoints and training state are not changed. With `checkpoint.on_failure: continue` a warning is logged
                instead and training continues.
        """
        began_s = time.perf_counter()
        trainer = self._trainer
        name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        # All ranks use rank 0's ID. The exchange also fails if ranks save different steps, each of which would be incomplete.
        mine = new_save() if self.engine.world_groups.rank == 0 else ""
        told = self.engine.world.exchange((mine, trainer.args.output_dir), f"save of {name}")
        save = told[0][0]
        if len({output_dir for _, output_dir in told}) > 1:
            # The run was not configured to save, so each rank has kept its own folder name; a callback asks for this save.
            share_output_dir(trainer)
        run_folder = Path(trainer._get_output_dir(trial=trial))
        final = run_folder / name
        # Finish the previous save first: only one save may write at a time, and its failure must be raised on all ranks.
        self.finish()
        # Repeats the beginning of Trainer's `_save_checkpoint`, which this method replaces.
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        # Restored if the save fails, because the trainer state would name a missing best checkpoint.
        self._former_best = trainer.state.best_model_checkpoint
        self._clock = None if stop is None else stop.clock
        if self._clock is not None:
            self._clock.begin_save()
        former = self._by_clock
        self._by_clock = final.absolute() if stop is not None and stop.saves_by_time else None
        self._superseded = None if former in (final.absolute(), None) else former
        with self._on_failure():
            try:
                self._save(save, run_folder, final, position, is_async=self._is_async(is_awaited=is_awaited))
            except CheckpointError:
                self._end_on_clock()
                raise
        self._held_up(began_s, "save")

    def _end_on_clock(self) -> None:
        if self._clock is not None:
            self._clock.end_save()

    def _is_async(self, *, is_awaited: bool) -> bool:
        """Whether training may continue while the checkpoint is written. Collective, because callbacks may differ by rank."""
        trainer = self._trainer
        # Trainer's own save starts and finishes an upload to the Hub.
        is_awaited |= trainer.args.push_to_hub
        is_awaited |= any(map(_looks_at_saves, trainer.callback_handler.callbacks))
        return self._may_be_async and not any(self.engine.world.exchange(is_awaited))

    def finish(self) -> None:
        """Waits for an asynchronous save; raises `save`'s errors. Collective."""
        with self._shown_from_here():
            # Polls through the process group, which reports a dead rank at once; the store does not.
            while not all(self.engine.world.exchange(self._background.is_done(_GLANCE_S))):
                pass
        with self._on_failure():
            self._background.finish()

    @contextmanager
    def _shown_from_here(self) -> Iterator[None]:
        """Shows a progress bar for this rank's remaining writes of the last save while training waits for the save."""
        if self._written is None:
            yield
            return
        name, live = self._written
        is_main = self.engine.world_groups.rank == 0 and not self._trainer.args.disable_tqdm
        try:
            with progress_bar(f"writing {name}", live.nbytes, is_main=is_main, done_bytes=live.written_bytes) as show:
                live.on_written = show
                yield
        finally:
            live.on_written, self._written = _not_told, None

    def give_up(self, error: BaseException) -> None:
        """Ends an asynchronous save without a long wait for other ranks, because `error` is ending this rank.

        After a KeyboardInterrupt, a slow write to disk is not awaited either, and the save is dropped.
        """
        self._store_exchange.hurry(_PATIENCE_S)
        if isinstance(error, KeyboardInterrupt) and not self._background.is_done(_GLANCE_S):
            logger.warning(
                f"hf_zero: interrupted; the save in progress is dropped if it takes {_PATIENCE_S:.0f} s more. "
                f"{AFTER_A_FAILED_SAVE}"
            )
            if not self._background.is_done(_PATIENCE_S):
                self._drop()
        try:
            self._background.finish()
        except (CheckpointError, CommunicationError) as error:
            logger.warning(str(error))

    def _drop(self) -> None:
        if self._writing is not None:
            self._writing.drop()
        self._store_exchange.hurry(1.0)

    @contextmanager
    def _on_failure(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._trainer.state.best_model_checkpoint = self._former_best
            if self.engine.config.checkpoint.on_failure == "stop":
                raise
            logger.warning(f"{error} Training continues because of `checkpoint.on_failure: continue`.")

    def _save(self, save: str, run_folder: Path, final: Path, position: DataPosition | None, *, is_async: bool) -> None:
        engine, trainer = self.engine, self._trainer
        # Before the plan, whose pieces are views of this rank's shards: all ranks must save the same model.
        engine.synchronize()
        exchange = engine.world.exchange
        disk = find_disk(run_folder, engine.world_groups.rank, exchange, then=AFTER_A_FAILED_SAVE)
        is_full = self._is_full(run_folder)
        layout = self._layout(disk, is_full=is_full)
        # An absolute path, because the script may change its working directory during the save.
        there = final.absolute()
        temporary = begin(there, needed_bytes=state_bytes(engine, disk), disk=disk, merge=engine.world.merge)
        try:
            plan = self._plan_model(layout, temporary, disk)
            _note_best(trainer, run_folder, final)
            asked = on_all_ranks(
                exchange,
                lambda: self._write_other_files(temporary, disk, position),
                doing=f"write trainer state to {temporary}",
                then=AFTER_A_FAILED_SAVE,
            )
            # A subclass may call Trainer's method on the saving rank only, or not at all.
            with_state = any(asked)
            if with_state and not disk.is_of_all:
                done_on_all_ranks(
                    engine.world.merge,
                    disk.rank,
                    lambda: self._write_scheduler(temporary, disk),
                    doing=f"write the scheduler's state to {temporary}",
                    then=AFTER_A_FAILED_SAVE,
                )
            folder = temporary / ZERO_FOLDER
            manifest, pieces = plan_state(engine, folder, save=save, with_state=with_state, weights=plan.rows)
            manifest = replace(
                manifest,
                weights=dict(plan.weights),
                is_kept=is_full,
                base=self._base.checksum(),
                step=trainer.state.global_step,
            )
        except CheckpointError:
            abandon(temporary, disk=disk)
            raise
        pieces = [*plan.pieces, *pieces]
        noted = trainer.state.best_model_checkpoint
        best = None if noted is None else Path(noted).absolute()
        live = LivePieces(pieces, self._snapshot_bytes(), partial(_refuse_edits, _versions_of(engine)))
        self._written = (final.name, live)
        complete = partial(self._complete, manifest, live, temporary, there, disk=disk, best=best)
        if is_async:
            # Two references, because a step clears `_live` once the remaining pieces are copied, and an interrupt may still
            # have to drop the save.
            self._live = self._writing = live
            self._background.start(partial(complete, merge=self._store_exchange.merge))
        else:
            with self._shown_from_here():
                complete(merge=engine.world.merge)
            if trainer.args.push_to_hub:
                trainer._push_from_checkpoint(str(final))

    def is_asked_for_state(self, output_dir: str) -> bool:
        """Notes that Trainer's own `_save_optimizer_and_scheduler` was called; returns whether a save is under way."""
        if self._filling is None:
            return False
        self._is_asked_for_state = True
        if self._filling.leads:
            _write_scheduler(self._trainer, Path(output_dir))
        return True

    def _write_scheduler(self, folder: Path, disk: Disk) -> None:
        """Writes the scheduler's state to a disk on which Trainer's method was not called."""
        if disk.leads and not self._is_asked_for_state:
            _write_scheduler(self._trainer, folder)

    def _write_other_files(self, folder: Path, disk: Disk, position: DataPosition | None) -> bool:
        """Writes scheduler, scaler, random states and trainer state through the methods of Trainer or a subclass.

        Returns:
            Whether this rank's calls make the optimizer's state part of the checkpoint.
        """
        trainer = self._trainer
        self._is_asked_for_state = False
        if not trainer.args.save_only_model:
            self._filling = disk
            try:
                with disk_asked(folder):
                    trainer._save_optimizer_and_scheduler(str(folder))
                    trainer._save_scaler(str(folder))
                    trainer._save_rng_state(str(folder))
            finally:
                self._filling = None
        if disk.leads:
            for callback in [*trainer.callback_handler.callbacks, trainer.control]:
                if isinstance(callback, ExportableState):
                    held = trainer.state.stateful_callbacks
                    name = type(callback).__name__
                    if isinstance(held[name], list):
                        held[name].append(callback.state())
                    else:
                        held[name] = callback.state()
            # After the callbacks' states, which are stored inside the trainer state.
            trainer.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
            if position is not None:
                position.write(folder)
            write_run(trainer, folder)
        return self._is_asked_for_state and trainer.args.should_save

    def _before_step(self, *_args: object) -> None:
        if self._live is not None:
            began_s = time.perf_counter()
            self._live.secure()
            self._live = None
            self._held_up(began_s, "copy")

    def _is_full(self, run_folder: Path) -> bool:
        """Whether training has passed a multiple of `full_every` steps since the last checkpoint of this or a former run."""
        every, step = self.engine.config.checkpoint.full_every, self._trainer.state.global_step
        if not every:
            return False
        numbers = [step_of(path) for path in newest_first(run_folder)]
        # Rank 0's answer for all, because hosts with separate disks may have different leftovers.
        former = self.engine.world.exchange(max((number for number in numbers if number < step), default=0))[0]
        return step // every > former // every

    def _layout(self, disk: Disk, *, is_full: bool) -> Layout:
        settings = self.engine.config.checkpoint
        is_hf = is_full or (settings.layout == "hf" and not settings.full_every)
        if is_hf and not disk.is_of_all and not self._trainer.args.save_on_each_node:
            raise CheckpointError(separate_disks(self._trainer, disk))
        return HfLayout() if is_hf else ShardedLayout()

    def _plan_model(self, layout: Layout, temporary: Path, disk: Disk) -> WeightsPlan:
        world = self.engine.world
        if self.engine.state.is_split:
            done_on_all_ranks(
                world.merge,
                disk.rank,
                lambda: self._save_other_files(temporary) if disk.leads else None,
                doing=f"write the model's config to {temporary}",
                then=AFTER_A_FAILED_SAVE,
            )
            return weight_rows(self.engine)
        if self._writes_parts:
            plan = layout.plan(self._trainer, self.engine, temporary, disk, world.exchange)
            if plan is not None:
                return plan
        done_on_all_ranks(
            world.merge,
            disk.rank,
            lambda: self._trainer.save_model(str(temporary), _internal_call=True),
            doing=f"write the model to {temporary}",
            then=AFTER_A_FAILED_SAVE,
        )
        return WeightsPlan()

    def _save_other_files(self, folder: Path) -> None:
        """Writes the files `save_pretrained` saves in addition to weights, for a model whose weights are saved as shards."""
        model: Any = self.engine.model
        with as_if_whole(model):
            model.config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        if self._trainer.processing_class is not None:
            self._trainer.processing_class.save_pretrained(folder)

    def _snapshot_bytes(self) -> int:
        offload = self.engine.config.offload
        if "nvme" in (offload.optimizer, offload.params):
            # Offloaded state does not fit in memory, so the state is copied from file to file before the step.
            return 0
        return free_bytes(torch.device("cpu")) // 2

    def _complete(
        self,
        manifest: Manifest,
        live: LivePieces,
        temporary: Path,
        final: Path,
        *,
        disk: Disk,
        best: Path | None,
        merge: Merge,
    ) -> None:
        try:
            # In this order, because the manifest vouches for files on the disk, and the rename must publish only a sealed
            # folder.
            manifest = write_live(live, temporary, merge, disk.rank, manifest)
            seal_state(self.engine, temporary, manifest, disk=disk, merge=merge)
            commit(temporary, final, disk=disk, merge=merge)
        except CheckpointError:
            abandon(temporary, disk=disk)
            raise
        finally:
            self._end_on_clock()
        if disk.leads:
            # Old checkpoints are removed only once the new one is complete under its final name.
            gone = self._superseded
            if gone is not None and gone != best and not _is_kept(gone):
                _discard(gone, "was saved by the clock")
            _rotate(final.parent, final, limit=self._trainer.args.save_total_limit, best=best)


def _looks_at_saves(callback: TrainerCallback) -> bool:
    """Whether a callback runs after a save and may read or extend the checkpoint's folder."""
    if type(callback).on_save is TrainerCallback.on_save or isinstance(callback, StepFigures):
        return False
    # The Weights & Biases callback uploads the folder only if configured to.
    return not isinstance(callback, WandbCallback) or os.environ.get("WANDB_LOG_MODEL", "").lower() == "checkpoint"


def _called_after(first: Callable[[], object], call: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> object:
        first()
        return call(*args, **kwargs)

    return called


def _not_told(_nbytes: int) -> None:
    """Reports nothing, because no rank waits for these pieces."""


def _versions_of(engine: ZeroEngine) -> list[tuple[str, torch.nn.Parameter, int]]:
    """Returns the version counters of large parameters; small ones are already copied when the save returns."""
    return [
        (name, parameter, parameter._version)
        for name, parameter in engine.model.named_parameters()
        if not is_small(engine.state.box_of(parameter).numel * parameter.itemsize)
    ]


def _refuse_edits(versions: list[tuple[str, torch.nn.Parameter, int]]) -> None:
    for name, parameter, version in versions:
        if parameter._version != version:
            raise edited_while_written(name)


def _rotate(run_folder: Path, latest: Path, *, limit: int | None, best: Path | None) -> None:
    """Applies Trainer's `save_total_limit`: removes the checkpoints of the earliest steps, but never `latest` or `best`.

    Full checkpoints of `checkpoint.full_every` are not counted.
    """
    if not limit or limit < 0:
        return
    kept = {latest} if best is None else {latest, best}
    found = [path for path in newest_first(run_folder) if path in kept or not _is_kept(path)]
    # A checkpoint of a step later than `latest` was skipped by a resume and is removed first. Ordered by step instead of by
    # time, because clocks jump and a copied folder has new times.
    ahead = step_of(latest)
    others = sorted(
        (path for path in found if path not in kept), key=lambda path: (step_of(path) <= ahead, step_of(path))
    )
    surplus = len(found) - max(limit, len(kept))
    for path in others[: max(surplus, 0)]:
        _discard(path, "is above save_total_limit")


def _discard(path: Path, why: str) -> None:
    try:
        discard(path)
    except OSError as error:
        logger.warning(f"hf_zero: {path} {why}, but could not be deleted: {error}")


def _is_kept(checkpoint: Path) -> bool:
    try:
        return Manifest.read(checkpoint / ZERO_FOLDER).is_kept
    except CheckpointError:
        # Saved by plain Trainer, or damaged. May be removed like any other.
        return False


def _note_best(trainer: Trainer, run_folder: Path, final: Path) -> None:
    if trainer.state.best_global_step:
        best = run_folder / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.best_global_step}"
        # The folder of the current save does not exist yet, because a save has a temporary name until the commit.
        if best == final or best.exists():
            trainer.state.best_model_checkpoint = str(best)


def _write_scheduler(trainer: Trainer, folder: Path) -> None:
    torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)


def save_state_of(trainer: Trainer, engine: ZeroEngine, folder: Path) -> Callable[[], None]:
    """Saves the states of optimizer and scheduler if a subclass writes a checkpoint without Trainer's `_save_checkpoint`.

    Collective.

    Returns:
        A collective function that writes the manifest. Call it once the folder has its remaining files.
    """
    engine.world.barrier("Trainer._save_optimizer_and_scheduler", engine.config.comm.limit_s)
    engine.synchronize()
    disk = find_disk(folder, engine.world_groups.rank, engine.world.exchange, then=AFTER_A_FAILED_SAVE)
    if disk.leads:
        _write_scheduler(trainer, folder)
    manifest = replace(write_state(engine, folder / ZERO_FOLDER), step=trainer.state.global_step)
    return partial(seal_state, engine, folder, manifest, disk=disk)
