"""Clear errors for checkpoint files that Trainer and torch load."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.faults import CheckpointError, shown


@contextmanager
def named_when_damaged(path: str | Path | None, what: str) -> Iterator[None]:
    """Replaces any error while loading a file by a `CheckpointError` with the file's name.

    Args:
        path: the file; None if the loader has nothing to load.
        what: the loaded content, in words ("the random states").
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # Catch all, because each loader raises its own errors for a pickle with unexpected content.
        raise CheckpointError(
            f"hf_zero: {what} of {path} cannot be loaded ({type(error).__name__}: {_reason(error)}). Nothing was trained: "
            "restore the file, or resume from another checkpoint."
        ) from error


@contextmanager
def named_when_of_another_model(checkpoint: Path, model_name: str) -> Iterator[None]:
    """Replaces any error while loading weights into a model by a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"hf_zero: the weights of {checkpoint} do not fit this run's {model_name} ({_reason(error)}). Nothing was trained: "
            "build the model with the config.json of the checkpoint, or resume from a checkpoint of this model."
        ) from error


def _reason(error: Exception) -> str:
    # torch names the model in the first line, and one tensor in each following line.
    return shown("; ".join(line.strip() for line in str(error).splitlines()[:3]), 400)
