"""Adapts a stock Trainer to a model trained by an engine: saving, loading, resuming, logging.

The Trainer gets a new class with these methods first in its bases, so the overrides of subclasses (Seq2SeqTrainer, TRL's) stay
in effect.
"""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments, logging
from transformers.hyperparameter_search import default_hp_search_backend
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import HPSearchBackend, IntervalStrategy
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..checkpoint.faults import CheckpointError, in_one_line
from ..checkpoint.manifest import Manifest
from ..checkpoint.origin import is_foreign
from ..checkpoint.torch_files import load_tensors
from ..comm.all_or_none import exchange_between_ranks
from ..comm.own_groups import set_limit
from ..engine.engine import ZeroEngine
from ..engine.split_model import is_dtensor
from ..extras import extra
from ..hooks.mixins import mix_in
from ..hooks.replaced import replaced
from ..hooks.weak import engine_attached_to
from ..presence.error_hook import naming_lost_ranks
from ..stage3.evaluation_dtype import computing_in
from .accelerator import ZeroAcceleratorMixin
from .damaged_files import named_when_damaged, named_when_of_another_model
from .evaluators import evaluators_on_all_ranks
from .frozen_base import refuse_other_base
from .gathered import gathered
from .halved_batches import ignores_num_items, pass_of, whole_logits
from .init import init, load_weights_into
from .lazy_weights import leave_in_checkpoint
from .model_parallel import as_if_whole
from .plain_optimizers import open_plain
from .resume import alone_in_output_dir, checkpoint_to_resume
from .resume_message import say_resumed
from .row_weights import has_row_weights
from .rows_of_a_step import RowsOfAStep
from .run_facts import write_run
from .same_loops import refuse_other_arguments
from .saved_weights import is_checkpoint_of_ours
from .state_io import ZERO_FOLDER, load_state, open_own
from .step_figures import StepFigures
from .tracker_settings import told_to_trackers
from .trainer_saves import CheckpointSaver, save_state_of
from .trainer_stop import TrainerStop, begin_in_trainer, evaluation_is_owed

if TYPE_CHECKING:
    # Mixed into Trainer's subclasses at run time; the type checker treats their methods as inherited.
    from transformers import Trainer as _TrainerBase
else:
    _TrainerBase = object

logger = logging.get_logger(__name__)

_USUAL_DDP_TIMEOUT_S = TrainingArguments.ddp_timeout


def install_in_trainer(trainer: Trainer) -> None:
    """Makes a Trainer save, load and log through its engine. May be called repeatedly."""
    mix_in(trainer, ZeroTrainerMixin)
    model: Any = trainer.model
    if getattr(model, "_is_distributed_loading_by_transformers", False):
        # With this mark, Trainer would average gradients itself and refuse checkpoints.
        model._is_distributed_loading_by_transformers = False
    if trainer.args.n_gpu > 1:
        _train_on_one_gpu(trainer)
    if dist.is_initialized() and trainer.args.ddp_timeout != _USUAL_DDP_TIMEOUT_S:
        # Trainer passes `ddp_timeout` only to accelerator process groups, and not to a group created before its arguments.
        set_limit(trainer.args.ddp_timeout_delta, cast(dist.ProcessGroup, dist.group.WORLD))


def _train_on_one_gpu(trainer: Trainer) -> None:
    """Prevents a Trainer with several visible GPUs from copying the model to all of them (`nn.DataParallel`)."""
    args = trainer.args
    logger.warning(
        f"hf_zero: this process sees {args.n_gpu} GPUs and trains on {args.device} only: the engine needs one process for "
        f"each GPU. Start them with `torchrun --nproc-per-node {args.n_gpu} ...` or `accelerate launch`."
    )
    args._n_gpu = 1
    # Trainer has already multiplied its batch size by the GPUs when ZeroCallback runs; the property is computed at each
    # access.
    trainer._train_batch_size = args.train_batch_size


_NO_TRIAL = "no trial"
"""Broadcast instead of a trial when a search has ended before its last trial."""

_OF_THIS_PROCESS = ("_checkpoint_saver", "_rescue", "_stop")
"""Attributes of a Trainer that hold an engine or open files of this process."""


class ZeroTrainerMixin(_TrainerBase):
    """Overrides of Trainer's methods. Each calls the stock method for everything that is not sharded."""

    _checkpoint_saver: CheckpointSaver | None = None
    _alone_in: Path | None = None
    _step_figures: StepFigures | None = None
    _rescue: Any | None = None
    _report_is_due = False
    _rows_of_a_step: RowsOfAStep | None = None
    _stop: TrainerStop | None = None
    _owes_evaluation = False
    _ignored_keys: list[str] | None = None
    _trials = 0
    _caught_in_trials: tuple[type[BaseException], ...] = ()
    _seals: list[Callable[[], None]] | None = None
    """Set within `_save_checkpoint`: functions that seal checkpoints written by a subclass, called once these are complete."""

    def __getstate__(self) -> dict[str, Any]:
        """Excludes this process's engine and files from copies and pickles. `train()` creates new ones."""
        # In Python 3.10, `object` has no `__getstate__`.
        state = super().__getstate__() if hasattr(super(), "__getstate__") else self.__dict__
        return {name: value for name, value in state.items() if name not in _OF_THIS_PROCESS}

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None, **kwargs):
        if trial is not None and self._between_trials(trial):
            return None
        if isinstance(resume_from_checkpoint, str):
            # A command line passes strings: `--resume_from_checkpoint True`.
            said = {"true": True, "false": False}.get(resume_from_checkpoint.lower())
            resume_from_checkpoint = resume_from_checkpoint if said is None else said
        # A trial of a search starts from scratch: the checkpoints in output_dir belong to different hyperparameters.
        goes_on = self.accelerator.zero_config.checkpoint.resume == "auto" and trial is None
        with alone_in_output_dir(self, resume_from_checkpoint, goes_on=goes_on):
            checkpoint = checkpoint_to_resume(self, resume_from_checkpoint, goes_on=goes_on)
            # Set before Trainer prepares the model: a resumed run needs no forecast, and its weights are read from the
            # checkpoint.
            self.accelerator.zero_goes_on = checkpoint is not None
            self._rows_of_a_step = RowsOfAStep(self)
            if goes_on and checkpoint is not None:
                self._rows_of_a_step.go_on_from(checkpoint)
            asked = {
                "resume_from_checkpoint": checkpoint,
                "trial": trial,
                "ignore_keys_for_eval": ignore_keys_for_eval,
            }
            # Pass only the set ones, because a subclass's `train` may not accept all of them.
            asked = {name: value for name, value in asked.items() if value is not None} | kwargs
            if trial is None or self.is_world_process_zero():
                return self._train(asked)
            try:
                return self._train(asked)
            except self._caught_in_trials:
                # Optuna catches the same exception on rank 0. Without an objective, Trainer would evaluate this trial.
                self.objective = 0.0

    def _train(self, asked: dict[str, Any]):
        if self.is_world_process_zero() and self.model is not None:
            _warn_of_scaled_loss(self)
            _warn_of_early_outer_steps(self)
        refuse_other_arguments(self)
        self._report_is_due = bool(self.accelerator.zero_config.report)
        self._ignored_keys = asked.get("ignore_keys_for_eval")
        if "_tp_size" in vars(self):
            # TRL sums tokens over all ranks and divides by the number of ranks with the same batch, for which TRL reads only
            # accelerate's `tp_size`.
            self._tp_size = self.get_tp_size()
        if self._step_figures is None:
            self._step_figures = StepFigures()
            self.add_callback(self._step_figures)
        # Before Trainer prepares the model, because the engine reads this stop when built.
        self._stop = self.accelerator.zero_stop = begin_in_trainer(self, asked.get("trial"))
        try:
            with told_to_trackers(self), naming_lost_ranks(self.accelerator):
                outcome = super().train(**asked)
            self.accelerator.end_report()
            return outcome
        # BaseException, because an interrupt or a signal's SystemExit also leaves a log open and a save under way.
        except BaseException as error:
            self.accelerator.end_report(in_one_line(error))
            if self._checkpoint_saver is not None:
                # Finish or drop an asynchronous save here, because the other ranks wait for this rank's part.
                self._checkpoint_saver.give_up(error)
            raise
        finally:
            if self._stop is not None:
                self._stop.release()
            self._stop = self.accelerator.zero_stop = None

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        engine, stock = _only_engine(self), partial(super()._maybe_log_save_evaluate, *args, **kwargs)
        if self._stop is None or engine is None:
            stock()
        else:
            self._stop.after_step(engine, stock)

    def _evaluate(self, *args, **kwargs):
        with nullcontext() if self._stop is None else self._stop.evaluation():
            return super()._evaluate(*args, **kwargs)

    def prediction_step(self, *args, **kwargs):
        engine = _only_engine(self)
        if self._stop is not None and engine is not None:
            self._stop.before_prediction(engine)
        wanted = not (args[2] if len(args) > 2 else kwargs["prediction_loss_only"])
        with whole_logits(engine, super().get_sp_size(), wanted=wanted):
            return super().prediction_step(*args, **kwargs)

    def get_tp_size(self) -> int:
        # With sequence parallelism, each rank of a group has the whole batch, like the ranks of a tensor-parallel group.
        # Trainer counts tokens and samples, and scales losses, by this number.
        return super().get_tp_size() * super().get_sp_size()

    def get_sp_size(self) -> int:
        # For these ranks, Trainer assumes DeepSpeed's sequence parallelism, where each rank gets different samples than it
        # computes.
        return 1

    def _evaluate_as_owed(self) -> None:
        """Runs the evaluation that was due after the resumed step, if the former run was stopped before this evaluation."""
        if self._owes_evaluation:
            self._owes_evaluation = False
            self.control.should_evaluate, self.control.should_log, self.control.should_save = True, False, False
            # Nothing is logged, so the sum of losses is not used.
            nothing = torch.zeros(())
            self._maybe_log_save_evaluate(
                nothing, None, self.model, None, self.state.epoch, self._ignored_keys, time.time()
            )

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        stock = super().training_step
        if self._report_is_due:
            self._begin_report()
        rescues = self.accelerator.zero_config.out_of_memory != "stop"
        engine = _only_engine(self) if rescues else None
        if engine is None:
            return stock(model, inputs, num_items_in_batch)
        if self._rescue is None or not self._rescue.serves(engine):
            self._rescue = extra("diagnose", "Rescue")(engine)
        run = pass_of(self, stock, model, num_items_in_batch)
        return self._rescue.run(inputs, run, ends_step=self.accelerator.sync_gradients)

    def _begin_report(self) -> None:
        """Starts the log at the first micro-batch, when the step resumed from is known."""
        self._report_is_due = False
        engine = _only_engine(self)
        if engine is not None and engine.optimizers:
            self.accelerator.begin_report(engine, self.args.output_dir, self.state.global_step)

    def set_initial_training_values(self, *args, **kwargs):
        values = super().set_initial_training_values(*args, **kwargs)
        if self._rows_of_a_step is not None:
            # The sixth of Trainer's values is `steps_in_epoch`: the micro-batches of one rank in a pass over the data.
            self._rows_of_a_step.steps_in_epoch = values[5]
        return values

    def _init_training_state(self, *args, **kwargs):
        epochs, batches = super()._init_training_state(*args, **kwargs)
        # After the stock method, which reads the checkpoint's trainer state.
        self._owes_evaluation = evaluation_is_owed(self)
        if self.state.global_step >= self.state.max_steps:
            # The checkpoint was saved after the last step. Trainer checks for the end only after a step, and would take one
            # more.
            return self.state.num_train_epochs, 0
        return (
            (epochs, batches) if self._rows_of_a_step is None else self._rows_of_a_step.skipped_batches(epochs, batches)
        )

    def _prepare_for_training(self, *args, **kwargs):
        if self.model_wrapped is not self.model:
            # A former run or evaluation has compiled the model. Trainer regards it as prepared and would prepare only the
            # optimizer.
            self.accelerator.prepare_model(self.model)
        return super()._prepare_for_training(*args, **kwargs)

    def _finalize_training(self, *args, **kwargs):
        # A run resumed after its last step takes no step and loads no random states, so its due evaluation runs here.
        self._evaluate_as_owed()
        own = _only_engine(self)
        if self._stop is not None and own is not None:
            self._stop.at_the_end(own)
        for engine in self.accelerator.zero_engines:
            # Like a save: distributes writes to shards since the last step, and models that only outer steps average, to all
            # ranks.
            engine.synchronize()
        # The stock method looks for checkpoints next, so an asynchronous save has to be complete.
        if self._checkpoint_saver is not None:
            self._checkpoint_saver.finish()
        return super()._finalize_training(*args, **kwargs)

    def call_model_init(self, trial=None):
        with init(self.accelerator.zero_config):
            return super().call_model_init(trial)

    def add_callback(self, callback) -> None:
        _gather_to_sync(callback)
        super().add_callback(callback)

    def hyperparameter_search(
        self,
        hp_space=None,
        compute_objective=None,
        n_trials: int = 20,
        direction="minimize",
        backend=None,
        hp_name=None,
        **kwargs,
    ):
        backend = HPSearchBackend(default_hp_search_backend() if backend is None else backend)
        if backend is not HPSearchBackend.OPTUNA:
            raise NotImplementedError(
                f"hf_zero: hyperparameter_search with backend={backend.value!r} is not built yet. Install Optuna and pass "
                "backend='optuna', or start one launch for each trial."
            )
        from optuna import TrialPruned

        caught = kwargs.get("catch", ())
        self._caught_in_trials = (TrialPruned, *([caught] if isinstance(caught, type) else caught))
        self._trials = 0
        best = super().hyperparameter_search(
            hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs
        )
        self._release_trial()
        if self.is_world_process_zero() and self.args.world_size > 1:
            # A study may end early (`timeout`, `study.stop()`), and the other ranks still wait for each of the n_trials.
            for _ in range(n_trials - self._trials):
                dist.broadcast_object_list([_NO_TRIAL], src=0)
        return best

    def _between_trials(self, trial: Any) -> bool:
        """Frees the former trial of a search. Returns True if the search has ended early and there is no trial."""
        if trial == _NO_TRIAL:
            self.objective = 0.0
            return True
        if self._trials:
            self._release_trial()
        self._trials += 1
        return False

    def _release_trial(self) -> None:
        """Drops all references to the engine, model and optimizer of the last trial to free their memory."""
        if self._checkpoint_saver is not None:
            self._checkpoint_saver.finish()
        self._checkpoint_saver = self._rescue = None
        for holder, names in (
            (self, ("model", "model_wrapped", "optimizer", "lr_scheduler")),
            (self.callback_handler, ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")),
        ):
            for name in names:
                setattr(holder, name, None)
        self.accelerator.clear()

    def create_accelerator_and_postprocess(self) -> None:
        former = self.accelerator
        # Each trial of a search gets a new Accelerator, because its batch size may differ.
        super().create_accelerator_and_postprocess()
        if not isinstance(self.accelerator, ZeroAcceleratorMixin):
            # The engine was installed by a callback, so nothing in the training arguments installs it again.
            former.zero_plugin.attach(self.accelerator)
        self.accelerator.zero_stop = former.zero_stop

    def _report_to_hp_search(self, trial, step: int, metrics: dict[str, float]) -> None:
        if trial is None or self.hp_search_backend != HPSearchBackend.OPTUNA:
            super()._report_to_hp_search(trial, step, metrics)
            return
        # Only rank 0 has the study. Stock Trainer would prune the trial on rank 0 only, and the other ranks would wait.
        with replaced(trial, "should_prune", _never):
            super()._report_to_hp_search(trial, step, metrics)
        is_pruned = hasattr(trial, "study") and len(trial.study.directions) == 1 and trial.should_prune()
        if any(exchange_between_ranks(is_pruned)):
            self.callback_handler.on_train_end(self.args, self.state, self.control)
            from optuna import TrialPruned

            raise TrialPruned

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        engine = _only_engine(self)
        # Only for training entries: the figures are means since the last entry, and an evaluation's entry would restart the
        # mean.
        if "loss" in logs and engine is not None and self._step_figures is not None:
            with_report = bool(self.accelerator.zero_config.report)
            logs |= self._step_figures.since_the_last(engine, self.state.global_step, all_of_them=with_report)
            stall_s = 0.0 if self._checkpoint_saver is None else self._checkpoint_saver.take_stall_s()
            if stall_s:
                logs["zero/save_stall_s"] = round(stall_s, 3)
        if self.accelerator.zero_recorder is not None:
            self.accelerator.zero_recorder.log(logs, self.state.global_step)
        super().log(logs, start_time)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # A prepared model is already on its device; accelerate gives the CPU device an index, the rank, and `.to()` would
        # copy. At stage 3 `prepare` moves this rank's shard, also for a model that is only evaluated.
        stays = engine_attached_to(model) is not None or self.accelerator.zero_config.may_shard_parameters
        with replaced(Trainer, "_move_model_to_device", _stay) if stays else nullcontext():
            super()._move_model_to_device(model, device)

    def evaluation_loop(self, *args, **kwargs):
        dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16 if self.args.bf16_full_eval else None
        engine = _only_engine(self)
        # During training, Trainer also ignores `bf16_full_eval`.
        casts: AbstractContextManager[None] = nullcontext()
        if engine is not None and dtype is not None and not self.is_in_train:
            # Trainer would cast the model permanently. Cast here for the evaluation only; Trainer then finds the wanted dtype.
            engine.finish_parameters()
            casts = computing_in(engine.model, engine.sharded, dtype)
        with casts, naming_lost_ranks(self.accelerator), evaluators_on_all_ranks():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # Look up the engine again, because a different Trainer may have trained the model since.
        engine = _attached_to(self)
        if engine is None or not engine.saves_together:
            for other in self.accelerator.zero_engines:
                # The stock save reads parameters to which all-gathers may still be writing.
                other.finish_parameters()
            super().save_model(output_dir, _internal_call=_internal_call)
            if engine is not None and self.args.should_save:
                write_run(self, Path(output_dir or self.args.output_dir))
            return
        own_save = type(self)._save is not Trainer._save and not engine.state.is_split
        if own_save or super().save_model.__func__ is not Trainer.save_model:
            # A subclass may save on one rank or on all, from the state dict or from parts of the model, so provide the whole
            # model on all ranks.
            with engine.whole_copies("trainer.save_model", wanted=True):
                super().save_model(output_dir, _internal_call=_internal_call)
            if self.args.should_save:
                write_run(self, Path(output_dir or self.args.output_dir))
            return
        # Called on all ranks although only one writes, because the gather inside is collective.
        with self._copies_to_save(engine) as state_dict:
            if self.args.should_save:
                self._save(output_dir or self.args.output_dir, state_dict=state_dict)
                write_run(self, Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @contextmanager
    def _copies_to_save(self, engine: ZeroEngine):
        if not engine.state.is_split:
            with engine.whole_copies("trainer.save_model", wanted=self.args.should_save) as state_dict:
                yield state_dict
            return
        state_dict = engine.whole_state_dict(wanted=self.args.should_save)
        with as_if_whole(engine.model):
            yield state_dict

    # The next methods replace Trainer's method instead of the subclass's: a subclass's method is called with its own
    # arguments, and its `super()` call reaches the replacement.

    def init_hf_repo(self, *args, **kwargs) -> None:
        stock = Trainer.init_hf_repo

        def make(_trainer: Trainer, token: str | None = None, **asked: Any) -> None:
            # Only the main process creates the repository.
            if self.is_world_process_zero():
                extra("hub", "make_trainer_repo")(self, token, partial(stock, self, token=token, **asked))

        with replaced(Trainer, "init_hf_repo", make):
            super().init_hf_repo(*args, **kwargs)

    def push_to_hub(self, *args, **kwargs):
        with nullcontext() if _only_engine(self) is None else replaced(Trainer, "push_to_hub", _push_to_hub):
            return super().push_to_hub(*args, **kwargs)

    def create_model_card(self, *args, **kwargs) -> None:
        with nullcontext() if _only_engine(self) is None else replaced(Trainer, "create_model_card", _write_card):
            super().create_model_card(*args, **kwargs)

    def _push_from_checkpoint(self, *args, **kwargs) -> None:
        if _only_engine(self) is None:
            super()._push_from_checkpoint(*args, **kwargs)
            return
        with replaced(Trainer, "_push_from_checkpoint", _push_checkpoint):
            super()._push_from_checkpoint(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, *args, **kwargs) -> None:
        engine = _only_engine(self)
        if engine is None:
            super()._save_optimizer_and_scheduler(*args, **kwargs)
            return

        def save(_trainer: Trainer, output_dir: str) -> None:
            saver = self._checkpoint_saver
            if saver is not None and saver.is_asked_for_state(output_dir):
                return
            seal = save_state_of(self, engine, Path(output_dir))
            if self._seals is None:
                seal()
            else:
                self._seals.append(seal)

        with replaced(Trainer, "_save_optimizer_and_scheduler", save):
            super()._save_optimizer_and_scheduler(*args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        engine, stock = _only_engine(self), super()._save_checkpoint
        if engine is None:
            stock(model, trial)
            return
        # A subclass's `_save_checkpoint` may read or extend the saved folder.
        is_awaited = stock.__func__ is not Trainer._save_checkpoint

        def save(_trainer: Trainer, _model: nn.Module, trial: object) -> None:
            self._save_with(engine, trial, is_awaited=is_awaited)

        self._seals = []
        try:
            with replaced(Trainer, "_save_checkpoint", save):
                super()._save_checkpoint(model, trial)
            for seal in self._seals:
                seal()
        finally:
            self._seals = None

    def _save_with(self, engine: ZeroEngine, trial: object, *, is_awaited: bool = False) -> None:
        with engine.transport.watch.saving():
            if self._checkpoint_saver is None or self._checkpoint_saver.engine is not engine:
                self._checkpoint_saver = CheckpointSaver(self, engine, super().save_model.__func__)
            position = None if self._rows_of_a_step is None else self._rows_of_a_step.position()
            self._checkpoint_saver.save(trial, position, is_awaited=is_awaited, stop=self._stop)
            if self._stop is not None:
                self._stop.saved_step = self.state.global_step

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args, **kwargs) -> None:
        stock = Trainer._load_from_checkpoint
        # A subclass may read the weights once loaded.
        is_stock = super()._load_from_checkpoint.__func__ is stock

        def load(_trainer: Trainer, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
            if not self._loads_by_rank(Path(resume_from_checkpoint), model, is_stock=is_stock):
                stock(self, resume_from_checkpoint, *(() if model is None else (model,)))

        model = args[0] if args else kwargs.get("model")
        with (
            named_when_of_another_model(
                Path(resume_from_checkpoint), type(self.model if model is None else model).__name__
            ),
            replaced(Trainer, "_load_from_checkpoint", load),
        ):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _loads_by_rank(self, folder: Path, model: nn.Module | None, *, is_stock: bool) -> bool:
        """Loads weights in parts per rank, or leaves the weights in the checkpoint for now. Returns whether either was done."""
        is_whole = not _is_split(self.model if model is None else model)
        if is_whole and not is_checkpoint_of_ours(folder) and is_foreign(folder):
            load_foreign_weights = extra("foreign", "load_foreign_weights")
            self._issue_warnings_after_load(load_foreign_weights(self.model if model is None else model, folder))
            return True
        engine = _only_engine(self)
        if has_row_weights(folder) or not is_whole:
            # Each rank reads its own part: here after training, otherwise together with the optimizer's state.
            if engine is not None:
                load_weights_into(engine, folder)
            self._issue_warnings_after_load(_nothing_missing())
            return True
        # If the model still has another Trainer's engine, the weights must be loaded into this engine's parameters.
        is_unprepared = is_stock and model is None and _attached_to(self) is None
        # Adapters are saved next to other files or in one folder each, so only plain model files count.
        names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
        has_weights = is_checkpoint_of_ours(folder) and any((folder / name).is_file() for name in names)
        if is_unprepared and has_weights:
            if leave_in_checkpoint(self.model, folder):
                self._issue_warnings_after_load(_nothing_missing())
                return True
            logger.info(f"hf_zero: {folder} has different tensors than the model, so each rank loads all of it.")
        return False

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        engine = _only_engine(self)
        if engine is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if has_row_weights(Path(checkpoint)) or engine.state.is_split:
            load_weights_into(engine, Path(checkpoint))
        # Before the optimizer's state is loaded, because adapters on a different base model would silently train on.
        refuse_other_base(engine, Path(checkpoint))

        def load(_trainer: Trainer, checkpoint: str) -> None:
            self._load_state_of(engine, checkpoint)

        with replaced(Trainer, "_load_optimizer_and_scheduler", load):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_state_of(self, engine: ZeroEngine, checkpoint: str) -> None:
        folder, plain = Path(checkpoint) / ZERO_FOLDER, Path(checkpoint) / OPTIMIZER_NAME
        has_state = (folder.is_dir() and Manifest.read(folder).optimizers) or plain.is_file()
        # All ranks' answers, because hosts with separate disks may have different files, and loading is collective.
        if has_state and not all(engine.world.exchange((Path(checkpoint) / SCHEDULER_NAME).is_file())):
            # Like plain Trainer, which loads both or neither.
            logger.warning(
                f"hf_zero: {checkpoint} has no {SCHEDULER_NAME}: optimizer and schedule start afresh, as in plain Trainer."
            )
            return
        if folder.is_dir() and Manifest.read(folder).optimizers:
            origin = load_state(engine, folder, open_own)
        elif plain.is_file():
            origin = load_state(engine, plain, open_plain)
        elif is_foreign(Path(checkpoint)):
            origin = load_state(engine, Path(checkpoint), extra("foreign", "open_saved_by_others"))
            if not (Path(checkpoint) / SCHEDULER_NAME).is_file():
                raise CheckpointError(
                    f"hf_zero: {checkpoint} has no {SCHEDULER_NAME}: it was made with a scheduler of DeepSpeed's config, which "
                    "this run does not have. Start from its weights with `hf-zero convert`, or write the scheduler's state there."
                )
        else:
            # Like Trainer with a save_only_model checkpoint, which has no optimizer state.
            logger.warning(f"hf_zero: {checkpoint} holds no optimizer state; the optimizer starts afresh.")
            return
        scheduler_file = Path(checkpoint) / SCHEDULER_NAME
        with named_when_damaged(scheduler_file, "the scheduler's state"):
            self.lr_scheduler.load_state_dict(load_tensors(scheduler_file))
        say_resumed(engine, checkpoint, origin)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with named_when_damaged(checkpoint, "the loss scale"):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with named_when_damaged(checkpoint, "the random states"):
            super()._load_rng_state(checkpoint)
        # After the random states are loaded, so the evaluation draws the same random numbers as in an uninterrupted run.
        self._evaluate_as_owed()

    def _load_callback_state(self) -> None:
        with named_when_damaged(TRAINER_STATE_NAME, "the callbacks' state"):
            super()._load_callback_state()

    def _load_best_model(self) -> None:
        for engine in self.accelerator.zero_engines:
            # The stock method writes into the parameters, and an all-gather still under way would overwrite the best weights
            # with the last step's.
            engine.finish_parameters()
        best, engine = Path(self.state.best_model_checkpoint), _only_engine(self)
        if engine is None or not (has_row_weights(best) or engine.state.is_split):
            super()._load_best_model()
            return

        def load(_trainer: Trainer) -> None:
            load_weights_into(engine, best)
            self._issue_warnings_after_load(_nothing_missing())

        with replaced(Trainer, "_load_best_model", load):
            super()._load_best_model()


def _never() -> bool:
    return False


def _nothing_missing() -> Any:
    """Returns torch's result of a load without missing or unexpected tensors."""
    return nn.Module().load_state_dict({})


def _stay(_trainer: Trainer, _model: nn.Module, _device: torch.device) -> None:
    pass


def _push_to_hub(
    trainer: Any,
    commit_message: str | None = "End of training",
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    **kwargs: Any,
) -> Any:
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    if trainer.hub_model_id is None:
        asked: dict[str, Any] = {"token": token, "private": private}
        # Older releases of transformers, and subclass methods written for them, do not accept `private`.
        trainer.init_hf_repo(**{name: value for name, value in asked.items() if name == "token" or value is not None})
    # The save is collective at stage 3 and with quantized communication; the following lines run on the main process only.
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    name = trainer.args.hub_model_id or str(Path(trainer.args.output_dir).absolute())
    kwargs.setdefault("model_name", name.rpartition("/")[2])
    if getattr(trainer.model, "model_tags", None) is not None:
        said = kwargs.get("tags") or []
        kwargs["tags"] = list(dict.fromkeys([*([said] if isinstance(said, str) else said), *trainer.model.model_tags]))
    trainer.create_model_card(**kwargs)
    trainer._finish_current_push()
    return extra("hub", "push_output")(
        trainer, message=commit_message, blocking=blocking, token=token, revision=revision
    )


def _write_card(
    trainer: Trainer,
    language: str | None = None,
    license: str | None = None,
    tags: str | list[str] | None = None,
    model_name: str | None = None,
    **said: Any,
) -> None:
    if trainer.is_world_process_zero():
        folder = Path(cast(str, trainer.args.output_dir))
        said |= {"language": language, "license": license, "tags": tags, "model_name": model_name}
        extra("hub", "write_trainer_card")(trainer, folder, facts_of=folder, **said)


def _push_checkpoint(trainer: Trainer, checkpoint_folder: str) -> None:
    if trainer.is_world_process_zero():
        extra("hub", "push_checkpoint")(trainer, Path(checkpoint_folder))


def _only_engine(trainer: Trainer) -> ZeroEngine | None:
    """Returns the engine of the Trainer's own model; a frozen teacher prepared in the same Accelerator has a separate one."""
    engine = _attached_to(trainer)
    return engine if engine in trainer.accelerator.zero_engines else None


def _attached_to(trainer: Trainer) -> ZeroEngine | None:
    """Returns the engine of the Trainer's model, even if a former Trainer built the engine."""
    # Between the trials of a search, a Trainer has no model.
    if trainer.model is None:
        return None
    return engine_attached_to(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))


def _is_split(model: nn.Module) -> bool:
    """Whether tensor or expert parallelism has split the model. An engine replaces its DTensors by plain parameters."""
    engine = engine_attached_to(model)
    return any(map(is_dtensor, model.parameters())) or (engine is not None and engine.state.is_split)


def _gather_to_sync(callback: Any) -> None:
    """Makes TRL's SyncRefModelCallback (`sync_ref_model=True`) gather whole parameters of both models. Collective."""
    sync = getattr(callback, "sync_target_model", None)
    # Not on a class, because all of its objects would gather, including other Trainers' objects.
    if sync is None or isinstance(callback, type):
        return

    # A partial instead of a nested function, because the callback is pickled with its Trainer.
    callback.sync_target_model = partial(_sync_whole, sync)


def _sync_whole(sync: Callable[..., None], model: nn.Module, target_model: nn.Module, alpha: float) -> None:
    with gathered(model), gathered(target_model, writeback=True):
        sync(model, target_model, alpha)


def _warn_of_early_outer_steps(trainer: Trainer) -> None:
    """Warns of saves between outer steps, and of evaluations while the groups' models differ."""
    every = trainer.accelerator.zero_config.comm.sync_every
    plans = {
        "save_steps": (trainer.args.save_strategy, trainer.args.save_steps, "a save runs the next outer step early"),
        "eval_steps": (trainer.args.eval_strategy, trainer.args.eval_steps, "each group evaluates its own model"),
    }
    for name, (strategy, steps, what) in plans.items():
        if strategy == IntervalStrategy.STEPS and steps >= 1 and steps % every:
            logger.warning(
                f"hf_zero: {name} is {steps:g}, not a multiple of comm.sync_every ({every}): {what}. Set {name} to a multiple of "
                f"{every}."
            )


def _warn_of_scaled_loss(trainer: Trainer) -> None:
    """Warns if stock Trainer multiplies a head's loss by world size and accumulation steps."""
    factor = trainer.args.world_size * trainer.args.gradient_accumulation_steps
    if factor == 1 or not trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None:
        return
    head = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if not ignores_num_items(head):
        return
    print(
        f"hf_zero: Trainer treats {type(head).__name__} as a model that normalizes its loss by num_items_in_batch, but it "
        f"does not: loss and gradient norm will be {factor} times too large (true without hf_zero as well). Set "
        "`trainer.model_accepts_loss_kwargs = False` before train() for the true mean.",
        file=sys.stderr,
    )
