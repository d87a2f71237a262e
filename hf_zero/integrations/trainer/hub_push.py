"""Trainer's `push_to_hub` with an engine: the model as it is in the checkpoint, in the background, compared afterwards."""

import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from transformers import Trainer, logging
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress

from ...checkpoint.format.manifest import CheckpointError
from ..checkpoints.row_weights import has_row_weights
from ..checkpoints.weights import consolidate
from ..hub.card import CARD_NAME, write_card
from ..hub.card_facts import card_facts
from ..hub.hub import EVERYTHING, WEIGHTS, Destination, HubError, make_repo, push_folder
from ..hub.push import stage_checkpoint, stage_model

logger = logging.get_logger(__name__)

_STAGED_PREFIX = ".tmp-checkpoint-push-"
"""Of folders that a killed run leaves; with the leftovers of saves, the next resume clears them away."""


def make_trainer_repo(trainer: Trainer, token: str | None, make: Callable[[], None]) -> None:
    """Has Trainer make its repository by `make`. Raises `HubError` in one line where it cannot."""
    args = trainer.args
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    make_repo(Destination(repo_id=name, token=token or args.hub_token), make)


def push_checkpoint(trainer: Trainer, checkpoint: Path) -> None:
    """Starts to push a finished checkpoint's model, and by `hub_strategy` the checkpoint too. On the first rank only.

    As Trainer does, it passes when the push before is not done and `hub_always_push` is not set. A push that fails is an
    error in the log, and training goes on.
    """
    args, running = trainer.args, trainer.push_in_progress
    if args.hub_strategy == HubStrategy.END or (
        running is not None and not running.is_done() and not args.hub_always_push
    ):
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    step = args.save_strategy == SaveStrategy.STEPS
    reached = f"step {trainer.state.global_step}" if step else f"epoch {int(trainer.state.epoch)}"
    try:
        jobs = _start_jobs(trainer, checkpoint, f"Training in progress, {reached}")
    except (OSError, CheckpointError) as error:
        # This rank alone pushes: an exception here would leave the others waiting for it.
        logger.error(f"hf_zero: {checkpoint} could not be made ready for the Hub ({error}). Training is not affected.")
        return
    if running is None or running.is_done():
        trainer.push_in_progress = PushInProgress(jobs)
    else:
        running.jobs.extend(jobs)


def _start_jobs(trainer: Trainer, checkpoint: Path, message: str) -> list[Future]:
    strategy = trainer.args.hub_strategy
    with ExitStack() as unless_started:
        model = _model_staged(trainer, checkpoint)
        unless_started.callback(model.cleanup)
        staged: list[tuple[tempfile.TemporaryDirectory, Destination, str, tuple[str, ...]]] = []
        staged.append((model, _destination(trainer), message, WEIGHTS))
        if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            path = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else checkpoint.name
            whole = _staged(trainer, lambda out: stage_checkpoint(checkpoint, out))
            staged.append((whole, _destination(trainer, path_in_repo=path), f"{message}, checkpoint", EVERYTHING))
        unless_started.pop_all()
    return [_started(trainer, *each) for each in staged]


def push_output(
    trainer: Trainer, *, message: str | None, blocking: bool, token: str | None, revision: str | None
) -> CommitInfo | Future:
    """Pushes the model that was saved to `output_dir`. On the first rank only.

    Raises:
        HubError: when `blocking`; otherwise the future has it, and the log.
    """
    output_dir = Path(trainer.args.output_dir)
    trainer._finish_current_push()
    to = _destination(trainer, token=token, revision=revision)
    staged = _staged(trainer, lambda out: stage_model(output_dir, out))
    if blocking:
        return _push(staged, to, trainer_api(trainer), message, WEIGHTS)
    return _started(trainer, staged, to, message, WEIGHTS)


def write_trainer_card(trainer: Trainer, folder: Path, *, facts_of: Path, **said: Any) -> None:
    """The card of a Trainer's model, with what `push_to_hub` and `create_model_card` were told.

    Args:
        said: language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, as Trainer names them.
    """
    name = (
        said.get("model_name")
        or (trainer.hub_model_id or str(Path(trainer.args.output_dir).absolute())).rpartition("/")[2]
    )
    tags = [*_listed(said.get("tags")), *_listed(getattr(trainer.model, "model_tags", None)), "generated_from_trainer"]
    metadata = {
        "language": said.get("language"),
        "license": said.get("license"),
        "tags": list(dict.fromkeys(tags)),
        "datasets": _listed(said.get("dataset_tags")) or None,
        "pipeline_tag": next(iter(_listed(said.get("tasks"))), None),
        "base_model": said.get("finetuned_from"),
    }
    facts = card_facts(facts_of, trainer.state.log_history)
    if said.get("dataset"):
        facts.data["dataset"] = ", ".join(_listed(said["dataset"]))
    write_card(folder, facts, name=name, metadata={key: value for key, value in metadata.items() if value})


def trainer_api(trainer: Trainer) -> HfApi:
    """One client for all of a trainer's pushes, so that those in the background go one after the other."""
    if not hasattr(trainer, "_hf_zero_hub_api"):
        trainer._hf_zero_hub_api = HfApi(library_name="hf_zero")
    return trainer._hf_zero_hub_api


def _destination(
    trainer: Trainer, *, token: str | None = None, revision: str | None = None, path_in_repo: str = ""
) -> Destination:
    args = trainer.args
    return Destination(
        repo_id=trainer.hub_model_id,
        revision=revision or args.hub_revision,
        private=args.hub_private_repo,
        token=token or args.hub_token,
        path_in_repo=path_in_repo,
    )


def _model_staged(trainer: Trainer, checkpoint: Path) -> tempfile.TemporaryDirectory:
    own_card = Path(trainer.args.output_dir, CARD_NAME)

    def fill(out: Path) -> None:
        if has_row_weights(checkpoint):
            consolidate(checkpoint, out)
        else:
            stage_model(checkpoint, out)
        if own_card.is_file():
            (out / CARD_NAME).write_bytes(own_card.read_bytes())
        write_trainer_card(trainer, out, facts_of=checkpoint)

    return _staged(trainer, fill)


def _staged(trainer: Trainer, fill: Callable[[Path], None]) -> tempfile.TemporaryDirectory:
    """A folder filled now, since a rotation or the next save may take or change its files while they are pushed."""
    folder = tempfile.TemporaryDirectory(prefix=_STAGED_PREFIX, dir=trainer.args.output_dir)
    try:
        fill(Path(folder.name))
    except BaseException:
        folder.cleanup()
        raise
    return folder


def _started(
    trainer: Trainer,
    staged: tempfile.TemporaryDirectory,
    to: Destination,
    message: str | None,
    mirrored: tuple[str, ...],
) -> Future:
    api = trainer_api(trainer)
    job = api.run_as_future(_push, staged, to, api, message, mirrored)
    job.add_done_callback(_tell_failure)
    return job


def _push(
    staged: tempfile.TemporaryDirectory, to: Destination, api: HfApi, message: str | None, mirrored: tuple[str, ...]
) -> CommitInfo:
    with staged as folder:
        return push_folder(Path(folder), to, api=api, message=message, mirrored=mirrored)


def _tell_failure(job: Future) -> None:
    error = None if job.cancelled() else job.exception()
    if isinstance(error, HubError):
        logger.error(f"{error} Training is not affected.")
    elif error is not None:
        logger.error(f"hf_zero: a push to the Hub ended with {type(error).__name__}. Training is not affected.")


def _listed(value: Iterable[str] | str | None) -> list[str]:
    if not value:
        return []
    return [value] if isinstance(value, str) else list(value)
