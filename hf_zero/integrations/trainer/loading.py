"""Files of a checkpoint that Trainer and torch load in their own way, and what is said when they cannot."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...checkpoint.format.manifest import CheckpointError
from ...checkpoint.format.text import shown


@contextmanager
def named_when_damaged(path: str | Path | None, what: str) -> Iterator[None]:
    """Raises `CheckpointError` with the file's name in the place of whatever loading it raises.

    Args:
        path: None where there is nothing to load, and the loader does nothing.
        what: that is loaded, in words ("the random states").
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # Of a pickle that holds something else than is due, each loader has errors of its own.
        raise CheckpointError(
            f"hf_zero: {what} of {path} cannot be loaded ({type(error).__name__}: {_reason(error)}). Nothing was trained: the "
            "file is damaged or of another run; resume from another checkpoint."
        ) from error


@contextmanager
def named_when_of_another_model(checkpoint: Path, model_name: str) -> Iterator[None]:
    """Raises `CheckpointError` in the place of whatever loading a checkpoint's weights into a model raises."""
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
    # torch names the model in the first line and each tensor in one of its own.
    return shown("; ".join(line.strip() for line in str(error).splitlines()[:3]), 400)
