"""The report in a real browser, and its figures in TensorBoard and W&B."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

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


def logged_in_wandb(folder: Path, figure: str) -> list[float]:
    """What W&B has kept of a figure in the one run below a folder: in its file, names and JSON values are plain text."""
    [kept] = folder.glob("wandb/offline-run-*/run-*.wandb")
    # Between name and value: the field of a protobuf message, and the value's length.
    found = re.findall(re.escape(figure.encode()) + rb"\x82\x01.([\d.e+-]+)", kept.read_bytes(), re.DOTALL)
    return [float(value) for value in found]


def keeps_in_wandb(rank: int, world_size: int, folder: str, *, by_trainer: bool) -> None:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_SILENT": "true"}
    if by_trainer:
        trains(rank, world_size, folder, reported=False, max_steps=3, report_to=["wandb"])
    else:
        logs_to(rank, world_size, folder, "wandb")
    if rank == 0:
        import wandb

        wandb.finish()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("by_trainer", [True, False], ids=["Trainer", "accelerate"])
def test_wandb_has_the_same_figures(tmp_path, by_trainer):
    pytest.importorskip("wandb", reason="W&B is not installed")
    arguments = {"folder": str(tmp_path), "by_trainer": by_trainer}
    run_ranks(keeps_in_wandb, world_size=2, time_limit_s=150, keyword_arguments=arguments)
    times, prefix = (3, "train/") if by_trainer else (2, "")
    for figure in ("steps_per_s", "samples_per_s", "sent_mib", "wait_s", "peak_mib"):
        # In the run's history and, once more, in its summary.
        assert len(logged_in_wandb(tmp_path, f"{prefix}zero/{figure}")) >= times, figure


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
