"""Trainer's checkpoints, each there whole or not at all, and resuming from the newest good one."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer, logging
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoint.commit import abandon, begin, clear_leftovers, commit, discard
from ..checkpoint.manifest import CheckpointError
from ..checkpoint.together import together
from ..checkpoint.verify import Candidate, checkpoint_faults, find_good, newest_first
from ..engine.engine import ZeroEngine
from .checkpointing import ZERO_FOLDER, seal_state, state_bytes, write_state

logger = logging.get_logger(__name__)

LAST_GOOD = "last-good"


def save_checkpoint(trainer: Trainer, engine: ZeroEngine, trial: object) -> None:
    """What Trainer writes at a save step, under a temporary name until all of it is on the disk. Collective.

    Raises:
        CheckpointError: on every rank, when one could not write. Former checkpoints and training state are unharmed;
            with `checkpoint.on_failure: continue` it is a warning and training goes on.
    """
    run_folder = Path(trainer._get_output_dir(trial=trial))
    final = run_folder / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    if trainer.hp_search_backend is None and trial is None:
        trainer.store_flos()
    former_best = trainer.state.best_model_checkpoint
    try:
        _write(trainer, engine, run_folder, final)
    except CheckpointError as error:
        trainer.state.best_model_checkpoint = former_best
        if engine.config.checkpoint.on_failure == "stop":
            raise
        logger.warning(f"{error} Training goes on, as `checkpoint.on_failure: continue` says.")
        return
    if trainer.args.push_to_hub:
        trainer._push_from_checkpoint(str(final))
    if trainer.args.should_save:
        _rotate(run_folder, final, limit=trainer.args.save_total_limit, best=trainer.state.best_model_checkpoint)


def _rotate(run_folder: Path, latest: Path, *, limit: int | None, best: str | None) -> None:
    """Trainer's `save_total_limit`: the oldest go. `latest` stays, whatever stands beside it, and so does the best."""
    if not limit or limit < 0:
        return
    kept = {latest} if best is None else {latest, Path(best)}
    found = list(newest_first(run_folder))
    # By age, since one of a higher number may be what a resume has passed over; numbers where the times are equal.
    others = sorted((path for path in reversed(found) if path not in kept), key=lambda path: path.stat().st_mtime_ns)
    surplus = len(found) - max(limit, len(kept))
    for path in others[: max(surplus, 0)]:
        try:
            discard(path)
        except OSError as error:
            logger.warning(f"hf_zero: {path} is above save_total_limit and could not be taken away: {error}")


def _write(trainer: Trainer, engine: ZeroEngine, run_folder: Path, final: Path) -> None:
    exchange, rank = engine.transport.exchange, engine.groups.rank
    then = "The former checkpoints are as they were, and training state is unharmed."
    temporary = begin(final, needed_bytes=state_bytes(engine), rank=rank, exchange=exchange)
    try:
        together(
            exchange,
            lambda: trainer.save_model(str(temporary), _internal_call=True),
            doing=f"write the model to {temporary}",
            then=then,
        )
        manifest = write_state(engine, temporary / ZERO_FOLDER, with_state=not trainer.args.save_only_model)
        _note_best(trainer, run_folder, final)
        together(
            exchange,
            lambda: _write_the_rest(trainer, temporary),
            doing=f"write trainer state to {temporary}",
            then=then,
        )
        seal_state(engine, temporary, manifest)
        commit(temporary, final, rank=rank, exchange=exchange)
    except CheckpointError:
        abandon(temporary, rank=rank)
        raise


def _note_best(trainer: Trainer, run_folder: Path, final: Path) -> None:
    if trainer.state.best_global_step:
        best = run_folder / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.best_global_step}"
        if best == final or best.exists():
            trainer.state.best_model_checkpoint = str(best)


def _write_the_rest(trainer: Trainer, folder: Path) -> None:
    """Scheduler, scaler, random states and trainer state, as Trainer itself writes them."""
    if not trainer.args.save_only_model:
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
        trainer._save_scaler(str(folder))
        trainer._save_rng_state(str(folder))
    if trainer.args.should_save:
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                held = trainer.state.stateful_callbacks
                name = type(callback).__name__
                if isinstance(held[name], list):
                    held[name].append(callback.state())
                else:
                    held[name] = callback.state()
        trainer.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))


def checkpoint_to_resume(trainer: Trainer, asked: str | bool | None) -> str | None:
    """The folder to resume from: the one asked for, or for True and "last-good" the newest good one. Collective.

    Raises:
        ValueError: the folder asked for has faults; or for True, there is no good one. Lists each with its faults.
    """
    if asked is None or asked is False:
        return None
    output_dir = Path(trainer.args.output_dir)
    rank, world_size = trainer.args.process_index, trainer.args.world_size
    if asked is not True and asked != LAST_GOOD:
        mine = checkpoint_faults(Path(asked), ZERO_FOLDER, rank=rank, world_size=world_size)
        faults = dict.fromkeys(fault for theirs in exchange_between_ranks(mine) for fault in theirs)
        if faults:
            there = sorted(path.name for path in output_dir.glob("checkpoint-*"))
            raise ValueError(
                f"hf_zero: cannot resume from {str(asked)!r}: {'; '.join(faults)}. Checkpoints in {str(output_dir)!r}: "
                f"{', '.join(there) or 'none'}. Pass one of those, or resume_from_checkpoint={LAST_GOOD!r} for the newest good "
                "one."
            )
        return str(asked)
    together(
        exchange_between_ranks,
        lambda: clear_leftovers(output_dir) if rank == 0 else None,
        doing=f"clear {output_dir} of what killed runs left",
        then="Nothing was trained; make the folder writable.",
    )
    found, passed = find_good(
        output_dir, ZERO_FOLDER, rank=rank, world_size=world_size, exchange=exchange_between_ranks
    )
    said = _in_words(passed)
    if found is None and asked is True:
        raise ValueError(f"No valid checkpoint found in output directory ({output_dir}){': ' if said else ''}{said}")
    if rank == 0 and found is None:
        logger.warning(f"hf_zero: no good checkpoint in {output_dir} ({said or 'it holds none'}); starting afresh.")
    elif rank == 0 and passed:
        logger.warning(f"hf_zero: resuming from {found}. Passed over: {said}")
    return None if found is None else str(found)


def _in_words(passed: list[Candidate]) -> str:
    return "; ".join(f"{candidate.path.name}: {', '.join(candidate.faults[:3])}" for candidate in passed)


def exchange_between_ranks(value: object) -> list:
    """Every rank's picklable value in rank order, before there is an engine."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
