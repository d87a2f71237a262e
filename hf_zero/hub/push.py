"""Pushes models and checkpoints to the Hub with a model card, also while training goes on."""

import fnmatch
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import CommitInfo, HfApi, ModelCard, ModelCardData, get_token, metadata_load
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers import Trainer, logging
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress
from yaml import YAMLError

from ..checkpoint.files import CheckpointError, Progress, no_folder, refuse_links, replace_file, shown, untold
from ..checkpoint.manifest import Manifest
from ..checkpoint.structure import weight_shards_of
from ..config.checks import SpeltError
from ..integrations.drawing import INK, add_legend, new_axes, write_png
from ..integrations.run_facts import CardFacts, card_facts, is_hub_name
from ..integrations.saved_weights import has_row_weights, is_checkpoint_of_ours
from ..integrations.state_io import ZERO_FOLDER
from ..integrations.weights import consolidate, folder_findings, is_of_the_run


class HubError(SpeltError, RuntimeError):
    """A push has failed: names the repository, the fault and the remedy. Never carries a token."""


# ---- A model card of a training run: README.md, and the losses as a picture beside it ----

CARD_NAME = "README.md"
PLOT_NAME = "loss.png"
TEMPLATE = Path(__file__).with_name("card_template.md")

OURS = "<!-- Made by hf_zero from the files of the run. A later push makes it anew unless this line is gone. -->"

_SECTIONS = (
    ("model", "Model"),
    ("data", "Data"),
    ("metrics", "Metrics"),
    ("hyperparameters", "Hyper-parameters"),
    ("zero", "ZeRO set-up"),
    ("hardware", "Hardware"),
    ("measured", "Measured"),
    ("versions", "Versions"),
)
_LOSSES_SHOWN = 10
_LONGEST_CELL = 1000
_LARGEST_CARD = 2**24
"""Characters; of a longer file the beginning tells."""


def write_card(folder: Path, facts: CardFacts, *, name: str, metadata: Mapping[str, Any] | None = None) -> bool:
    """Writes the card to a folder, unless the folder has a foreign one. Returns whether it was written.

    The draft that peft writes next to adapters is replaced, and peft's fields of the front matter stay.

    Without matplotlib, which the extra `hf-zero[card]` brings, there is no picture, and the card says so.

    Args:
        name: the card's heading.
        metadata: further fields of the card's front matter, such as language, license, tags, datasets, base_model.
    """
    path = folder / CARD_NAME
    refuse_links(folder, [path, folder / PLOT_NAME])
    for written in (path, folder / PLOT_NAME):
        if written.exists() and not written.is_file():
            raise CheckpointError(
                f"hf_zero: {written} is no plain file, so no card can be written there. Take it away."
            )
    metadata = dict(metadata or {})
    if path.is_file():
        if not is_our_card(path) and not _is_draft_of_peft(path):
            return False
        of_peft = _fields_of_peft(path)
        metadata = {**of_peft, **metadata, "tags": [*metadata.get("tags", ()), *of_peft.get("tags", ())]}
    drawn = bool(facts.losses) and find_spec("matplotlib") is not None and _draw(facts, folder / PLOT_NAME)
    replace_file(path, render(facts, name=name, metadata=metadata, drawn=drawn))
    return True


def is_our_card(path: Path) -> bool:
    """Whether a README.md is such a card, with its mark still in the text."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return OURS in file.read(_LARGEST_CARD)


def _is_draft_of_peft(path: Path) -> bool:
    """Whether a README.md is the template that peft writes, into which nobody has written."""
    front, _, text = path.read_text(encoding="utf-8", errors="replace")[:_LARGEST_CARD].lstrip().partition("\n---\n")
    template = ModelCard.from_template(ModelCardData()).text.strip()
    if not re.search(r"^library_name: peft$", front, re.MULTILINE) or not text.strip().startswith(template):
        return False
    added = text.strip().removeprefix(template).splitlines()
    return all(not line or line.startswith(("#", "- ", "The following `bitsandbytes`")) for line in added)


def _fields_of_peft(path: Path) -> dict[str, Any]:
    """Returns the fields that peft has put into a card's front matter. A path on this machine is none of them."""
    try:
        fields = metadata_load(path) or {}
    except (ValueError, YAMLError):
        # Of a generated card that somebody has edited: the new one has good front matter.
        return {}
    if fields.get("library_name") != "peft":
        return {}
    base_model = fields.get("base_model")
    kept = {name: fields[name] for name in ("library_name", "pipeline_tag") if fields.get(name)}
    if is_hub_name(base_model):
        kept["base_model"] = base_model
    tags = [str(tag) for tag in fields.get("tags") or ()]
    of_base = "base_model:"
    kept["tags"] = [tag for tag in tags if not tag.startswith(of_base) or is_hub_name(tag.rpartition(":")[2])]
    return kept


def render(facts: CardFacts, *, name: str, metadata: Mapping[str, Any], drawn: bool) -> str:
    """The card's text.

    Args:
        drawn: whether the picture of the losses lies beside it.
    """
    fields = {"library_name": "transformers", "base_model": facts.base_model, **metadata}
    fields["tags"] = list(dict.fromkeys([*(fields.get("tags") or ()), "hf-zero"]))
    card = ModelCard.from_template(
        ModelCardData(**fields),
        template_path=str(TEMPLATE),
        ours=OURS,
        title=_cell(name),
        parent=fields["base_model"] and _cell(fields["base_model"]),
        dataset=_cell(facts.data["dataset"]) if facts.data.get("dataset") else None,
        sections=[(title, _rows(getattr(facts, field))) for field, title in _SECTIONS],
        losses=_thinned(facts.losses),
        plot=PLOT_NAME if drawn else None,
    )
    return str(card).rstrip() + "\n"


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(_cell(name), _cell(value)) for name, value in values.items() if value is not None and value != ""]


# Letters and digits; underscores and periods only where no renderer takes them for emphasis or a web address.
_PLAIN = re.compile(r"(?:[^\W_]|(?<=[^\W_])_(?=[^\W_])|(?<=\d)\.(?=\d)|[ ,()%-]|\+(?!\+))*")
_OUTSIDE_CODE = re.compile(r"( *[|`][|` ]*)")


def _cell(value: object) -> str:
    """Shows a value in one line that no renderer takes for markup, and no terminal for a command."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = shown(" ".join(str(value).split()), _LONGEST_CELL)
    if _PLAIN.fullmatch(text):
        return text
    # Nothing in a code span is markup or a link. Escapes are not enough: some renderers look for addresses after they have
    # replaced escapes. Only a backtick would end the code, and only a pipe the cell.
    inside, outside = _OUTSIDE_CODE.split(text)[::2], _OUTSIDE_CODE.findall(text)
    codes = [f"`{part}`" if part else "" for part in inside]
    entities = [part.replace("|", "&#124;").replace("`", "&#96;") for part in outside]
    return "".join(code + entity for code, entity in zip(codes, [*entities, ""]))


def _thinned(losses: tuple[tuple[int, float], ...]) -> list[tuple[int, str]]:
    """At most ten of them, the first and the last among them."""
    if len(losses) > _LOSSES_SHOWN:
        last = len(losses) - 1
        losses = tuple(losses[round(n * last / (_LOSSES_SHOWN - 1))] for n in range(_LOSSES_SHOWN))
    return [(step, f"{loss:.4f}" if abs(loss) < 1e6 else _cell(loss)) for step, loss in losses]


def _draw(facts: CardFacts, path: Path) -> bool:
    """Returns whether a picture was written."""
    try:
        figure, axes = new_axes(7, 4)
    except ValueError as error:
        why = str(error).partition(";")[0]
        # A notebook's MPLBACKEND reaches commands in other environments, where that backend is missing.
        logger.warning(
            f"hf_zero: the card has no picture, since matplotlib refuses MPLBACKEND ({why}). Unset MPLBACKEND."
        )
        return False
    # A line through one point is invisible, so each point of a short curve gets a dot.
    axes.plot(*zip(*facts.losses), marker="o" if len(facts.losses) < _LOSSES_SHOWN else None, label="training")
    if facts.eval_losses:
        axes.plot(*zip(*facts.eval_losses), marker="o", label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3, color=INK)
    add_legend(axes)
    write_png(figure, path, dpi=100)
    return True


# ---- Model folders to the Hugging Face Hub: uploaded, and compared with the local files afterwards ----

Answer = TypeVar("Answer")

WAITS_S = (1.0, 2.0, 4.0)
"""Between attempts at a call that failed for a reason that may pass."""

WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")
"""Files that from_pretrained would read beside or in place of new ones, so that older ones must not outlive a push."""

_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
_TOKEN = re.compile(r"\b(hf|api)_[A-Za-z0-9_]{16,}")


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The target of a push.

    Attributes:
        repo_id: such as "me/my-model"; "my-model" is one of the account that the token belongs to.
        revision: a branch, made when it is not there; None is main.
        private: of a repository that is new; None is the account's default.
        token: None is the one of `hf auth login` or HF_TOKEN.
    """

    repo_id: str
    revision: str | None = None
    private: bool | None = None
    token: str | None = field(default=None, repr=False)


def push_folder(
    folder: Path, to: Destination, *, api: HfApi, message: str | None, mirrored: tuple[str, ...] = WEIGHTS
) -> CommitInfo:
    """Uploads all files of a folder as a commit, compares them with the Hub's copy, and returns the commit.

    Files that the Hub has already, such as those of a push that was cut off, do not travel again. A call that fails for a
    reason that may pass is tried again. A generated card never replaces one that somebody wrote in the repository.

    Args:
        mirrored: patterns of files that go from the repository when the folder has none of that name. Patterns of weights
            count only for a folder that has weights.

    Raises:
        HubError: nothing could be uploaded, or what the Hub has differs.
    """
    # Before any call: a wrong name or a missing token costs no upload.
    token = checked_token(to)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if mirrored == WEIGHTS and not _matching(files, WEIGHTS):
        mirrored = ()
    with _told_plainly(to, token, "this push has committed nothing to"):
        if "/" not in to.repo_id:
            # The Hub's client makes a repository without an owner's name too, and finds it under its whole name only.
            owner = _patiently(lambda: api.whoami(token=token))["name"]
            to = replace(to, repo_id=f"{owner}/{to.repo_id}")
        _patiently(lambda: api.create_repo(to.repo_id, token=token, private=to.private, exist_ok=True))
        branch = to.revision
        if branch is not None and not branch.startswith("refs/"):
            _patiently(lambda: api.create_branch(to.repo_id, branch=branch, token=token, exist_ok=True))
        if _somebodys_card_is_there(to, files, api, token):
            files = {name: path for name, path in files.items() if name not in (CARD_NAME, PLOT_NAME)}
        commit = _patiently(
            lambda: api.upload_folder(
                repo_id=to.repo_id,
                folder_path=folder,
                commit_message=message,
                token=token,
                revision=to.revision,
                ignore_patterns=[name for name in (CARD_NAME, PLOT_NAME) if name not in files],
                delete_patterns=list(mirrored) or None,
            )
        )
    with _told_plainly(
        to, token, f"the files are committed ({commit.oid[:10]}) and could not be compared with those of"
    ):
        # Compared at the commit, not at the branch: another push may have come in between.
        faults = _patiently(lambda: _remote_faults(folder, files, to, mirrored, api, token, commit.oid))
    if faults:
        raise HubError(
            f"hf_zero: {to.repo_id} at {commit.oid[:10]} is not what was pushed: {'; '.join(faults[:5])}. Push again; if it "
            "stays so, the files do not arrive as they were sent."
        )
    return commit


@contextmanager
def _told_plainly(to: Destination, token: str, where: str) -> Iterator[None]:
    """Replaces the library's errors, which carry requests and a server's text, by plain ones without secrets."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise HubError(_without_tokens(f"hf_zero: {where} {to.repo_id}: {_reason(error)}.", token)) from None


def make_repo(to: Destination, make: Callable[[], Answer]) -> Answer:
    """Returns `make`'s repository, made by the Hub's client, with repeats if they may help.

    Raises:
        HubError: it could not be made.
    """
    with _told_plainly(to, checked_token(to), "there is no place for pushes in"):
        return _patiently(make)


def checked_token(to: Destination) -> str:
    """Returns the token. Raises `HubError` for faults that show without asking the Hub."""
    try:
        validate_repo_id(to.repo_id)
    except HFValidationError as error:
        raise HubError(
            f"hf_zero: {_without_tokens(repr(to.repo_id), to.token)} is no repository's name "
            f"({_without_tokens(_one_line(error), to.token)}). Give one such as me/my-model."
        ) from None
    token = to.token or get_token()
    if token is None:
        raise HubError(
            f"hf_zero: no token to write to {to.repo_id} with. Say `hf auth login`, or set HF_TOKEN to a token that may write."
        )
    return token


def _patiently(call: Callable[[], Answer]) -> Answer:
    for wait_s in WAITS_S:
        try:
            return call()
        except (HTTPError, LocalEntryNotFoundError, json.JSONDecodeError) as error:
            if not _may_pass(error):
                raise
        time.sleep(wait_s)
    return call()


def _may_pass(error: Exception) -> bool:
    """A connection that broke, a server that is busy, or an error page where JSON was due; not a refusal."""
    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code in _PASSING_STATUS
    return True


def _somebodys_card_is_there(to: Destination, files: dict[str, Path], api: HfApi, token: str) -> bool:
    if CARD_NAME not in files or not is_our_card(files[CARD_NAME]):
        return False
    with tempfile.TemporaryDirectory() as folder:
        try:
            there = _patiently(
                lambda: api.hf_hub_download(to.repo_id, CARD_NAME, revision=to.revision, local_dir=folder, token=token)
            )
        except (RemoteEntryNotFoundError, RevisionNotFoundError):
            return False
        return not is_our_card(Path(there))


def _remote_faults(
    folder: Path,
    sent: Collection[str],
    to: Destination,
    mirrored: tuple[str, ...],
    api: HfApi,
    token: str,
    revision: str,
) -> list[str]:
    """Lists in words the differences between a commit's files and those that were sent of a folder."""
    found = api.verify_repo_checksums(to.repo_id, revision=revision, local_dir=folder, token=token)
    left = [name for name in _matching(found.missing_paths, mirrored) if name not in sent]
    return [
        *(f"{name} is missing" for name in found.extra_paths if name in sent),
        *(f"{each['path']} has another {each['algorithm']} there" for each in found.mismatches if each["path"] in sent),
        *(f"{name} is there and was not pushed" for name in left),
    ]


def _matching(names: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to push"
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return "the Hub does not accept the token; say `hf auth login` again, or set HF_TOKEN"
    if status in (401, 403, 404):
        said = getattr(error, "server_message", None) or error
        return f"the Hub refuses ({status}: {_one_line(said)}); check the name, and that the token may write there"
    cause = f" ({_one_line(error.__cause__)})" if error.__cause__ is not None else ""
    return f"{_one_line(error) or type(error).__name__}{cause}. Push again: files that arrived do not travel again"


def _one_line(said: object) -> str:
    return " ".join(str(said).split())[:400].rstrip(".")


def _without_tokens(text: str, token: str | None) -> str:
    if token:
        text = text.replace(token, "<token>")
    return _TOKEN.sub("<token>", text)


# ---- The upload to the Hub: the model, whole and checked, with a card, and nothing else of the run ----


def push_model(
    source: Path,
    to: Destination,
    *,
    api: HfApi,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    on_check: Progress = untold,
    on_progress: Progress = untold,
) -> CommitInfo:
    """Pushes the model of a checkpoint, or a model folder.

    The weights of a checkpoint are written anew, as `consolidate` does, and so are a model folder's where `dtype` is given;
    otherwise a folder's files go as they are. All of it is checked before a byte is sent. The folder's own README.md is the
    card, where it has one.

    Args:
        on_check, on_progress: called with bytes checked, and bytes of weights written, and bytes in all.

    Raises:
        CheckpointError: there is no model, or it has faults; nothing was sent then.
        HubError: it did not arrive.
    """
    if not source.is_dir():
        raise CheckpointError(f"hf_zero: {no_folder(source)}.")
    checked_token(to)
    # Before a byte is sent: the Hub would keep a damaged model under a good name.
    refuse_faults(source, on_progress=on_check)
    with staging_folder(source.resolve().parent) as staged:
        of_a_run = is_checkpoint_of_ours(source) or (source / "trainer_state.json").is_file()
        of_a_run |= bool(weight_shards_of(source))
        if (of_a_run or dtype is not None) and not (source / "adapter_config.json").is_file():
            consolidate(source, staged, dtype=dtype, max_shard_bytes=max_shard_bytes, on_progress=on_progress)
        else:
            stage_model(source, staged)
        # The staged copy too: it was written or linked since the first check.
        refuse_faults(staged, of=source)
        if not (staged / "README.md").is_file():
            write_card(staged, card_facts(source), name=to.repo_id.rpartition("/")[2])
        return push_folder(staged, to, api=api, message="Upload model with hf_zero")


def refuse_faults(folder: Path, *, of: Path | None = None, on_progress: Progress = untold) -> None:
    """Raises `CheckpointError` unless the folder holds a good checkpoint or model. `of` names the folder's source."""
    found = folder_findings(folder, on_progress)
    if found.faults:
        raise CheckpointError(
            f"hf_zero: {of or folder} is not good, and nothing was pushed: {'; '.join(found.faults[:3])}."
        )
    if found.edits:
        raise CheckpointError(
            f"hf_zero: {of or folder} was edited after its save, and nothing was pushed: {'; '.join(found.edits[:3])}. If the "
            f"edits are yours, run `hf-zero verify --accept {of or folder}` and push again."
        )


def stage_model(source: Path, out: Path) -> None:
    """Puts the model's files of a checkpoint or an output folder into `out`, without files of the run and other checkpoints."""
    for path in sorted(source.rglob("*")):
        parts = path.relative_to(source).parts
        hidden = any(part.startswith(".") for part in parts)
        of_the_run = parts[0] == ZERO_FOLDER or parts[0].startswith(("checkpoint-", "_")) or is_of_the_run(path.name)
        if path.is_file() and not hidden and not of_the_run:
            refuse_links(source, [path])
            _place(path, out.joinpath(*parts))


def stage_checkpoint(checkpoint: Path, out: Path) -> None:
    """Copies an hf_zero checkpoint into `out` for a resume, without the pickled training arguments.

    Those may hold `hub_token`, and resuming does not read them; the manifest is written anew without them.
    """
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != TRAINING_ARGS_NAME:
            refuse_links(checkpoint, [path])
            _place(path, out / path.relative_to(checkpoint))
    manifest = Manifest.read(checkpoint / ZERO_FOLDER)
    files = {name: record for name, record in manifest.files.items() if Path(name).name != TRAINING_ARGS_NAME}
    manifest.with_files(files).write(out / ZERO_FOLDER)


def _place(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        try:
            # Linked, not copied: weights of a checkpoint never change once they are written.
            os.link(path.resolve(), target)
            return
        except OSError:
            # A file system without links, or a folder on another one.
            target.unlink(missing_ok=True)
    shutil.copy2(path, target)


@contextmanager
def staging_folder(beside: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, on the disk of `beside` where that can be written to."""
    parent = beside if os.access(beside, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".tmp-push-", dir=parent) as folder:
        yield Path(folder)


# ---- Trainer's `push_to_hub` with an engine: in the background, and compared afterwards ----

logger = logging.get_logger(__name__)

_STAGED_PREFIX = ".tmp-checkpoint-push-"
"""Of folders that a killed run leaves; with the leftovers of saves, the next resume clears them away."""


def make_trainer_repo(trainer: Trainer, token: str | None, make: Callable[[], None]) -> None:
    """Makes Trainer's repository by `make`. Raises `HubError` in one line on failure."""
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
            whole = _staged(trainer, lambda out: stage_checkpoint(checkpoint, out / path))
            staged.append((whole, _destination(trainer), f"{message}, checkpoint", (f"{path}/*",)))
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
    to = _destination(trainer, token=token, revision=revision)
    staged = _staged(trainer, lambda out: stage_model(output_dir, out))
    if blocking:
        return _push(staged, to, trainer_api(trainer), message, WEIGHTS)
    return _started(trainer, staged, to, message, WEIGHTS)


def write_trainer_card(trainer: Trainer, folder: Path, *, facts_of: Path, **said: Any) -> None:
    """Writes the card of a Trainer's model, with the arguments of `push_to_hub` and `create_model_card`.

    Args:
        said: language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args, as Trainer names
            them.
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
    """Adds the arguments of a call to the front matter of somebody's own card, whose text stays.

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
            f"hf_zero: the front matter of {path} cannot be read ({_one_line(error)}), so {asked[0]!r} cannot be written there. "
            "Correct it, or take the file away."
        ) from error
    metadata["tags"] = list(dict.fromkeys([*_listed(card.data.get("tags")), *metadata["tags"]]))
    for field_name, value in metadata.items():
        card.data[field_name] = value
    replace_file(path, str(card))
    left = [name for name in asked if name in ("dataset", "dataset_args")]
    if left:
        logger.warning(
            f"hf_zero: {path} is your own card, so its text stays without {' and '.join(left)}. Write it there, or take the file "
            "away for a generated card."
        )


def trainer_api(trainer: Trainer) -> HfApi:
    """One client for all of a trainer's pushes, so that those in the background go one after the other."""
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
