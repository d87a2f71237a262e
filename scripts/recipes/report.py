"""What a run achieved: a table on the terminal, and `results.json` for programs."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_zero import ZeroEngine

RESULTS_NAME = "results.json"


def report(title: str, results: dict[str, Any], output_dir: str, engine: ZeroEngine | None) -> None:
    """Print the results and, where an engine sharded the run, its memory and communication; write them to a file.

    Call it on the main process.
    """
    table = Table("figure", "value", title=title, title_justify="left")
    table.columns[1].justify = "right"
    for name, value in results.items():
        table.add_row(*_readable(name, value))
    Console().print(table)
    if engine is not None:
        memory, communication = engine.memory_report(), engine.comm_report()
        print(memory.table(), communication.table(), sep="\n")
        results = results | {
            "state_bytes": memory.total_bytes,
            "ddp_state_bytes": memory.ddp_total_bytes,
            "bytes_sent": communication.bytes_sent,
        }
    Path(output_dir, RESULTS_NAME).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _readable(name: str, value: float) -> tuple[str, str]:
    label = name.replace("_", " ")
    if name.endswith("_bytes"):
        return label.removesuffix(" bytes"), f"{value / 2**20:,.1f} MiB"
    return label, f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if value >= 100 else f"{value:.4f}"
