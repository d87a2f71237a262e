"""The position of training in its data, saved so any number of ranks can resume there."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ..checkpoint.run_log import POSITION_NAME, read_position


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """The data trained on before a checkpoint.

    Attributes:
        global_rows: samples per optimizer step at the start of the run.
        epoch: complete passes over the data.
        rows: samples of the incomplete pass.
    """

    global_rows: int
    epoch: int
    rows: int

    def write(self, folder: Path) -> None:
        (folder / POSITION_NAME).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "DataPosition | None":
        """Reads the position of a checkpoint; None if the checkpoint has none.

        Raises:
            CheckpointError: the file has different content.
        """
        content = read_position(folder)
        return None if content is None else cls(**content)
