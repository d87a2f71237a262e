"""Makes tables and pictures from files of figures.

    python scripts/bench/tables.py outputs/bench/step.json                    # its tables, on the screen
    python scripts/bench/tables.py outputs/bench/*.json --out outputs/bench   # all tables in one page, and a PNG for each
    python scripts/bench/tables.py --docs                                     # the kept figures in README.md, docs/, RESULTS.md

In a document, a table is between `<!-- figures: FILE NAME -->`, with the name of a file of scripts/bench/results and of one of
its tables, and `<!-- end of figures -->`. Pictures of kept files are in docs/figures.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from engines import ENGINES
from harness import BUSY_LOAD, MIB, RESULTS, ROOT, cells, describe_run, keep
from packaging.version import Version

PICTURES = ROOT / "docs" / "figures"
DOCUMENTS = ("README.md", "docs/*.md", "scripts/bench/RESULTS.md")
_KINDS = {"host_time": "host_time", "checkpoints": "checkpoints", "io": "checkpoints", "step": "steps"}
"""Beginning of a file's name → its kind, for files without an entry for the kind."""

_TABLE = re.compile(r"(<!-- figures: (\S+) (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

Record = dict[str, Any]

# ---- figures in which a peer is ahead ----

BEHIND = "where a peer is ahead"
LEVEL = 0.005
"""Figures with a smaller relative difference count as equal."""

FIGURES: dict[str, tuple[Callable[[Record], float | None], Callable[[float], str]]] = {
    "CPU": (lambda row: row["cpu_ratio"]["median"] if "cpu_ratio" in row else None, "{:.2f} x DDP".format),
    "wire": (lambda row: row["sent_bytes"], lambda value: f"{value / 1e6:.1f} MB"),
    "peak": (lambda row: row["peak_bytes"], lambda value: f"{value / MIB:.0f} MiB"),
    "first step": (lambda row: row.get("first_step_cpu_s"), "{:.2f} s of CPU".format),
}
"""Compared figures, for which less is better: name → (the figure of an engine's row, its text)."""


def behind(own: float | None, peers: Iterable[tuple[str, float | None]], what: str = "") -> str:
    """Returns `behind: FSDP2, 3 %` for the best peer, or `peak: FSDP2, 3 %` for the figure `what`; "" if no peer is ahead."""
    ahead = [(value, title) for title, value in peers if value is not None and own is not None]
    if not ahead:
        return ""
    best, title = min(ahead)
    if own <= best * (1 + LEVEL):
        return ""
    share = own / best - 1
    far = f"{share:.0%}".replace("%", " %") if share < 2 else f"{own / best:.0f} times"
    return f"{what or 'behind'}: {title}, {far}"


def verdict(row: Record, rows: list[Record], figures: Iterable[str] = FIGURES) -> str:
    """Each of these figures in which a peer is ahead of this row's engine, with the best peer; empty for rows of peers.

    An engine that rounds nothing is compared with peers that round nothing. One that rounds is compared with all peers.
    """
    if not row["is_ours"]:
        return ""
    rounds = not row.get("is_exact", True)
    peers = [each for each in rows if not each["is_ours"] and (rounds or each.get("is_exact", True))]
    found = []
    for what in figures:
        figure = FIGURES[what][0]
        said = behind(figure(row), ((peer["title"], figure(peer)) for peer in peers), what)
        if said and what == "CPU":
            best = min(peers, key=lambda peer: peer["cpu_ratio"]["median"])
            if row["cpu_ratio"]["lowest"] <= best["cpu_ratio"]["highest"]:
                said += " (rounds overlap)"
        found.append(said)
    return "; ".join(filter(None, found)) or "ahead or level in all"


def scores(rows: list[Record]) -> Iterable[Record]:
    """Yields for each figure our best value, the peers' best value and the verdict, among engines without rounding."""
    for what, (figure, text) in FIGURES.items():
        ours, peers = (
            [(figure(row), row["title"]) for row in rows if row["is_exact"] and row["is_ours"] is is_ours]
            for is_ours in (True, False)
        )
        if not ours or not peers or any(value is None for value, _ in ours + peers):
            continue
        (own, title), (best, peer) = min(ours), min(peers)
        said = behind(own, [(peer, best)]) or ("level" if own >= best * (1 - LEVEL) else "ahead")
        yield {"figure": what, "own": f"{text(own)} ({title})", "best": f"{text(best)} ({peer})", "said": said}


# ---- tables, by the kind of the file ----


def markdown(columns: Sequence[tuple[Any, ...]], rows: Iterable[Any]) -> str:
    lines = [[heading for heading, *_ in columns], ["---"] * len(columns), *(cells(columns, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(record: Record) -> str:
    """Describes machine, versions and date in a sentence, and whether other work disturbed the run."""
    memory = f", {record['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in record else ""
    cores = f", {record['cores']} cores" if "cores" in record else ""
    said = (
        f"{record['cpu_model']}{cores}{memory}, {record.get('device', 'cpu')}; torch {record['torch']}, transformers "
        f"{record['transformers']}; commit {record['commit']}, {record['date'][:10]}"
    )
    if record.get("load_before", 0) > BUSY_LOAD:
        said += (
            f". Other work was on the machine (load {record['load_before']:.1f} before, {record['load_after']:.1f} after): "
            "bytes and memory are not disturbed by that, ratios of CPU time little, seconds much"
        )
    return " ".join([f"{said}.", *([record["note"]] if "note" in record else [])])


SHORT = ("ddp", "zero_optimizer", "fsdp2", "fsdp2_kept", "hf_zero0", "hf_zero1", "hf_zero2", "hf_zero3")
"""Engines of the short table, which is shown next to others."""

_ENGINE: tuple[tuple[Any, ...], ...] = (
    ("engine", "title"),
    ("CPU a step / DDP", FIGURES["CPU"][0], ".2f"),
    ("wire MB", "sent_bytes", ".1f", 1e6),
    ("peak MiB", "peak_bytes", ".0f", MIB),
)


def steps(record: Record) -> dict[str, str]:
    rows = record["engines"]

    def spread(row: Record) -> str | None:
        return "{median:.2f} ({lowest:.2f}-{highest:.2f})".format(**row["cpu_ratio"]) if "cpu_ratio" in row else None

    def losses(row: Record) -> str:
        apart = row["loss_difference"]
        return "DDP's bit for bit" if apart == 0 else f"up to {apart:.1g} from DDP's"

    title, (cpu, *_), *others = _ENGINE
    more = [("first step, CPU s", FIGURES["first step"][0], ".2f"), ("losses", losses)]
    # Of the figures in the columns before this one.
    ahead = (BEHIND, lambda row: verdict(row, rows, ("CPU", "wire", "peak")))
    overview = [title, (cpu, spread), *others, *more, (BEHIND, lambda row: verdict(row, rows) or "peer")]
    best = [("figure", "figure"), ("hf_zero's best", "own"), ("the peers' best", "best"), ("", "said")]
    tables = {
        "step": markdown(overview, rows),
        "step-short": markdown([*_ENGINE, ahead], (row for row in rows if row["name"] in SHORT)),
        "step-best": markdown(best, scores(rows)),
        "step-settings": markdown([title, ("settings", "settings")], rows),
    }
    if record["left_out"]:
        tables["step-left-out"] = markdown([("not measured", "title"), ("why", "why")], record["left_out"].values())
    return tables


def curves(record: Record) -> dict[str, str]:
    """Makes one table per curve: a row per engine, and a column per value of the varied setting."""
    tables = {}
    for name, curve in record["curves"].items():
        rows = [
            row | {"value": point["value"], "said": verdict(row, point["engines"])}
            for point in curve["points"]
            for row in point["engines"]
        ]
        tables[f"curve-{name}"] = markdown([(curve["varied"], "value"), *_ENGINE, (BEHIND, "said")], rows)
    return tables


WHOLE_SAVES = ("torch.save", "DCP")
"""Peers' saves of a model and its optimizer, during which training waits."""


def checkpoints(record: Record) -> dict[str, str]:
    saves = {name: median(seconds) for name, seconds in record["saves"].items()}
    at_once, stalls = (
        {name: value for name, value in saves.items() if name.endswith(end) or name in WHOLE_SAVES}
        for end in ("at once", "stall")
    )
    loads, merges = record["resumes"].items(), record["merges"].items()
    seconds, megabytes = "{:.2f} s".format, lambda value: f"{value / 1e6:.0f} MB"
    compared: dict[str, tuple[dict[str, float], Callable[[float], str]]] = {
        "a save that training waits for": (at_once, seconds),
        "a save blocks training": (stalls, seconds),
        "a cold resume": ({name: median(load["seconds"]) for name, load in loads}, seconds),
        "a rank reads to resume": ({name: max(load["read_bytes"]) for name, load in loads}, megabytes),
        "export to one model folder": ({name: merge["seconds"] for name, merge in merges}, seconds),
        "the export's peak": ({name: merge["peak_bytes"] for name, merge in merges}, FIGURES["peak"][1]),
    }
    rows = [
        {"what": what, "way": _way(name), "value": text(value), "said": said or "ahead or level"}
        for what, (values, text) in compared.items()
        for name, value in values.items()
        for said in [behind(value, _peers(values.items())) if _is_ours(name) else "peer"]
    ]
    return {"checkpoints": markdown([("what", "what"), ("way", "way"), ("", "value"), (BEHIND, "said")], rows)}


def _peers(figures: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in figures if not _is_ours(name)]


def _is_ours(name: str) -> bool:
    return name.startswith(("stage", "hf-zero", "hf_zero"))


def _way(name: str) -> str:
    engine = name.removesuffix(": at once").removesuffix(": stall")
    return f"hf_zero {engine}" if engine.startswith("stage") else engine


def links(record: Record) -> dict[str, str]:
    """A row per engine and link: the measured step next to the planner's forecast."""
    rows = []
    groups: dict[tuple, list[Record]] = {}
    for run in record["runs"]:
        groups.setdefault((run["mbit"], run.get("delay_ms", 0), run["model"]), []).append(run)
    for (mbit, delay_ms, _), runs in sorted(groups.items(), reverse=True):
        peers = _peers((run["title"], run["step_ms"]) for run in runs)
        link = f"{mbit:g} Mbit/s" + (f", {delay_ms:g} ms" if delay_ms else "")
        for run in runs:
            error = None if run["error"] is None else f"{run['error']:+.0%}".replace("%", " %")
            said = behind(run["step_ms"], peers) if _is_ours(run["title"]) else ""
            rows.append(run | {"link": link, "error": error, "said": said})
    columns = [
        *(("link", "link"), ("model", "model"), ("engine", "title"), ("ms a step", "step_ms", ".0f")),
        *(("forecast", "simulated_ms", ".0f"), ("error", "error"), (BEHIND, "said")),
    ]
    return {"links": markdown(columns, rows)}


def host_time(record: Record) -> dict[str, str]:
    rows = record["engines"]
    peers = [(ENGINES[row["name"]].title, row["to_ddp"]) for row in rows if not ENGINES[row["name"]].is_ours]
    columns = [
        ("engine", lambda row: ENGINES[row["name"]].title),
        *(("host ms a step", "cpu_ms", ".1f"), ("to DDP", "to_ddp", ".2f"), ("to FSDP2", "to_fsdp2", ".2f")),
        ("Python's thread, ms", "thread_ms", ".1f"),
        *(("to DDP", "thread_to_ddp", ".2f"), ("to FSDP2", "thread_to_fsdp2", ".2f")),
        (BEHIND, lambda row: behind(row["to_ddp"], peers) if ENGINES[row["name"]].is_ours else ""),
    ]
    return {"host-time": markdown(columns, rows)}


def first_step(record: Record) -> dict[str, str]:
    rows = record["engines"]
    peers = _peers((row["name"], row["seconds"]) for row in rows)
    columns = [
        ("engine", lambda row: _way(row["name"])),
        *(("seconds", "seconds", ".2f"), ("to DDP", "seconds_later", "+.2f")),
        *(("CPU s", "cpu_seconds", ".2f"), ("to DDP", "cpu_seconds_later", "+.2f")),
        (BEHIND, lambda row: behind(row["seconds"], peers) if _is_ours(row["name"]) else ""),
    ]
    return {"first-step": markdown(columns, rows)}


def axes(record: Record) -> dict[str, str]:
    compared = {"CPU": "cpu_s", "wire": "sent_bytes", "peak": "peak_bytes"}
    rows = record["engines"]

    def said(row: Record) -> str:
        if not _is_ours(row["name"]):
            return "peer"
        found = [behind(row[key], _peers((x["name"], x[key]) for x in rows), what) for what, key in compared.items()]
        return "; ".join(filter(None, found)) or "ahead or level in all"

    columns = [
        *(("engine", lambda row: _way(row["name"])), ("CPU s a step", "cpu_s", ".3f"), ("to FSDP2", "to_fsdp2", ".2f")),
        *(*_ENGINE[2:], (BEHIND, said)),
    ]
    return {"axes": markdown(columns, rows)}


def capture(record: Record) -> dict[str, str]:
    """A row per stage and value of `nonfinite`: the differences between two steps, and the obstacles to a graph."""

    def named(counts: Record) -> str:
        return "; ".join(f"{number} by `{where}`" for where, number in counts.items())

    columns = [
        *(("stage", "stage"), ("`nonfinite`", "nonfinite"), ("operations and requests", "operations")),
        ("of these not the same in the next step", lambda row: named(row["differing"]) or "0"),
        *(("host waits", "waits"), ("requests of memory by hf_zero", lambda row: sum(row["requests"].values()))),
        *(("requests that outlive the step", "left"), ("allocations by the device", "allocated")),
    ]
    asked: dict[str, int] = {}
    for where, number in (each for row in record["rows"] for each in row["requests"].items()):
        asked[where] = max(number, asked.get(where, 0))
    most = [{"where": where, "number": asked[where]} for where in sorted(asked, key=asked.__getitem__, reverse=True)]
    requests = markdown([("requested by", lambda row: f"`{row['where']}`"), ("a step, at most", "number")], most)
    return {"capture": markdown(columns, record["rows"]), "capture-requests": requests}


def offload(record: Record) -> dict[str, str]:
    columns = [
        *(("optimizer state", lambda way: f"`{way['way']}`"), ("ms a step", "step_ms", ".0f")),
        *(("of it optimizer", "optimizer_ms", ".0f"), ("CPU ms a step", "cpu_ms", ".0f")),
        *(("peak MiB", "host_peak_bytes", ".0f", MIB), ("written MiB a step", "written_bytes_a_step", ".0f", MIB)),
    ]
    tables = {"offload": markdown(columns, record["ways"])}
    if record["left_out"]:
        left_out = ({"way": way, "why": why} for way, why in record["left_out"].items())
        tables["offload-left-out"] = markdown([("not measured", "way"), ("why", "why")], left_out)
    return tables


_RELEASES = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "TRL": "trl",
    "PEFT": "peft",
    "sentence-transformers": "sentence-transformers",
}


def matrix(record: Record) -> dict[str, str]:
    """A row per set of releases, with the share of passed parts among the parts its packages support."""

    def passed(row: Record) -> str:
        tried = [part for part in row["parts"] if part["outcome"] != "not installed"]
        failed = [part["part"] for part in tried if part["outcome"] == "failed"]
        return f"{len(tried) - len(failed)} of {len(tried)}" + (f"; not {', '.join(failed)}" if failed else "")

    releases = [
        (title, lambda row, package=package: row["versions"].get(package)) for title, package in _RELEASES.items()
    ]
    columns = [("Python", "python"), *releases, ("passed", passed)]
    torches = sorted({row["versions"]["torch"] for row in record["rows"].values()}, key=Version)
    machine = f"{record['cpu_model']}, {record['cores']} cores, cpu"
    run = f"{machine}; torch {torches[0]} to {torches[-1]}; commit {record['commit']}, {record['date'][:10]}."
    return {"run": run, "matrix": markdown(columns, record["rows"].values())}


def parts(record: Record) -> dict[str, str]:
    """A row per part with lower memory use: a rank's peak in each set-up, and the error of its forecast."""
    found = {(cell["model"], cell["set_up"]): cell for cell in record["cells"]}
    columns: list[tuple[Any, ...]] = [("part", "part")]
    for set_up in record["options"]["set_ups"]:
        title = "DDP" if set_up == "ddp" else f"stage {set_up}"
        columns += [(f"{title}, peak MiB", f"{set_up} peak", ".0f", MIB), ("forecast", f"{set_up} error", "+.1%")]
    rows = []
    for part in dict.fromkeys(model for model, _ in found):
        of_part = {set_up: cell for (model, set_up), cell in found.items() if model == part}
        row: Record = {"part": part}
        for set_up in record["options"]["set_ups"]:
            cell = of_part.get(set_up, {})
            row |= {f"{set_up} peak": cell.get("measured_peak"), f"{set_up} error": cell.get("peak_error")}
        rows.append(row)
    return {"parts": markdown(columns, rows)}


def gpus(record: Record) -> dict[str, str]:
    """A table per model: each way next to the first, which is torch's own."""
    ways = [way for way in record["ways"] if way["error"] is None]
    firsts = {way["model"]: way["step_ms"] for way in reversed(ways)}
    columns = [
        *(("way", "way"), ("ms a step", "step_ms", ".1f")),
        ("of the first's", lambda way: way["step_ms"] / firsts[way["model"]], ".2f"),
        ("device busy", lambda way: way["trace"] and way["trace"]["busy_ms"] / way["step_ms"], ".0%"),
        *(("peak MiB", "peak_mib", ".0f"), ("losses off by", "loss_difference", ".1e")),
    ]
    of_model = {model: [way for way in ways if way["model"] == model] for model in firsts}
    return {model: markdown(columns, rows) for model, rows in reversed(of_model.items())}


def kernels(record: Record) -> dict[str, str]:
    columns = [("operation", "name"), ("ms", "ms", ".3f"), ("GB/s", "gb_a_second", ".0f")]
    return {"kernels": markdown([*columns, ("of a copy's", "copy_fraction", ".2f")], record["figures"])}


def forecasts(record: Record) -> dict[str, str]:
    columns = [
        *(("model", "model"), ("stage", "set_up"), ("state MiB", "measured_state", ".0f", MIB)),
        *(
            ("forecast", "state_error", "+.1%"),
            ("peak MiB", "measured_peak", ".0f", MIB),
            ("forecast", "peak_error", "+.1%"),
        ),
    ]
    return {"forecasts": markdown(columns, record["cells"])}


def encoders(record: Record) -> dict[str, str]:
    """A row per loss: the largest differences to the reference at the measured stages, by number of ranks."""
    rows: dict[str, list[Record]] = {}
    for row in record["rows"]:
        rows.setdefault(row["cell"], []).append(row)

    def worst(cell: Record, ranks: int, name: str) -> str | None:
        of_ranks = [row for row in rows[cell["cell"]] if row["ranks"] == ranks]
        if any(row["error"] for row in of_ranks):
            return "an error"
        if not of_ranks:
            return None
        of_ranks = [row for row in of_ranks if name in row]
        if not of_ranks:
            return None
        measured = sorted({str(row["stage"]) for row in of_ranks})
        only = "" if measured == stages_of[ranks] else f" (stage {', '.join(measured)})"
        return format(max(row[name] for row in of_ranks), ".0e").replace("0e+00", "0") + only

    columns: list[tuple[Any, ...]] = [("loss", "cell"), ("model", "kind"), ("reference", "reference")]
    stages_of = {
        ranks: sorted({str(row["stage"]) for row in record["rows"] if row["ranks"] == ranks})
        for ranks in sorted({row["ranks"] for row in record["rows"]})
    }
    for ranks, stages in stages_of.items():
        columns += [
            (
                f"{ranks} ranks, stage {', '.join(stages)}: losses",
                lambda cell, n=ranks: worst(cell, n, "loss_difference"),
            ),
            ("weights", lambda cell, n=ranks: worst(cell, n, "weight_difference")),
        ]
        if any("rounding" in row for row in record["rows"] if row["ranks"] == ranks):
            columns += [
                ("reference's own rounding", lambda cell, n=ranks: worst(cell, n, "rounding")),
                ("losses in float64", lambda cell, n=ranks: worst(cell, n, "float64_difference")),
            ]
    run = (
        f"{record['cpu_model']}, {record['cores']} cores, cpu; torch {record['torch']}, transformers {record['transformers']}, "
        f"sentence-transformers {record['versions']['sentence-transformers']}; commit {record['commit']}, {record['date'][:10]}."
    )
    return {"run": run, "encoders": markdown(columns, [each[0] for each in rows.values()])}


def compiled(record: Record) -> dict[str, str]:
    """A row per family, way of compiling, backend and addition: the worst figures of the measured stages."""
    keys = ("family", "way", "backend", "addition")
    rows: dict[tuple[str, ...], list[Record]] = {}
    for row in record["rows"]:
        rows.setdefault(tuple(row[key] for key in keys), []).append(row)

    def worst(cell: Record, name: str) -> int | None:
        return max((row[name] for row in cell["stages"] if not row["error"]), default=None)

    def losses(cell: Record) -> str:
        said = [
            f"stage {row['stage']}: {'an error' if row['error'] else format(row['loss_difference'], '.0e')}"
            for row in cell["stages"]
            if row["error"] or row["loss_difference"]
        ]
        return ", ".join(said) or "equal"

    def time(cell: Record, stage: str) -> float | None:
        found = [row["to_ddp"] for row in cell["stages"] if row["stage"] == stage and not row["error"]]
        return found[0] if found else None

    columns: list[tuple[Any, ...]] = [
        *(("family", "family"), ("way", lambda cell: f"`{cell['way']}`"), ("backend", "backend"), ("with", "addition")),
        ("stages", lambda cell: ", ".join(row["stage"] for row in cell["stages"])),
        ("losses and DDP's", losses),
        ("breaks in layers beyond DDP's", lambda cell: worst(cell, "breaks_in_layers")),
        ("graphs with hf_zero", lambda cell: worst(cell, "of_hf_zero")),
        ("graphs after step 2", lambda cell: worst(cell, "graphs_later")),
        ("DDP's", lambda cell: worst(cell, "graphs_later_of_ddp")),
        *((f"time / DDP's, stage {stage}", lambda cell, stage=stage: time(cell, stage), ".2f") for stage in "0123"),
    ]
    return {"compiled": markdown(columns, [{**dict(zip(keys, key)), "stages": found} for key, found in rows.items()])}


REPORTS: dict[str, Callable[[Record], dict[str, str]]] = {
    "steps": steps,
    **{
        each.__name__: each
        for each in (
            capture,
            checkpoints,
            compiled,
            encoders,
            curves,
            links,
            host_time,
            first_step,
            axes,
            offload,
            matrix,
            parts,
            gpus,
            kernels,
            forecasts,
        )
    },
}


def tables_of(record: Record) -> dict[str, str]:
    """Returns the tables of a file of figures by name, the description of the run first. Documents show some of them."""
    return {"run": source(record), **REPORTS[record["kind"]](record)}


def report_of(record: Record) -> str:
    """Returns the complete report of a file of figures."""
    return "\n\n".join(tables_of(record).values())


def show_and_keep(name: str, options: argparse.Namespace, figures: Record) -> None:
    """Prints the tables of a benchmark's figures, and writes the figures with the description of the run."""
    run = describe_run(options)
    print(report_of(run | figures))
    keep(name, run, figures, options.json)


# ---- pictures ----

OURS, PEERS = (
    ("#0b6e4f", "#2aa876", "#7fd1ae", "#14b8c4", "#075f7a", "#9bc53d", "#3a5a40"),
    ("#8a8a8a", "#d1495b", "#edae49", "#6f4a8e"),
)

PANELS: dict[str, Callable[[Record], float | None]] = {
    "CPU a step / DDP": FIGURES["CPU"][0],
    "MB that a rank sends a step": lambda row: row["sent_bytes"] / 1e6,
    "peak MiB of a rank": lambda row: row["peak_bytes"] / MIB if row["peak_bytes"] is not None else None,
}
"""A panel's heading → its figure of an engine's row."""

_FONTS = ["DejaVu Sans", "Verdana", "sans-serif"]
"""Fonts of texts in figures. matplotlib measures texts in DejaVu Sans, and letters of Verdana have the same width."""
_ON_DARK = """<style>@media (prefers-color-scheme: dark) {
[fill='#ffffff'] { fill: #1e2129 } text { fill: #e8eaed }
[stroke='#000000'] { stroke: #9aa0a6 } [stroke='#cccccc'] { stroke: #5f6368 }
[stroke='#0b6e4f'] { stroke: #3f8f74 } [fill='#0b6e4f'] { fill: #3f8f74 } [stroke='#075f7a'] { stroke: #3f8fae }
[fill='#075f7a'] { fill: #3f8fae } [stroke='#3a5a40'] { stroke: #7a9a80 } [fill='#3a5a40'] { fill: #7a9a80 }
[stroke='#6f4a8e'] { stroke: #a584c4 } [fill='#6f4a8e'] { fill: #a584c4 }
}</style>"""
"""Colors for readers with a dark page: the ground, axes, words and the darkest lines change."""

Lines = dict[str, list[tuple[float, float]]]


def plot(record: Record, folder: Path, name: str) -> list[Path]:
    """Draws the pictures of a file of figures; returns their paths, which begin with this name."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {"steps": _plot_steps, "curves": _plot_curves, "links": _plot_links}
    return list(kinds[record["kind"]](record, folder / name)) if record["kind"] in kinds else []


def _plot_steps(record: Record, path: Path) -> Iterable[Path]:
    rows = record["engines"]
    titles, colors = [row["title"] for row in rows], [OURS[1] if row["is_ours"] else PEERS[0] for row in rows]
    figure, panels = _panels(len(PANELS), figsize=(13, 1.2 + 0.3 * len(rows)), sharey=True)
    for panel, (heading, value) in zip(panels, PANELS.items()):
        panel.barh(titles, [value(row) or 0 for row in rows], color=colors)
        panel.set_title(heading, fontsize=10)
        panel.tick_params(labelsize=8)
    panels[0].invert_yaxis()
    yield _saved(figure, record, path.with_name(f"{path.name}.svg"))


def _plot_curves(record: Record, path: Path) -> Iterable[Path]:
    for name, curve in record["curves"].items():
        drawn = [(heading, lines) for heading, value in PANELS.items() if (lines := _lines_of(curve["points"], value))]
        figure, panels = _panels(len(drawn), figsize=(4.4 * len(drawn), 4.2))
        for panel, (heading, lines) in zip(panels, drawn):
            _draw(panel, lines)
            panel.set_title(heading, fontsize=10)
            panel.set_xlabel(curve["varied"])
            panel.set_ylim(bottom=0)
        # Below the panels: inside of one, names would cover lines.
        figure.legend(
            *panels[0].get_legend_handles_labels(), fontsize=8, ncol=3, loc="lower center", bbox_to_anchor=(0.5, 0.03)
        )
        yield _saved(figure, record, path.with_name(f"{path.name}-{name}.svg"), bottom=0.17)


def _lines_of(points: list[Record], value: Callable[[Record], float | None]) -> Lines:
    """Engine → points (varied value, figure), for measured engines."""
    lines: Lines = {}
    for point in points:
        for row in point["engines"]:
            if (found := value(row)) is not None:
                lines.setdefault(row["title"], []).append((point["value"], found))
    return lines


def _plot_links(record: Record, path: Path) -> Iterable[Path]:
    """Step time over the link's rate, measured and forecast, one panel per delay."""
    delays = sorted({run["delay_ms"] for run in record["runs"]})
    figure, panels = _panels(len(delays), figsize=(5 * len(delays), 5))
    labels = dict.fromkeys(f"{run['title']}, {run['model']}" for run in record["runs"])
    colors = _colors(labels)
    shown: dict[str, Any] = {}
    for panel, delay in zip(panels, delays):
        measured: Lines = {}
        forecast: Lines = {}
        for run in sorted((run for run in record["runs"] if run["delay_ms"] == delay), key=lambda run: run["mbit"]):
            label = f"{run['title']}, {run['model']}"
            measured.setdefault(label, []).append((run["mbit"], run["step_ms"]))
            if run["simulated_ms"] is not None:
                forecast.setdefault(label, []).append((run["mbit"], run["simulated_ms"]))
        _draw(panel, measured, forecast, colors)
        shown |= {line.get_label(): line for line in panel.get_lines() if line.get_label() in labels}
        panel.set(xscale="log", yscale="log", xlabel="Mbit/s", ylabel="ms a step")
        panel.set_title(f"delay {delay:g} ms; dashed: the planner's forecast", fontsize=10)
    figure.legend(handles=[shown[label] for label in labels if label in shown], fontsize=7, ncol=5, loc="lower center")
    yield _saved(figure, record, path.with_name(f"{path.name}.svg"), bottom=0.12)


def _panels(count: int, **settings: Any) -> tuple[Any, Any]:
    """A figure and its axes, side by side."""
    # Import here: most users of this module draw nothing, and the import takes more than a second.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, count, squeeze=False, **settings)
    return figure, panels[0]


def _colors(titles: Iterable[str]) -> dict[str, str]:
    left = {True: iter(OURS * 3), False: iter(PEERS * 3)}
    return {title: next(left[title.startswith("hf_zero")]) for title in titles}


def _draw(panel: Any, lines: Lines, dashed: Lines | None = None, colors: dict[str, str] | None = None) -> None:
    colors = colors or _colors(lines)
    for title, points in lines.items():
        color = colors[title]
        panel.plot(*zip(*points), marker="o", markersize=4, color=color, label=title)
        if dashed and title in dashed:
            panel.plot(*zip(*dashed[title]), linestyle="--", linewidth=1, color=color)
    panel.grid(alpha=0.25)
    panel.tick_params(labelsize=8)


def _saved(figure: Any, record: Record, path: Path, bottom: float = 0.02) -> Path:
    from matplotlib import pyplot

    said = f"{record['cpu_model']}, torch {record['torch']}, commit {record['commit']}, {record['date'][:10]}"
    figure.text(0.995, 0.005, said, ha="right", va="bottom", fontsize=6, color="#777777")
    figure.tight_layout(rect=(0, bottom, 1, 1))
    # Without the date, the program's version and random ids, the same figures result in the same file.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hf_zero", "font.sans-serif": _FONTS}):
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    # Colors as attributes: a style sheet does not replace those of an element's own style.
    drawn = re.sub(
        r'(<(?!text)[^>]*) style="([^"]*)"', lambda found: found[1] + _as_attributes(found[2]), picture.getvalue()
    )
    path.write_text(drawn.replace("</svg>", f"{_ON_DARK}\n</svg>"), encoding="utf-8")
    return path


def _as_attributes(style: str) -> str:
    pairs = (pair.partition(":") for pair in style.split(";"))
    return "".join(f' {name.strip()}="{value.strip()}"' for name, _, value in pairs)


# ---- files and documents ----


def read_record(path: Path) -> Record:
    """Reads a file of figures, with the description of its run at the top.

    Raises:
        ValueError: there are no tables for this kind of file.
    """
    figures = json.loads(path.read_text(encoding="utf-8"))
    record = {**figures.get("machine", {}), **figures.get("run", {}), **figures}
    kind = record.setdefault("kind", _KINDS.get(re.split(r"[-.]", path.name)[0]))
    if kind is None:
        raise ValueError(f"{path} has no tables: it has to say its kind")
    if kind == "steps":
        record.setdefault("left_out", {})
        record["engines"] = [_described(row["name"]) | row for row in record["engines"]]
    return record


def _described(name: str) -> Record:
    """Returns the engine's description for rows without their own."""
    return {what: getattr(ENGINES[name], what) for what in ("title", "settings", "is_ours", "is_exact")}


@cache
def kept_tables(name: str) -> dict[str, str]:
    """Returns the tables of a kept file."""
    return tables_of(read_record(RESULTS / name))


def with_tables(text: str) -> str:
    """Returns a document with its tables replaced by the kept figures'."""

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
    parser.add_argument(
        "--docs", action="store_true", help="write the kept figures into README.md, docs/ and RESULTS.md"
    )
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
