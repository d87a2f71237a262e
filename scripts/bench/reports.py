"""Tables in Markdown, made of a file of figures and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from record import is_disturbed
from verdicts import behind, scores, verdict

Record = dict[str, Any]
MIB = 2**20
BEHIND = "where a peer is ahead"


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report_of(record: Record) -> str:
    """Everything that there is to say of a file of figures, its run first."""
    return "\n\n".join([source(record), *REPORTS[record["kind"]](record).values()])


def tables_of(record: Record) -> dict[str, str]:
    """The tables of a file of figures by name, for documents that show some of them."""
    return {"run": source(record), **REPORTS[record["kind"]](record)}


def source(record: Record) -> str:
    """Machine, versions and date in a sentence, and whether other work disturbed the run."""
    memory = f", {record['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in record else ""
    cores = f", {record['cores']} cores" if "cores" in record else ""
    said = (
        f"{record['cpu_model']}{cores}{memory}, {record.get('device', 'cpu')}; torch {record['torch']}, transformers "
        f"{record['transformers']}; commit {record['commit']}, {record['date'][:10]}"
    )
    if "load_before" in record and is_disturbed(record):
        said += (
            f". Other work was on the machine (load {record['load_before']:.1f} before, {record['load_after']:.1f} after): "
            "bytes and memory are not disturbed by that, ratios of CPU time little, seconds much"
        )
    return " ".join([f"{said}.", *([record["note"]] if "note" in record else [])])


# ---- a step ----


def steps(record: Record) -> dict[str, str]:
    rows = record["engines"]
    overview = ((*cells, verdict(row, rows) or "peer") for row, cells in ((row, _step_cells(row)) for row in rows))
    headings = (
        "engine",
        "CPU a step / DDP",
        "wire MB",
        "peak MiB",
        "first step, CPU s",
        "losses",
        BEHIND,
    )
    short = (
        (row["title"], f"{row['cpu_ratio']['median']:.2f}", _megabytes(row), _peak(row), verdict(row, rows) or "")
        for row in rows
        if row["name"] in SHORT
    )
    tables = {
        "step": markdown(headings, overview),
        "step-short": markdown(("engine", "CPU a step / DDP", "wire MB", "peak MiB", BEHIND), short),
        "step-best": markdown(("figure", "hf_zero's best", "the peers' best", ""), scores(rows)),
        "step-settings": markdown(("engine", "settings"), ((row["title"], row["settings"]) for row in rows)),
    }
    if record["left_out"]:
        tables["step-left-out"] = left_out(record)
    return tables


SHORT = (
    "ddp",
    "zero_optimizer",
    "fsdp2",
    "fsdp2_kept",
    "hf_zero0",
    "hf_zero1",
    "hf_zero2",
    "hf_zero3",
)
"""Engines of the table that fits beside others."""


def left_out(record: Record) -> str:
    return markdown(("not measured", "why"), ((each["title"], each["why"]) for each in record["left_out"].values()))


def _step_cells(row: Record) -> tuple[str, ...]:
    cpu = row["cpu_ratio"]
    first = row.get("first_step_cpu_s")
    return (
        row["title"],
        f"{cpu['median']:.2f} ({cpu['lowest']:.2f}-{cpu['highest']:.2f})",
        _megabytes(row),
        _peak(row),
        "" if first is None else f"{first:.2f}",
        "DDP's bit for bit" if row["loss_difference"] == 0 else f"up to {row['loss_difference']:.1g} from DDP's",
    )


def _megabytes(row: Record) -> str:
    return f"{row['sent_bytes'] / 1e6:.1f}"


def _peak(row: Record) -> str:
    return "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:.0f}"


# ---- checkpoints ----


def checkpoints(record: Record) -> dict[str, str]:
    saves = {name: median(seconds) for name, seconds in record["saves"].items()}
    loads = {name: median(load["seconds"]) for name, load in record["resumes"].items()}
    reads = {name: max(load["read_bytes"]) for name, load in record["resumes"].items()}
    merges = {name: figures["seconds"] for name, figures in record["merges"].items()}
    peaks = {name: figures["peak_bytes"] for name, figures in record["merges"].items()}
    seconds, megabytes = "{:.2f} s".format, lambda value: f"{value / 1e6:.0f} MB"
    at_once = {name: value for name, value in saves.items() if name.endswith("at once") or name in WHOLE_SAVES}
    stalls = {name: value for name, value in saves.items() if name.endswith("stall") or name in WHOLE_SAVES}
    rows = [
        *_compared("a save that training waits for", at_once, seconds),
        *_compared("training stands still for a save", stalls, seconds),
        *_compared("a cold resume", loads, seconds),
        *_compared("a rank reads to resume", reads, megabytes),
        *_compared("export to one model folder", merges, seconds),
        *_compared("the export's peak", peaks, lambda value: f"{value / MIB:.0f} MiB"),
    ]
    return {"checkpoints": markdown(("what", "way", "", BEHIND), rows)}


WHOLE_SAVES = ("torch.save", "DCP")
"""Peers' saves of a model and its optimizer, for all of which training waits."""


def _compared(what: str, values: dict[str, float], text: Callable[[float], str]) -> Iterable[tuple[str, str, str, str]]:
    peers = [(name, value) for name, value in values.items() if not _is_ours(name)]
    for name, value in values.items():
        said = behind(value, peers) if _is_ours(name) else "peer"
        yield what, _way(name), text(value), said or "ahead or level"


def _is_ours(name: str) -> bool:
    return name.startswith(("stage", "hf-zero"))


def _way(name: str) -> str:
    engine = name.removesuffix(": at once").removesuffix(": stall")
    return f"hf_zero {engine}" if engine.startswith("stage") else engine


# ---- what one figure changes ----


def curves(record: Record) -> dict[str, str]:
    return {f"curve-{name}": _curve(curve) for name, curve in record["curves"].items()}


def _curve(curve: Record) -> str:
    rows = []
    for point in curve["points"]:
        engines = point["engines"]
        for row in engines:
            has_times = "cpu_ratio" in row
            rows.append(
                (
                    str(point["value"]),
                    row["title"],
                    f"{row['cpu_ratio']['median']:.2f}" if has_times else "",
                    _megabytes(row),
                    _peak(row),
                    verdict(row, engines),
                )
            )
    return markdown((curve["varied"], "engine", "CPU a step / DDP", "wire MB", "peak MiB", BEHIND), rows)


# ---- shaped links ----


def links(record: Record) -> dict[str, str]:
    rows = []
    groups: dict[tuple, list[Record]] = {}
    for run in record["runs"]:
        groups.setdefault((run["mbit"], run.get("delay_ms", 0), run["model"]), []).append(run)
    for (mbit, delay_ms, model), runs in sorted(groups.items(), reverse=True):
        peers = [(run["title"], run["step_ms"]) for run in runs if not run["title"].startswith("hf_zero")]
        for run in runs:
            is_predicted = run["simulated_ms"] is not None
            rows.append(
                (
                    f"{mbit:g} Mbit/s" + (f", {delay_ms:g} ms" if delay_ms else ""),
                    model,
                    run["title"],
                    f"{run['step_ms']:.0f}",
                    f"{run['simulated_ms']:.0f}" if is_predicted else "",
                    f"{run['error']:+.0%}".replace("%", " %") if is_predicted else "",
                    behind(run["step_ms"], peers) if run["title"].startswith("hf_zero") else "",
                )
            )
    return {"links": markdown(("link", "model", "engine", "ms a step", "forecast", "error", BEHIND), rows)}


# ---- the host's time, the first step, split models, and offload ----


def host_time(record: Record) -> dict[str, str]:
    from peers import ENGINES

    peers = [
        (ENGINES[row["name"]].title, row["to_ddp"]) for row in record["engines"] if not ENGINES[row["name"]].is_ours
    ]
    rows = [
        (
            ENGINES[row["name"]].title,
            *(f"{row['cpu_ms']:.1f}", f"{row['to_ddp']:.2f}", f"{row['to_fsdp2']:.2f}"),
            *(f"{row['thread_ms']:.1f}", f"{row['thread_to_ddp']:.2f}", f"{row['thread_to_fsdp2']:.2f}"),
            behind(row["to_ddp"], peers) if ENGINES[row["name"]].is_ours else "",
        )
        for row in record["engines"]
    ]
    headings = ("engine", "host ms a step", "to DDP", "to FSDP2", "Python's thread, ms", "to DDP", "to FSDP2", BEHIND)
    return {"host-time": markdown(headings, rows)}


def first_step(record: Record) -> dict[str, str]:
    rows = record["engines"]
    peers = [(row["name"], row["seconds"]) for row in rows if not _is_ours(row["name"])]
    cells = [
        (
            _way(row["name"]),
            *(f"{row['seconds']:.2f}", f"{row['seconds_later']:+.2f}"),
            *(f"{row['cpu_seconds']:.2f}", f"{row['cpu_seconds_later']:+.2f}"),
            behind(row["seconds"], peers) if _is_ours(row["name"]) else "",
        )
        for row in rows
    ]
    return {"first-step": markdown(("engine", "seconds", "to DDP", "CPU s", "to DDP", BEHIND), cells)}


def axes(record: Record) -> dict[str, str]:
    compared = {"CPU": "cpu_s", "wire": "sent_bytes", "peak": "peak_bytes"}
    rows = record["engines"]
    peers = [row for row in rows if not _is_ours(row["name"])]

    def said_of(row: dict[str, Any]) -> str:
        found = [
            behind(row[key], [(peer["name"], peer[key]) for peer in peers], what) for what, key in compared.items()
        ]
        return "; ".join(filter(None, found)) or "ahead or level in all"

    cells = [
        (
            _way(row["name"]),
            *(f"{row['cpu_s']:.3f}", f"{row['to_fsdp2']:.2f}"),
            *(f"{row['sent_bytes'] / 1e6:.1f}", f"{row['peak_bytes'] / MIB:.0f}"),
            said_of(row) if _is_ours(row["name"]) else "peer",
        )
        for row in rows
    ]
    return {"axes": markdown(("engine", "CPU s a step", "to FSDP2", "wire MB", "peak MiB", BEHIND), cells)}


def offload(record: Record) -> dict[str, str]:
    def mib(nbytes: float | None) -> str:
        return "" if nbytes is None else f"{nbytes / MIB:.0f}"

    rows = [
        (
            f"`{way['way']}`",
            f"{way['step_ms']:.0f}",
            f"{way['optimizer_ms']:.0f}",
            f"{way['cpu_ms']:.0f}",
            mib(way["host_peak_bytes"]),
            mib(way["written_bytes_a_step"]),
        )
        for way in record["ways"]
    ]
    headings = ("optimizer state", "ms a step", "of it optimizer", "CPU ms a step", "peak MiB", "written MiB a step")
    tables = {"offload": markdown(headings, rows)}
    if record["left_out"]:
        tables["offload-left-out"] = markdown(("not measured", "why"), record["left_out"].items())
    return tables


REPORTS: dict[str, Callable[[Record], dict[str, str]]] = {
    "steps": steps,
    "checkpoints": checkpoints,
    "curves": curves,
    "links": links,
    "host_time": host_time,
    "first_step": first_step,
    "axes": axes,
    "offload": offload,
}
