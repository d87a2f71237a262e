"""Uploads a model folder to the Hugging Face Hub, and compares the Hub's copy with the local files."""

import fnmatch
import json
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitInfo, HfApi, get_token
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

from ..config.checks import SpelledError
from .card import CARD_NAME, PLOT_NAME, is_our_card


class HubError(SpelledError, RuntimeError):
    """A push failed. The message names the repository, the fault and the remedy, and never contains a token."""


Answer = TypeVar("Answer")

WAITS_S = (1.0, 2.0, 4.0)
"""Pauses between attempts at a call, if the call failed for a reason that may pass."""

WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")
"""Weights that from_pretrained would read together with new ones, or instead of them, so a push deletes older ones."""

_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
_TOKEN = re.compile(r"\b(hf|api)_[A-Za-z0-9_]{16,}")


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The target of a push.

    Attributes:
        repo_id: such as "me/my-model". "my-model" belongs to the account of the token.
        revision: a branch, created if it does not exist; None means main.
        private: whether a new repository is private; None means the account's default.
        token: None means the token of `hf auth login` or HF_TOKEN.
    """

    repo_id: str
    revision: str | None = None
    private: bool | None = None
    token: str | None = field(default=None, repr=False)


def push_folder(
    folder: Path, to: Destination, *, api: HfApi, message: str | None, mirrored: tuple[str, ...] = WEIGHTS
) -> CommitInfo:
    """Uploads all files of a folder as a commit, compares them with the Hub's copy, and returns the commit.

    Files that the Hub already has, for example from an interrupted push, are not sent again. A call that fails for a reason
    that may pass is repeated. A generated card never replaces a card that somebody wrote in the repository.

    Args:
        mirrored: patterns of files that are deleted in the repository if the folder has no file of that name. The patterns of
            weights only apply to a folder that has weights.

    Raises:
        HubError: nothing could be uploaded, or the Hub's copy differs.
    """
    # First of all, because a wrong name or a missing token must not cost an upload.
    token = checked_token(to)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if mirrored == WEIGHTS and not _matching(files, WEIGHTS):
        mirrored = ()
    with _told_plainly(to, token, "this push committed nothing to"):
        if "/" not in to.repo_id:
            # The Hub's client creates a repository without the owner's name, but finds repositories only under the full name.
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
        to, token, f"the files were committed ({commit.oid[:10]}), but could not be compared with the copy in"
    ):
        # Compare at the commit, not at the branch: another push may have changed the branch since.
        faults = _patiently(lambda: _remote_faults(folder, files, to, mirrored, api, token, commit.oid))
    if faults:
        raise HubError(
            f"hf_zero: {to.repo_id} at {commit.oid[:10]} differs from the pushed files: {'; '.join(faults[:5])}. Push "
            "again; if this error is repeated, something changes the files during the upload."
        )
    return commit


@contextmanager
def _told_plainly(to: Destination, token: str, where: str) -> Iterator[None]:
    """Replaces the library's errors, which contain requests and the server's text, by plain ones without secrets."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise HubError(_without_tokens(f"hf_zero: {where} {to.repo_id}: {_reason(error)}.", token)) from None


def make_repo(to: Destination, make: Callable[[], Answer]) -> Answer:
    """Calls `make`, which creates a repository with the Hub's client, and repeats the call if a repetition may help.

    Raises:
        HubError: the repository could not be created.
    """
    with _told_plainly(to, checked_token(to), "cannot create the repository"):
        return _patiently(make)


def checked_token(to: Destination) -> str:
    """Returns the token. Raises `HubError` for faults visible without asking the Hub."""
    try:
        validate_repo_id(to.repo_id)
    except HFValidationError as error:
        raise HubError(
            f"hf_zero: {_without_tokens(repr(to.repo_id), to.token)} is not a valid repository name "
            f"({_without_tokens(one_line(error), to.token)}). Pass a name such as me/my-model."
        ) from None
    token = to.token or get_token()
    if token is None:
        raise HubError(
            f"hf_zero: there is no token for writing to {to.repo_id}. Run `hf auth login`, or set HF_TOKEN to a token with write "
            "access."
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
    """Whether a retry may help: after a broken connection, a busy server, or an error page instead of JSON."""
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
    """Describes the differences between the files of a commit and the sent files of the folder."""
    found = api.verify_repo_checksums(to.repo_id, revision=revision, local_dir=folder, token=token)
    left = [name for name in _matching(found.missing_paths, mirrored) if name not in sent]
    return [
        *(f"{name} is missing" for name in found.extra_paths if name in sent),
        *(
            f"{each['path']} has a different {each['algorithm']} there"
            for each in found.mismatches
            if each["path"] in sent
        ),
        *(f"{name} is there, but was not pushed" for name in left),
    ]


def _matching(names: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to push"
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return "the Hub does not accept the token; run `hf auth login` again, or set HF_TOKEN"
    if status in (401, 403, 404):
        said = getattr(error, "server_message", None) or error
        return f"the Hub refuses ({status}: {one_line(said)}); check the name, and that the token has write access"
    cause = f" ({one_line(error.__cause__)})" if error.__cause__ is not None else ""
    return f"{one_line(error) or type(error).__name__}{cause}. Push again: files that have arrived are not sent again"


def one_line(said: object) -> str:
    return " ".join(str(said).split())[:400].rstrip(".")


def _without_tokens(text: str, token: str | None) -> str:
    if token:
        text = text.replace(token, "<token>")
    return _TOKEN.sub("<token>", text)
