"""Where training stands in its data, saved with a checkpoint so that other numbers of ranks go on from there."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ...checkpoint.format.json_files import read_mapping
from ...checkpoint.format.manifest import CheckpointError
from ...checkpoint.format.text import shown
from ...checkpoint.structure import POSITION_NAME


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
        path = folder / POSITION_NAME
        if not path.is_file():
            return None
        content = read_mapping(path)
        known = {"global_rows", "epoch", "rows"}
        if content.keys() != known or not all(type(value) is int and value >= 0 for value in content.values()):
            raise CheckpointError(
                f"hf_zero: {path} holds {shown(str(content))}, and whole numbers for {', '.join(sorted(known))} are due; resume "
                "from an earlier checkpoint."
            )
        return cls(**content)
