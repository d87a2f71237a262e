"""Measured figures: tables and pictures are those of the kept files, and sentences say what the files say."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import tables
from launching import ROOT
from tables import verdict

RESULTS = ROOT / "scripts" / "bench" / "results"
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in tables.documents()}


def kept(name: str) -> dict[str, Any]:
    return tables.read_record(RESULTS / name) if name in TABLED else json.loads((RESULTS / name).read_text())


TABLED = {found[2] for text in PAGES.values() for found in tables._TABLE.finditer(text)}


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_those_of_the_kept_figures(page):
    assert tables.with_tables(PAGES[page]) == PAGES[page], "run: python scripts/bench/tables.py --docs"


def test_every_kept_file_that_a_table_is_made_of_tells_machine_and_date():
    for name in TABLED:
        said = tables.tables_of(kept(name))["run"]
        assert re.search(r"torch \d.*commit \w+, 20\d\d-\d\d-\d\d", said), name


SHOWN = {
    ((ROOT / page).parent / found).resolve()
    for page, text in PAGES.items()
    for found in re.findall(r"\]\(((?:\.\./\.\./docs/)?figures/\S+?\.(?:png|svg))\)", text)
}


def test_every_picture_of_figures_that_a_page_shows_is_there():
    assert SHOWN and all(picture.is_file() and picture.parent == tables.PICTURES for picture in SHOWN)


@pytest.mark.slow
def test_pictures_of_the_kept_figures_are_those_that_pages_show(tmp_path):
    drawn = {path.name for name in TABLED for path in tables.plot(kept(name), tmp_path, Path(name).stem)}
    # Drawn by offload.py together with its own record, and by report_picture.py from a run.
    assert {picture.name for picture in SHOWN} == drawn | {"offload.png", "report.svg"}


def test_no_page_quotes_figures_without_a_kept_file():
    named = {found for text in PAGES.values() for found in re.findall(r"scripts/bench/results/([\w.-]+\.json)", text)}
    assert named >= TABLED and all((RESULTS / name).is_file() for name in named)
    assert not any("without a kept record" in text for text in PAGES.values())


def peaks_in_words(found: dict) -> list[str]:
    errors = [cell["peak_error"] for cell in found["cells"]]
    assert max(abs(cell["state_error"]) for cell in found["cells"]) <= 0.02
    return [
        "State was forecast at most 2 % too high",
        f"{-100 * min(errors):.1f} % too low and {100 * max(errors):.1f} % too high, in {len(errors)} cells",
    ]


def choices_in_words(found: dict) -> list[str]:
    right, limits = [case["is_right"] for case in found["cases"]], [case["mb"] for case in found["cases"]]
    models = {case["model"] for case in found["cases"]}
    assert len(models) == 3 and min(limits) == 400
    return [f"did not, in {sum(right)} of {len(right)} cases", f"{min(limits)} to {max(limits)} MB a rank"]


def links_in_words(found: dict) -> list[str]:
    forecast = [run for run in found["runs"] if run["error"] is not None]
    nearly_all = [run["error"] for run in forecast if run["model"] == "30m-short" and run["mbit"] == 100]
    others = [run["error"] for run in forecast if not (run["model"] == "30m-short" and run["mbit"] == 100)]

    def span(errors: list[float]) -> str:
        least, most = 100 * min(errors), 100 * max(errors)
        if most < 0:
            return f"between {-least:.0f} % and {-most:.0f} % below"
        return f"between {-least:.0f} % below and {most:.0f} % above"

    return [f"{span(nearly_all)} what was measured where a step is nearly all traffic", f"{span(others)} elsewhere"]


def slow_links_in_words(found: dict) -> list[str]:
    links: dict[tuple, dict[str, float]] = {}
    for run in found["runs"]:
        links.setdefault((run["mbit"], run["delay_ms"], run["model"]), {})[run["title"]] = run["step_ms"]
    longer = {mbit for (mbit, *_), ms in links.items() if ms["hf_zero stage 3"] > 1.1 * ms["DDP"]}
    int8 = "hf_zero stage {}, int8 wire".format
    shorter = {mbit for (mbit, *_), ms in links.items() if max(ms[int8(2)], ms[int8(3)]) < ms["DDP"]}
    rates = {mbit for mbit, *_ in links}
    assert max(longer) < min(rates - longer) and max(shorter) < min(rates - shorter)
    return [
        f"At {max(longer):g} Mbit/s and less, stage 3 takes over 10 % longer than DDP",
        f"At {max(shorter):g} Mbit/s and less, stages 2 and 3 with an `int8` wire take less time than DDP",
    ]


def bf16_in_words(found: dict) -> list[str]:
    stage_3 = found["compared"]["stage 3"]
    sent = {way: sum(found["curves"][way][0]["sent_bytes"].values()) for way in found["compared"] if "stage" in way}
    return [
        f"the dev loss over training is {stage_3['mean_distance']:.4f} from DDP's on average",
        f"with an offset of {stage_3['mean_offset']:.4f}",
        f"DDP's own is {stage_3['between_seeds']:.4f} away",
        f"A step sends {sent['stage 3'] / 1e6:.2f} MB, not {sent['stage 3, param_dtype: float32'] / 1e6:.2f}",
    ]


def recoveries_in_words(found: dict) -> list[str]:
    runs, quiet = found["disk"], found["quiet"]["disk"]
    seconds = [run["recovery_s"] for run in runs]
    equal = sum(run["as_by_hand"] == "bit for bit" for run in runs)
    assert all(run["ended"] and run["rows_once"] for run in runs + quiet)
    return [
        f"In {len(runs)} of {len(runs)} runs the run ended by itself; {equal} were compared and equal bit for bit",
        f"{min(seconds):.0f} to {max(seconds):.0f} s after the kill (median {median(seconds):.0f} s)",
        f"{quiet[0]['recovery_s']:.0f} and {quiet[1]['recovery_s']:.0f} s after the kill",
    ]


def published_in_words(found: dict) -> list[str]:
    errors = [100 * point["error"] for point in found["points"] if not point["fitted"]]
    gpus = [point["gpus"] for point in found["points"]]
    return [
        f"on {min(gpus)} to {max(gpus):,} GPUs",
        f"the {len(errors)} predicted ones are between {-min(errors):.0f} % below and {max(errors):.0f} % above",
    ]


def models_in_words(found: dict) -> list[str]:
    curves = [curve for name, curve in found["curves"].items() if name not in ("size", "peaks")]
    [million] = {round(point["parameters"] / 1e6) for curve in curves for point in curve["points"]}
    return [f"on a GPT-2 of {million} M parameters, with one figure varied"]


def gpu_forecasts_in_words(found: dict) -> list[str]:
    # Of the measured peak beside the forecast, not the forecast beside the peak.
    above = [100 * (1 / (1 + cell["peak_error"]) - 1) for cell in found["cells"]]
    return [f"the peak of torch's allocator was {min(above):.0f} to {max(above):.0f} % above the forecast"]


def gpu_steps_in_words(found: dict) -> list[str]:
    ms = {way["way"]: way["step_ms"] for way in found["ways"]}
    return [
        f"hf_zero takes {ms['stage 2'] / ms['torch']:.1f} times as long as a plain loop",
        f"cost the host {ms['stage 2'] - (ms['torch'] + ms['torch, again']) / 2:.0f} ms",
    ]


SENTENCES: list[tuple[str, str, Callable[[dict], list[str]]]] = [
    ("docs/planning.md", "planned_peaks.json", peaks_in_words),
    ("docs/planning.md", "auto.json", choices_in_words),
    ("docs/planning.md", "links.json", links_in_words),
    ("docs/planning.md", "published.json", published_in_words),
    ("docs/planning.md", "gpu-forecasts.json", gpu_forecasts_in_words),
    ("scripts/bench/RESULTS.md", "gpu-bf16.json", gpu_steps_in_words),
    ("docs/benchmarks.md", "links.json", slow_links_in_words),
    ("scripts/bench/RESULTS.md", "curves.json", models_in_words),
    ("docs/precision.md", "bf16_ways.json", bf16_in_words),
    ("docs/elastic.md", "elastic.json", recoveries_in_words),
]


@pytest.mark.parametrize(("page", "name", "in_words"), SENTENCES, ids=[name for _, name, _ in SENTENCES])
def test_sentences_say_what_the_kept_figures_say(page, name, in_words):
    said = " ".join(PAGES[page].split())
    for words in in_words(kept(name)):
        assert words in said


def test_losses_that_the_readme_calls_equal_are():
    assert all(row["loss_difference"] == 0.0 for row in kept("step.json")["engines"] if row["is_exact"])
    assert "All losses are bitwise equal." in " ".join(PAGES["README.md"].split())


def row(title: str, cpu: float, sent: int, peak: int) -> dict[str, Any]:
    ratio = {"median": cpu, "lowest": cpu - 0.02, "highest": cpu + 0.02}
    return {
        "title": title,
        "is_ours": title.startswith("hf_zero"),
        "cpu_ratio": ratio,
        "sent_bytes": sent,
        "peak_bytes": peak,
    }


def test_a_row_names_each_figure_in_which_a_peer_is_ahead():
    peers = [row("DDP", 1.0, 100, 300), row("FSDP2", 1.4, 150, 200)]
    ahead, level, after = (
        row("hf_zero 1", 0.9, 100, 150),
        row("hf_zero 2", 1.0, 100, 200),
        row("hf_zero 3", 1.1, 130, 206),
    )
    rows = [*peers, ahead, level, after]
    assert verdict(ahead, rows) == verdict(level, rows) == "ahead or level in all"
    assert verdict(after, rows) == "CPU: DDP, 10 %; wire: DDP, 30 %; peak: FSDP2, 3 %"
    near = row("hf_zero 4", 1.03, 100, 200)
    assert verdict(near, [*rows, near]) == "CPU: DDP, 3 % (rounds overlap)"
    assert verdict(peers[0], rows) == ""
    rounding = {"is_exact": False}
    eight_bit_peer = row("FSDP2, 8-bit", 1.0, 50, 100) | rounding
    assert verdict(ahead, [*rows, eight_bit_peer]) == "ahead or level in all"
    eight_bit = row("hf_zero, 8-bit", 1.0, 60, 100) | rounding
    assert verdict(eight_bit, [*rows, eight_bit, eight_bit_peer]) == "wire: FSDP2, 8-bit, 20 %"
