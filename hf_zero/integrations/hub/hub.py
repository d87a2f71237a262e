"""Model folders to the Hugging Face Hub: uploaded, and then what lies there is compared with what lies here."""

import fnmatch
import hashlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
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

from ..reasons import HubError
from .card import CARD_NAME, PLOT_NAME, is_our_card

Answer = TypeVar("Answer")

WAITS_S = (1.0, 2.0, 4.0)
"""Between attempts at a call that failed for a reason that may pass."""

WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")
"""Files that from_pretrained would read beside or in place of new ones, so that older ones must not outlive a push."""

EVERYTHING = ("*",)

_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
_TOKEN = re.compile(r"\b(hf|api)_[A-Za-z0-9_]{16,}")


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a push goes.

    Attributes:
        repo_id: such as "me/my-model"; "my-model" is one of the account that the token belongs to.
        revision: a branch, made when it is not there; None is main.
        private: of a repository that is new; None is the account's default.
        token: None is the one of `hf auth login` or HF_TOKEN.
        path_in_repo: a folder of the repository; "" is its root.
    """

    repo_id: str
    revision: str | None = None
    private: bool | None = None
    token: str | None = field(default=None, repr=False)
    path_in_repo: str = ""


def push_folder(
    folder: Path, to: Destination, *, api: HfApi, message: str | None, mirrored: tuple[str, ...] = WEIGHTS
) -> CommitInfo:
    """Uploads all files of a folder as a commit, compares them with what the Hub then has, and returns the commit.

    Files that the Hub has already, such as those of a push that was cut off, do not travel again. A call that fails for a
    reason that may pass is tried again. A card of ours does not replace one that somebody wrote in the repository.

    Args:
        mirrored: patterns of files below `path_in_repo` that go from the repository when the folder has none of that
            name. Patterns of weights count only for a folder that has weights.

    Raises:
        HubError: nothing could be uploaded, or what the Hub has differs.
    """
    token = checked_token(to)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if mirrored == WEIGHTS and not _matching(files, WEIGHTS):
        mirrored = ()
    with _told_plainly(to, token, "this push has committed nothing to"):
        if "/" not in to.repo_id:
            # The Hub's client makes such a repository too, and then finds it under its whole name only.
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
                path_in_repo=to.path_in_repo or None,
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
        faults = _patiently(lambda: _remote_faults(files, to, mirrored, api, token, commit.oid))
    if faults:
        raise HubError(
            f"hf_zero: {to.repo_id} at {commit.oid[:10]} is not what was pushed: {'; '.join(faults[:5])}. Push again; if it "
            "stays so, the files do not arrive as they were sent."
        )
    return commit


@contextmanager
def _told_plainly(to: Destination, token: str, where: str) -> Iterator[None]:
    """The library's errors carry requests, and a server's words; ours says what matters, and nothing secret."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise HubError(_without_tokens(f"hf_zero: {where} {to.repo_id}: {_reason(error)}.", token)) from None


def make_repo(to: Destination, make: Callable[[], Answer]) -> Answer:
    """What `make` returns that makes the repository by the Hub's client, tried again where that may help.

    Raises:
        HubError: it could not be made.
    """
    with _told_plainly(to, checked_token(to), "there is no place for pushes in"):
        return _patiently(make)


def checked_token(to: Destination) -> str:
    """The token to use. Raises `HubError` for what can be known without asking the Hub."""
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
    if CARD_NAME not in files or to.path_in_repo or not is_our_card(files[CARD_NAME]):
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
    files: dict[str, Path], to: Destination, mirrored: tuple[str, ...], api: HfApi, token: str, revision: str
) -> list[str]:
    """How the files of a commit differ from those here, in words."""
    info = api.model_info(to.repo_id, revision=revision, files_metadata=True, token=token)
    prefix = f"{to.path_in_repo}/" if to.path_in_repo else ""
    there = {
        sibling.rfilename.removeprefix(prefix): sibling
        for sibling in info.siblings or ()
        if sibling.rfilename.startswith(prefix)
    }
    faults = []
    for name, path in files.items():
        if name not in there:
            faults.append(f"{name} is missing")
            continue
        size, held = path.stat().st_size, there[name]
        if held.size != size:
            faults.append(f"{name} has {held.size} bytes there and {size} here")
        elif held.lfs is not None and held.lfs.sha256 != file_digest(path, hashlib.sha256()):
            faults.append(f"{name} has another sha256 there")
        elif held.lfs is None and held.blob_id != file_digest(path, hashlib.sha1(b"blob %d\0" % size)):
            faults.append(f"{name} has other contents there")
    left = [name for name in _matching(there, mirrored) if name not in files and name != ".gitattributes"]
    return faults + [f"{name} is there and was not pushed" for name in left]


def file_digest(path: Path, digest) -> str:
    """The hexadecimal digest of a file, from a `hashlib` object that may have taken a header already."""
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
