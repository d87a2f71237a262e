"""`hf-zero verify`: whether a checkpoint is intact."""

from typing import Annotated

import typer

from .output import Folder, Json, said_plainly, say, say_error, say_json

_FAULTS_SHOWN = 50


def verify(
    folder: Folder,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept", help="Rewrite the manifest for edited files that hold no tensors of the model or optimizer."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Verifies checksums, names and shapes, and that each element is stored once. Exits with 1 on a fault."""
    from ..integrations.progress_bars import progress_of
    from ..integrations.saved_weights import is_checkpoint_of_ours
    from ..integrations.weights import accept_folder, folder_findings

    with said_plainly():
        with progress_of(f"checking {folder.name}") as show:
            accepted = accept_folder(folder, show) if accept else []
            found = folder_findings(folder, show)
        faults = [*found.faults, *found.edits]
        of_ours = is_checkpoint_of_ours(folder)
    if as_json:
        document = {"folder": folder, "good": not faults, "faults": faults, "has_manifest": of_ours}
        say_json(document | ({"accepted": accepted} if accept else {}))
    else:
        for edit in accepted:
            say(f"{folder}: accepted: {edit}")
        for fault in faults[:_FAULTS_SHOWN]:
            say_error(f"{folder}: {fault}")
        if len(faults) > _FAULTS_SHOWN:
            say_error(f"{folder}: and {len(faults) - _FAULTS_SHOWN} more faults")
        if found.edits and not found.faults:
            say_error(f"{folder}: if these edits are intended, run `hf-zero verify --accept {folder}` to accept them")
    if faults:
        raise typer.Exit(1)
    if not as_json:
        what = "checksums, rows and weights" if of_ours else "weights (no manifest to compare with)"
        say(f"{folder}: good: {what}")
