"""`hf-zero verify`."""

import typer

from .output import Folder, Json, said_plainly, say, say_error, say_json

_FAULTS_SHOWN = 50


def verify(folder: Folder, as_json: Json = False) -> None:
    """Checksums, every element once, names and shapes against the config's model, no empty tensor. Exits with 1 on a fault."""
    from ..integrations.checkpoints.progress import progress_of
    from ..integrations.checkpoints.saved_weights import is_checkpoint_of_ours
    from ..integrations.checkpoints.weights import folder_faults

    with said_plainly():
        with progress_of(f"checking {folder.name}") as show:
            faults = folder_faults(folder, show)
        of_ours = is_checkpoint_of_ours(folder)
    if as_json:
        say_json({"folder": folder, "good": not faults, "faults": faults, "has_manifest": of_ours})
    else:
        for fault in faults[:_FAULTS_SHOWN]:
            say_error(f"{folder}: {fault}")
        if len(faults) > _FAULTS_SHOWN:
            say_error(f"{folder}: and {len(faults) - _FAULTS_SHOWN} more faults")
    if faults:
        raise typer.Exit(1)
    if not as_json:
        what = "checksums, rows and weights" if of_ours else "weights (no manifest to compare with)"
        say(f"{folder}: good: {what}")
