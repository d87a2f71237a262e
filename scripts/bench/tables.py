"""Tables and pictures, made of files of figures and nothing else.

    python scripts/bench/tables.py outputs/bench/step.json                    # its tables, on the screen
    python scripts/bench/tables.py outputs/bench/*.json --out outputs/bench   # all tables in one page, and a PNG for each
    python scripts/bench/tables.py --docs                                     # the kept figures in README.md and docs/

In a document a table stands between `<!-- figures: FILE NAME -->`, with a file of scripts/bench/results and a table of it, and
`<!-- end of figures -->`. Pictures of kept files are in docs/figures.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from peers import ENGINES, Peer
from plots import plot
from record import BENCH_FOLDER
from reports import report_of, tables_of

ROOT = BENCH_FOLDER.parents[1]
RESULTS = BENCH_FOLDER / "results"
PICTURES = ROOT / "docs" / "figures"
DOCUMENTS = ("README.md", "docs/*.md")
_KINDS = {"host_time": "host_time", "checkpoints": "checkpoints", "io": "checkpoints", "step": "steps"}
"""Of files that do not say it themselves, by the beginning of their names."""

_TABLE = re.compile(r"(<!-- figures: (\S+) (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def read_record(path: Path) -> dict[str, Any]:
    """A file of figures, with what it says of its run at the top.

    Raises:
        ValueError: no tables are made of such a file.
    """
    figures = json.loads(path.read_text(encoding="utf-8"))
    record = {**figures.get("machine", {}), **figures.get("run", {}), **figures}
    kind = record.setdefault("kind", _KINDS.get(re.split(r"[-.]", path.name)[0]))
    if kind is None:
        raise ValueError(f"{path} has no tables: it has to say its kind")
    if kind == "steps":
        record.setdefault("left_out", {})
        record["engines"] = [_described(ENGINES[row["name"]]) | row for row in record["engines"]]
    return record


def _described(peer: Peer) -> dict[str, Any]:
    """What rows say of their engine, for those that do not."""
    return {"title": peer.title, "settings": peer.settings, "is_ours": peer.is_ours, "is_exact": peer.is_exact}


@cache
def kept_tables(name: str) -> dict[str, str]:
    """The tables of a kept file."""
    return tables_of(read_record(RESULTS / name))


def with_tables(text: str) -> str:
    """A document with its tables as the kept figures have them."""

    def table(found: re.Match[str]) -> str:
        begin, name, table_name, end = found.groups()
        return f"{begin}{kept_tables(name)[table_name]}\n{end}"

    return _TABLE.sub(table, text)


def documents() -> list[Path]:
    return [path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]


def write_documents() -> None:
    for path in documents():
        text = path.read_text(encoding="utf-8")
        written = with_tables(text)
        if written != text:
            path.write_text(written, encoding="utf-8")
            print(f"written to {path.relative_to(ROOT)}")
    for name in sorted({found[2] for path in documents() for found in _TABLE.finditer(path.read_text())}):
        write_plots(RESULTS / name, PICTURES)


def write_plots(path: Path, folder: Path) -> None:
    for picture in plot(read_record(path), folder, path.stem):
        print(f"drawn from {path.name}: {picture}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="files of figures")
    parser.add_argument("--out", type=Path, help="a folder for tables.md and the pictures")
    parser.add_argument("--docs", action="store_true", help="write the kept figures into README.md and docs/")
    options = parser.parse_args(arguments)
    if options.docs:
        write_documents()
    page = "\n\n".join(f"# {path.stem}\n\n{report_of(read_record(path))}" for path in options.files)
    print(page)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "tables.md").write_text(page + "\n", encoding="utf-8")
        for path in options.files:
            write_plots(path, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
