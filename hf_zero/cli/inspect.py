"""`hf-zero inspect`: the contents of a checkpoint."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ..checkpoint.faults import shown
from ..checkpoint.files import refuse_links
from ..checkpoint.json_files import read_mapping
from .output import LONGEST_LINE, Folder, Json, console, said_plainly, say, say_json

if TYPE_CHECKING:
    from ..checkpoint.manifest import Manifest


_LOSSES = {"loss": "training loss", "eval_loss": "evaluation loss"}
_LAYOUTS = {
    "sharded": "sharded: convert it to a model folder with `hf-zero consolidate`",
    "hf": "hf: from_pretrained reads it",
    "adapters": "adapters for a base model with checksum {base}",
}


def inspect(folder: Folder, as_json: Json = False) -> None:
    """Shows the contents of a checkpoint as a table."""
    with said_plainly():
        facts = _facts(folder)
    if as_json:
        say_json({"folder": folder, **facts})
        return
    say(str(folder))
    table = Table()
    table.add_column("what")
    table.add_column("value")
    for what, value in _rows(facts):
        table.add_row(what, Text(shown(value, LONGEST_LINE)))
    console.print(table)


def _facts(folder: Path) -> dict[str, Any]:
    from ..checkpoint.manifest import Manifest
    from ..integrations.saved_weights import is_checkpoint_of_ours, saved_tensors
    from ..integrations.state_io import ZERO_FOLDER

    tensors = saved_tensors(folder)
    facts: dict[str, Any] = {
        "tensors": len(tensors),
        "elements": sum(math.prod(tensor.shape) for tensor in tensors),
        "dtypes": sorted({tensor.dtype for tensor in tensors}),
        "weights_bytes": sum(tensor.nbytes for tensor in tensors),
        **_reached(folder),
    }
    if is_checkpoint_of_ours(folder):
        facts.update(_saved(Manifest.read(folder / ZERO_FOLDER)))
    return facts


def _reached(folder: Path) -> dict[str, Any]:
    """Reads a Trainer's progress from its own file."""
    from ..checkpoint.run_log import STATE_NAME

    path = folder / STATE_NAME
    if not path.is_file():
        return {}
    from ..checkpoint.run_log import log_history

    # A folder from the Hub may contain a link to any file on this machine.
    refuse_links(folder, [path])
    state = read_mapping(path)
    history = log_history(state, path)
    facts = {"step": state.get("global_step")}
    for name in _LOSSES:
        logged = [entry for entry in history if name in entry]
        if logged:
            facts[name] = {"value": logged[-1][name], "step": logged[-1].get("step")}
    return facts


def _saved(manifest: "Manifest") -> dict[str, Any]:
    return {
        "saved": manifest.written_at,
        "save": manifest.save,
        "ranks": manifest.world_size,
        "stage": manifest.stage,
        "layout": "sharded" if manifest.weights else "hf" if manifest.base is None else "adapters",
        "base": manifest.base,
        "optimizers": [optimizer["class"] for optimizer in manifest.optimizers],
        "state": sorted({kind for kinds in manifest.kinds.values() for kind in kinds}),
        "trained_parameters": len(manifest.shapes),
        "files": len(manifest.files),
        "files_bytes": sum(record.size for record in manifest.files.values()),
        "versions": manifest.versions,
    }


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from ..engine.report_tables import mib

    yield "weights", f"{facts['tensors']} tensors, {facts['elements']:,} elements, {', '.join(facts['dtypes'])}"
    yield "weights bytes", f"{mib(facts['weights_bytes'])} MiB"
    if "step" in facts:
        yield "step", str(facts["step"])
    for name, said in _LOSSES.items():
        if name in facts:
            yield said, f"{facts[name]['value']:.6g} at step {facts[name]['step']}"
    if "saved" in facts:
        yield "saved", facts["saved"]
        yield "ID of the save", facts["save"] or "none: the save is older than save IDs"
        yield "saved by", f"{facts['ranks']} ranks at stage {facts['stage']}"
        yield "layout", _LAYOUTS[facts["layout"]].format(base=facts["base"])
        optimizers = ", ".join(facts["optimizers"]) or "none"
        yield "optimizers", f"{optimizers}; state: {', '.join(facts['state']) or 'none'}"
        yield "trained parameters", str(facts["trained_parameters"])
        yield "files", f"{facts['files']}, {mib(facts['files_bytes'])} MiB"
        yield "versions", ", ".join(f"{library} {version}" for library, version in facts["versions"].items())
