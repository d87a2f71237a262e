"""The folder a run writes to, and the one it resumes from, checked before anything is computed."""

import re
import tempfile
from pathlib import Path

from .errors import RecipeError


def check_writable(output_dir: str) -> None:
    """Make the output folder, and try to write to it: an hour of training is lost where that only fails at the end."""
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise RecipeError(
            f"The output folder {output_dir!r} cannot be written to ({error.strerror}). Give another one with "
            "--output_dir, or change the rights of this one."
        ) from error


def checkpoint_to_resume(asked: str | None, output_dir: str) -> str | bool | None:
    """What `--resume_from_checkpoint` asks Trainer for: a folder, True for the last of the output folder, or "last-good"."""
    if asked is None or asked == "last-good":
        return asked
    here = sorted(path.name for path in Path(output_dir).glob("checkpoint-*"))
    choice = f"{output_dir} holds {', '.join(here)}" if here else f"{output_dir} holds no checkpoint"
    if asked.lower() == "true":
        if not here:
            raise RecipeError(
                f"--resume_from_checkpoint true asks for the last checkpoint of the output folder, but {choice}. Set "
                "--output_dir to the folder of the run to go on with, or leave the option out to start anew."
            )
        return True
    if not (Path(asked) / "trainer_state.json").is_file():
        problem = "has no trainer_state.json" if Path(asked).is_dir() else "does not exist"
        raise RecipeError(
            f"--resume_from_checkpoint {asked} is not a Trainer checkpoint: that folder {problem}; {choice}. Name a "
            "`checkpoint-…` folder, give `true` for the last one, or leave the option out to start anew."
        )
    return asked


def step_to_resume(asked: str | None) -> int:
    """The optimizer step that a folder `step_…` of the plain accelerate loop was saved after; 0 to start anew."""
    if asked is None:
        return 0
    step = re.fullmatch(r"step_(\d+)", Path(asked).name)
    if step is None or not Path(asked).is_dir():
        problem = "there is no such folder" if step else "its name is not `step_` and a number"
        raise RecipeError(
            f"--resume_from_checkpoint {asked} is not a checkpoint of this script: {problem}. Name a folder that "
            "--checkpointing_steps has made, such as outputs/accelerate/step_100, or leave the option out to start anew."
        )
    return int(step[1])
