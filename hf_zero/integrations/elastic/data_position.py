"""Where training stands in its data, saved with a checkpoint so that other numbers of ranks go on from there."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ...checkpoint.structure import POSITION_NAME, read_position


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """What was trained on before a checkpoint.

    Attributes:
        global_rows: of an optimizer step, as the run was begun with.
        epoch: passes over the data that are complete.
        rows: of the pass that is not.
    """

    global_rows: int
    epoch: int
    rows: int

    def write(self, folder: Path) -> None:
        (folder / POSITION_NAME).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "DataPosition | None":
        """That of a checkpoint; None where it has none.

        Raises:
            CheckpointError: the file holds something else.
        """
        content = read_position(folder)
        return None if content is None else cls(**content)
