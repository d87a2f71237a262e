"""Runs in their own process for the tests of offload: one to measure its memory, and one to be killed.

python offload_job.py memory OFFLOAD_JSON [FROZEN_LAYERS]
python offload_job.py train OFFLOAD_JSON FOLDER STEPS
"""

import json
import os
import re
import sys
from pathlib import Path

import torch
from torch import nn
from training import fused_adamw, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine, seal_state, write_state

WIDTH, LAYERS, STEPS = 1024, 32, 4


def status_bytes(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text).group(1)) * 1024


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def make(
    width: int, layers: int, settings: dict, frozen: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    model[:frozen].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[frozen:].parameters(), lr=1e-3, fused=True)
    return model, optimizer, ZeroEngine(model, [optimizer], settings)


def measure(offload: dict, frozen: int = 0) -> dict[str, int]:
    """Returns the growth in bytes above the memory before the model, and its parts.

    Args:
        frozen: number of first layers which are not trained.
    """
    settings = {"stage": 3 if "params" in offload else 2, "bucket_bytes": "4MiB", "offload": offload}
    model, optimizer, engine = make(64, 2, settings)
    for _ in range(2):
        step(model, optimizer, torch.randn(1, 64))
    engine.close()
    del model, optimizer, engine
    before = status_bytes("VmRSS")
    model, optimizer, engine = make(WIDTH, LAYERS, settings, frozen)
    if "params" in offload:
        # The whole model was in memory at first, so the high-water mark is reset here.
        Path("/proc/self/clear_refs").write_text("5")
    for _ in range(STEPS):
        step(model, optimizer, torch.randn(1, WIDTH))
    report = engine.memory_report()
    rows = {row.kind: row.bytes for row in report.rows}
    growth = status_bytes("VmHWM") - before
    traffic = report.traffic
    saved = sum(row.tensor.nbytes for row in engine.state.rows())
    anonymous = status_bytes("RssAnon")
    rows_held = list(engine.state.rows())
    checksum = sum(row.tensor.sum().item() for row in rows_held)
    return {
        "growth": growth,
        "weights": rows["parameters"],
        "frozen": rows.get("frozen parameters", rows["frozen parameters and buffers"]),
        "gathered": rows["gathered parameters, at most"],
        "layer": 4 * WIDTH * WIDTH,
        "gradients": sum(nbytes for kind, nbytes in rows.items() if kind.startswith("gradient")),
        "state": rows["optimizer state"],
        "window": traffic.window_bytes if traffic else 0,
        "written": traffic.written_bytes_a_step if traffic else 0,
        "saved": saved,
        "anonymous growth of a save": status_bytes("RssAnon") - anonymous,
        "finite": int(checksum == checksum),
    }


def train(offload: dict, folder: Path, steps: int) -> None:
    """Resumes from `folder` if it has a checkpoint, trains to `steps`, saves after the second step, and prints all losses."""
    torch.manual_seed(0)
    model = gpt2()
    optimizer = fused_adamw(model)
    engine = ZeroEngine(model, [optimizer], {"stage": 2, "bucket_bytes": "20KiB", "offload": offload})
    first = 0
    if (folder / "weights.pt").is_file():
        with torch.no_grad():
            model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
        load_engine(engine, folder / ZERO_FOLDER)
        first = 2
    for number in range(first, steps):
        loss = model(**gpt2_batch(torch.Generator().manual_seed(number), 2)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(number, loss.item().hex(), engine.tier.name, flush=True)
        if number == 1 and first == 0:
            torch.save(model.state_dict(), folder / "weights.pt")
            seal_state(engine, folder, write_state(engine, folder / ZERO_FOLDER))
            print("saved", flush=True)
    print("files", engine.tier.files and engine.tier.files.folder.path, flush=True)
    if os.environ.get("WAIT_TO_BE_KILLED"):
        sys.stdin.read()


def measure_each(offloads: list[dict], frozen: int) -> list[dict[str, int]]:
    """Returns the figures of consecutive runs, each in its own process forked from this one, which has made all imports."""
    found = []
    for offload in offloads:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, json.dumps(measure(offload, frozen)).encode())
            # Skip the exit functions of the parent.
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as figures:
            found.append(figures.read())
        assert os.waitpid(child, 0)[1] == 0
    return [json.loads(figures) for figures in found]


if __name__ == "__main__":
    if sys.argv[1] == "memory":
        print(json.dumps(measure_each(json.loads(sys.argv[2]), int(sys.argv[3]))))
    else:
        train(json.loads(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
