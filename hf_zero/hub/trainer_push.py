"""Trainer's `push_to_hub` with an engine: in the background, and compared afterwards."""

import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard
from transformers import Trainer, logging
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress
from yaml import YAMLError

from ..checkpoint.faults import CheckpointError
from ..checkpoint.files import replace_file
from ..integrations.row_weights import has_row_weights
from ..integrations.run_facts import card_facts
from ..integrations.weights import consolidate
from .card import CARD_NAME, write_card
from .push import stage_checkpoint, stage_model
from .upload import WEIGHTS, Destination, HubError, make_repo, one_line, push_folder

logger = logging.get_logger(__name__)

_STAGED_PREFIX = ".tmp-checkpoint-push-"
"""Prefix of folders that a killed run leaves behind. The next resume deletes them together with unfinished saves."""


def make_trainer_repo(trainer: Trainer, token: str | None, make: Callable[[], None]) -> None:
    """Creates Trainer's repository by calling `make`. Raises `HubError` with a message of one line on failure."""
    args = trainer.args
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    make_repo(Destination(repo_id=name, token=token or args.hub_token), make)


def push_checkpoint(trainer: Trainer, checkpoint: Path) -> None:
    """Starts to push the model of a finished checkpoint, and also the checkpoint if `hub_strategy` says so. First rank only.

    As in Trainer, the push is skipped if the previous push is still running and `hub_always_push` is not set. A failed push is
    logged as an error, and training continues.
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
        # Only this rank pushes: an exception here would leave the other ranks waiting for this one.
        logger.error(f"hf_zero: {checkpoint} could not be prepared for the Hub ({error}). Training is not affected.")
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
            whole = _staged(trainer, lambda out: stage_checkpoint(checkpoint, out / path))
            staged.append((whole, _destination(trainer), f"{message}, checkpoint", (f"{path}/*",)))
        unless_started.pop_all()
    return [_started(trainer, *each) for each in staged]


def push_output(
    trainer: Trainer, *, message: str | None, blocking: bool, token: str | None, revision: str | None
) -> CommitInfo | Future:
    """Pushes the model saved in `output_dir`. First rank only.

    Raises:
        HubError: if `blocking`. Otherwise the future raises it, and it is logged.
    """
    output_dir = Path(trainer.args.output_dir)
    to = _destination(trainer, token=token, revision=revision)
    staged = _staged(trainer, lambda out: stage_model(output_dir, out))
    if blocking:
        return _push(staged, to, trainer_api(trainer), message, WEIGHTS)
    return _started(trainer, staged, to, message, WEIGHTS)


def write_trainer_card(trainer: Trainer, folder: Path, *, facts_of: Path, **said: Any) -> None:
    """Writes the card of a Trainer's model, with the arguments of `push_to_hub` and `create_model_card`.

    Args:
        said: language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args, under Trainer's
            names.
    """
    name = (
        said.get("model_name")
        or (trainer.hub_model_id or str(Path(trainer.args.output_dir).absolute())).rpartition("/")[2]
    )
    own_tags = [*_listed(said.get("tags")), *_listed(getattr(trainer.model, "model_tags", None))]
    metadata = {
        "language": said.get("language"),
        "license": said.get("license"),
        "tags": list(dict.fromkeys([*own_tags, "generated_from_trainer"])),
        "datasets": _listed(said.get("dataset_tags")) or None,
        "pipeline_tag": next(iter(_listed(said.get("tasks"))), None),
        "base_model": said.get("finetuned_from"),
    }
    metadata = {key: value for key, value in metadata.items() if value}
    facts = card_facts(facts_of, trainer.state.log_history)
    for entry, argument in (("dataset", "dataset"), ("dataset arguments", "dataset_args")):
        if said.get(argument):
            facts.data[entry] = ", ".join(map(str, _listed(said[argument])))
    if not write_card(folder, facts, name=name, metadata=metadata):
        _add_to_own_card(folder / CARD_NAME, metadata, said)


def _add_to_own_card(path: Path, metadata: dict[str, Any], said: Mapping[str, Any]) -> None:
    """Adds the arguments of a call to the front matter of the user's own card, and keeps the card's text.

    Raises:
        CheckpointError: the front matter cannot be read.
    """
    asked = [name for name, value in said.items() if value and name != "model_name"]
    if not asked:
        return
    try:
        card = ModelCard(path.read_text(encoding="utf-8"))
    except (ValueError, YAMLError) as error:
        raise CheckpointError(
            f"hf_zero: the front matter of {path} cannot be read ({one_line(error)}), so {asked[0]!r} cannot be written there. "
            "Correct it, or delete the file."
        ) from error
    metadata["tags"] = list(dict.fromkeys([*_listed(card.data.get("tags")), *metadata["tags"]]))
    for field_name, value in metadata.items():
        card.data[field_name] = value
    replace_file(path, str(card))
    left = [name for name in asked if name in ("dataset", "dataset_args")]
    if left:
        logger.warning(
            f"hf_zero: {path} is your own card, so hf_zero did not add {' and '.join(left)} to its text. Add it yourself, "
            "or delete the file to get a generated card."
        )


def trainer_api(trainer: Trainer) -> HfApi:
    """Returns a trainer's client. All pushes share one client, which runs background pushes one after the other."""
    if not hasattr(trainer, "_hf_zero_hub_api"):
        trainer._hf_zero_hub_api = HfApi(library_name="hf_zero")
    return trainer._hf_zero_hub_api


def _destination(trainer: Trainer, *, token: str | None = None, revision: str | None = None) -> Destination:
    args = trainer.args
    return Destination(
        repo_id=trainer.hub_model_id,
        revision=revision or args.hub_revision,
        private=args.hub_private_repo,
        token=token or args.hub_token,
    )


def _model_staged(trainer: Trainer, checkpoint: Path) -> tempfile.TemporaryDirectory:
    own_card = Path(trainer.args.output_dir, CARD_NAME)

    def fill(out: Path) -> None:
        if has_row_weights(checkpoint):
            consolidate(checkpoint, out)
        else:
            stage_model(checkpoint, out)
        if own_card.is_file():
            replace_file(out / CARD_NAME, own_card.read_bytes())
        write_trainer_card(trainer, out, facts_of=checkpoint)

    return _staged(trainer, fill)


def _staged(trainer: Trainer, fill: Callable[[Path], None]) -> tempfile.TemporaryDirectory:
    """Fills a folder now, because a rotation or the next save may delete or change the files during the push."""
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
        logger.error(f"hf_zero: a push to the Hub failed with {type(error).__name__}. Training is not affected.")


def _listed(value: Iterable[str] | str | None) -> list[str]:
    if not value:
        return []
    return [value] if isinstance(value, str) else list(value)
