"""The report in a real browser, and its figures in TensorBoard, W&B, trackio and MLflow."""

import json
import os
import shutil
import sqlite3
import struct
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from accelerate_job import make_accelerator
from ranks import run_ranks
from report_runs import trains
from trainer_job import as_launched
from training import gpt2, gpt2_batch

from hf_zero.report.page import write_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def tags_of(folder: Path) -> dict[str, list[float]]:
    """The scalars in TensorBoard's event files below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[float]] = {}
    for file in folder.rglob("events.out.tfevents*"):
        events = EventAccumulator(str(file))
        events.Reload()
        found |= {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_tensorboard_has_trainers_figures(tmp_path):
    pytest.importorskip("tensorboard")
    arguments = {"folder": str(tmp_path), "max_steps": 3, "report_to": ["tensorboard"]}
    run_ranks(trains, world_size=2, time_limit_s=100, keyword_arguments=arguments)
    tags = tags_of(tmp_path)
    for figure in ("steps_per_s", "samples_per_s", "sent_mib", "wait_s", "peak_mib"):
        # Trainer puts what it logs in training under `train/`.
        assert len(tags[f"train/zero/{figure}"]) == 3, sorted(tags)


def logs_to(rank: int, world_size: int, folder: str, tracker: str) -> None:
    """A loop of accelerate's."""
    import torch

    as_launched(rank, world_size)
    door = "plugin stage=2,report=true"
    accelerator = make_accelerator(door, cpu=True, project_dir=folder, log_with=tracker)
    accelerator.init_trackers("first")
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(4):
        accelerator.backward(model(**gpt2_batch(torch.Generator().manual_seed(step), 2)).loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            accelerator.log({"loss": 1.0}, step=step)
    # Nothing was trained since: there are no figures of a step.
    accelerator.log({"eval_loss": 2.0}, step=step)
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.end_report()


@pytest.mark.timeout(120)
def test_tensorboard_has_the_figures_of_an_accelerate_loop(tmp_path):
    pytest.importorskip("tensorboard")
    arguments = {"folder": str(tmp_path), "tracker": "tensorboard"}
    run_ranks(logs_to, world_size=2, time_limit_s=100, keyword_arguments=arguments)
    tags = tags_of(tmp_path)
    for figure in ("steps_per_s", "samples_per_s", "tokens_per_s", "sent_mib", "wait_s", "peak_mib"):
        assert len(tags[f"zero/{figure}"]) == 2, sorted(tags)
    assert tags["eval_loss"] == [2.0]


@dataclass
class Kept:
    """What a tracker keeps of a run: its config, and name of a figure → (step, value) as often as the figure was logged."""

    config: dict[str, Any]
    figures: dict[str, list[tuple[int, float]]]


def records_of(path: Path) -> Iterator[Any]:
    """The records of W&B's file: blocks of 32 KiB with pieces of records, as in a log of LevelDB's."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = path.read_bytes(), len(b":W&B") + 3, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", data, place + 4)
        piece = data[place + 7 : place + 7 + length]
        place += 7 + length
        # A whole record, or the first, a middle or the last of its pieces.
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            yield record


def kept_by_wandb(folder: Path) -> Kept:
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    kept = Kept({}, {})
    for record in records_of(file):
        for item in [*record.run.config.update, *record.config.update]:
            kept.config[item.key or item.nested_key[0]] = json.loads(item.value_json)
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for name, value in row.items():
            # Trainer has a step of its own beside W&B's.
            kept.figures.setdefault(name, []).append((row.get("train/global_step", row["_step"]), value))
    return kept


def kept_by_trackio(folder: Path) -> Kept:
    [file] = folder.glob("trackio/*.db")
    with closing(sqlite3.connect(file)) as database:
        [[config]] = database.execute("select config from configs").fetchall()
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    kept = Kept(json.loads(config), {})
    for step, text in rows:
        row = json.loads(text)
        for name, value in row.items():
            kept.figures.setdefault(name, []).append((row.get("train/global_step", step), value))
    return kept


def kept_by_mlflow(folder: Path) -> Kept:
    with closing(sqlite3.connect(folder / "mlflow.db")) as database:
        kept = Kept(dict(database.execute("select key, value from params").fetchall()), {})
        for name, step, value in database.execute("select key, step, value from metrics order by step"):
            kept.figures.setdefault(name, []).append((step, value))
    return kept


TRACKERS = {"wandb": kept_by_wandb, "trackio": kept_by_trackio, "mlflow": kept_by_mlflow}


def keeps_in(rank: int, world_size: int, folder: str, tracker: str, *, by_trainer: bool) -> None:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_SILENT": "true"}
    os.environ |= {"TRACKIO_DIR": f"{folder}/trackio", "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    if by_trainer:
        trains(rank, world_size, folder, max_steps=3, save_strategy="no", eval_strategy="no", report_to=[tracker])
    else:
        logs_to(rank, world_size, folder, tracker)
    if rank == 0 and tracker == "wandb":
        import wandb

        wandb.finish()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("by_trainer", [True, False], ids=["Trainer", "accelerate"])
@pytest.mark.parametrize("tracker", TRACKERS)
def test_trackers_have_the_same_figures_once_and_the_settings(tmp_path, tracker, by_trainer):
    pytest.importorskip(tracker, reason=f"{tracker} is not among the tests' packages")
    arguments = {"folder": str(tmp_path), "tracker": tracker, "by_trainer": by_trainer}
    run_ranks(keeps_in, world_size=2, time_limit_s=250, keyword_arguments=arguments)
    kept = TRACKERS[tracker](tmp_path)
    # MLflow has Trainer's own names, the others a group for training.
    prefix = "train/zero/" if by_trainer and tracker != "mlflow" else "zero/"
    steps = [1, 2, 3] if by_trainer else [1, 3]
    for figure in ("steps_per_s", "samples_per_s", "sent_mib", "wait_s", "peak_mib"):
        assert [step for step, _ in kept.figures[f"{prefix}{figure}"]] == steps, kept.figures
    assert all(name.startswith(prefix) for name in kept.figures if "zero" in name), kept.figures.keys()
    if by_trainer:
        assert kept.config["zero"] == "stage=2,report=true"
        settings = kept.config["parallelism_config"]
        assert settings in ({"stage": 2, "report": True}, "{'stage': 2, 'report': True}")


_PROBE = """
<script>
addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(
    each => !each.closest(".scroll") && !each.closest("svg") && each.getBoundingClientRect().right > innerWidth + 1);
  const small = [...document.querySelectorAll("p, td, th, dd, span")].filter(
    each => each.textContent.trim() && parseFloat(getComputedStyle(each).fontSize) < 11.5);
  const style = getComputedStyle(document.body);
  const told = {wide: wide.map(each => each.outerHTML.slice(0, 90)), small: small.length, width: innerWidth,
    page: style.backgroundColor, text: style.color,
    lines: [...document.querySelectorAll(".plot path")].filter(each => each.getBoundingClientRect().width > 50).length};
  document.title = "told " + JSON.stringify(told);
});
</script>
"""


def shown_in(browser: str, page: Path, *arguments: str) -> dict:
    """What a headless browser finds of a page as it lays it out."""
    probed = page.with_name("probed.html")
    frame = page.with_name("frame.html")
    probed.write_text(page.read_text().replace("</body>", _PROBE + "</body>"))
    # A window cannot be as narrow as a phone; a frame in it can.
    frame.write_text(
        '<iframe src="probed.html" style="width:375px;height:800px;border:0"></iframe><script>setTimeout(() => '
        "{ document.title = frames[0].document.title; }, 1500);</script>"
    )
    dumped = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            f"--user-data-dir={page.parent / 'profile'}",
            "--virtual-time-budget=5000",
            *arguments,
            "--dump-dom",
            f"file://{frame}",
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout
    title = dumped.partition("<title>told ")[2].partition("</title>")[0]
    return json.loads(title.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace("&quot;", '"'))


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_browser_shows_the_page_on_a_phone_in_the_dark_and_on_paper(browser, tmp_path):
    arguments = {"folder": str(tmp_path / "run"), "max_steps": 12}
    run_ranks(trains, world_size=2, time_limit_s=100, keyword_arguments=arguments)
    page = write_page(tmp_path / "run", tmp_path / "page.html")
    light = shown_in(browser, page)
    assert light["width"] == 375 and light["wide"] == [] and light["small"] == 0
    assert light["lines"] >= 4
    dark = shown_in(browser, page, "--blink-settings=preferredColorScheme=0")
    assert light["page"] != dark["page"] and light["text"] != dark["text"]
    printed = tmp_path / "page.pdf"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    subprocess.run(
        [*command, f"--print-to-pdf={printed}", f"file://{page}"], check=True, capture_output=True, timeout=100
    )
    assert printed.read_bytes().startswith(b"%PDF") and printed.stat().st_size > 10_000
