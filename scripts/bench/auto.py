"""Tests `stage: auto` in a control group with little memory: the chosen settings must fit, and the rejected ones fail.

    python scripts/bench/auto.py                       # twelve model x memory cases: some minutes
    python scripts/bench/auto.py --cases gpt2:720:bf16:2 bert:340:nvme:2

A case is a model and the memory of each rank: a control group limits the ranks to this amount above their memory before the
model.
The ranks ask the planner and train three steps with the chosen settings. Then fresh ranks in the same group train three steps
with the fastest set-up among the ones that the planner calls too large: the kernel should kill them. If all are too large,
nothing is chosen, and the set-up with the lowest need should be killed. Needs root and memory control groups of version 1 or 2;
without them, the script prints this and ends with status 0.

Exits with status 1 if more than one case has a different outcome.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, describe_run, held_before, on_ranks, print_table, read_options, write_record
from planned_peaks import bert, gpt2, llama
from ranks import RankFailedError, RanksTimedOutError
from transformers import PreTrainedModel

from hf_zero.config import ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.forecast.fit import NothingFitsError
from hf_zero.planner.auto import assume, choose_config
from hf_zero.planner.batches import batch_of

STEPS, ROWS, LENGTH = 3, 2, 32
MOST_WRONG = 1
_KILLED = "exit code -9"
"""The end of a rank killed by the kernel."""

_GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


_SIZE = {"num_hidden_layers": 12, "vocab_size": 4096, "max_position_embeddings": LENGTH}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": partial(gpt2, n_layer=12, vocab_size=4096, n_positions=LENGTH),
    "bert": partial(bert, **_SIZE),
    "llama": partial(llama, **_SIZE, num_key_value_heads=8),
}
CASES = [
    *(f"{model}:{case}" for model in MODELS for case in ("520:memory:2", "640:memory:2", "450:memory:3")),
    *("gpt2:600:bf16:2", "bert:400:nvme:2", "llama:400:nvme:2"),
]


def hierarchy() -> Path | None:
    """Returns the folder in which memory control groups can be made; None without one."""
    for root in _GROUPS:
        path = root / f"hf-zero-auto-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        found = any((path / name).exists() for name in ("memory.limit_in_bytes", "memory.max"))
        path.rmdir()
        if found:
            return root
    return None


@contextmanager
def limited(root: Path, nbytes: int) -> Iterator[Path]:
    """Makes a control group with this limit in bytes."""
    path = root / f"hf-zero-auto-{os.getpid()}"
    path.mkdir()
    try:
        limit = next(each for each in (path / "memory.limit_in_bytes", path / "memory.max") if each.exists())
        limit.write_text(str(nbytes))
        yield path
    finally:
        path.rmdir()


def train(
    rank: int, world_size: int, *, model: str, tier: str, settings: Any, group: str, folder: str
) -> dict[str, Any]:
    """Joins the group, and trains with these settings or with the choice of auto."""
    held_before()
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.manual_seed(0)
    made = MODELS[model]().train()
    optimizer = torch.optim.AdamW(made.parameters(), fused=True)
    rejected, said, lines = None, settings, []
    if settings is None:
        kept = {"nvme": {"offload": {"optimizer": "nvme", "nvme_path": folder}}, "bf16": {"param_dtype": "bfloat16"}}
        open_config = ZeroConfig.from_dict({"stage": "auto", **kept.get(tier, {})})
        try:
            given = {"device": torch.device("cpu"), "mixed_precision": "no", "batch": assume(made, ROWS, LENGTH)}
            chosen = choose_config(open_config, made, [optimizer], **given)
        except NothingFitsError as error:
            return {"settings": None, "rejected": dict(error.least), "lines": [str(error)]}
        settings, rejected, lines = chosen.config.to_dict(), chosen.rejected, list(chosen.lines)
        said = dict(chosen.settings)
    engine = ZeroEngine(made, [optimizer], ZeroConfig.from_dict(settings))
    for _ in range(STEPS):
        made(**batch_of(made, ROWS, LENGTH)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.finish_parameters()
    engine.close()
    return {"settings": said, "rejected": rejected, "lines": lines}


def run_case(model: str, mb: int, tier: str, ranks: int, root: Path, time_limit_s: float) -> dict[str, Any]:
    """Runs a case: a model and the MB of a rank. Returns the chosen and the rejected settings, and the ends of both runs.

    `chosen_fits` is None if all set-ups were too large, `rejected_fails` if none was; `lines` are auto's log lines.
    """

    def run(settings: Any, folder: str) -> Any:
        with limited(root, ranks * mb * 10**6) as group:
            job = {"model": model, "tier": tier, "settings": settings, "group": str(group), "folder": folder}
            try:
                return on_ranks(train, ranks, limit_s=time_limit_s, **job)[0]
            except (RankFailedError, RanksTimedOutError) as error:
                return str(error)

    with tempfile.TemporaryDirectory(prefix="auto-") as folder:
        chosen = run(None, folder)
        has_told = isinstance(chosen, dict)
        rejected = chosen["rejected"] if has_told else None
        ended = "" if rejected is None else run(rejected, folder)
    # A run that hits the time limit does not prove a lack of memory.
    fails = None if rejected is None else isinstance(ended, str) and _KILLED in ended
    fits = None if has_told and chosen["settings"] is None else has_told
    return {
        "model": model,
        "mb": mb,
        "tier": tier,
        "ranks": ranks,
        "chosen": _words(chosen["settings"]) or "nothing" if has_told else chosen.strip().splitlines()[-1][:120],
        "rejected": _words(rejected),
        "lines": chosen["lines"] if has_told else [],
        "chosen_fits": fits,
        "rejected_fails": fails,
        "is_right": fails is True if fits is None else fits and fails is not False,
    }


def _words(settings: Any) -> str:
    return "" if settings is None else ", ".join(f"{name} {value}" for name, value in settings.items())


def main() -> int:
    options = read_options(__doc__, cases=(CASES, "MODEL:MB:TIER:RANKS"), time_limit_s=300.0)
    root = hierarchy()
    if root is None:
        print("skipped: memory control groups cannot be made here; they need root")
        return 0
    cases = []
    for text in options.cases:
        model, mb, tier, ranks = text.split(":")
        cases.append(run_case(model, int(mb), tier, int(ranks), root, options.time_limit_s))
        print(cases[-1], file=sys.stderr, flush=True)
        write_record(options.json or RESULTS / "auto.json", describe_run(options) | {"cases": cases})
    said = {True: "yes", False: "no", None: ""}
    columns = [
        *(("model", "model"), ("MB a rank", lambda case: f"{case['mb']}, {case['tier']}, {case['ranks']} ranks")),
        *(("chosen", "chosen"), ("it fits", lambda case: said[case["chosen_fits"]])),
        *(("left out as too large", "rejected"), ("that fails", lambda case: said[case["rejected_fails"]])),
    ]
    print_table("stage: auto in a control group", columns, cases)
    return int(sum(not case["is_right"] for case in cases) > MOST_WRONG)


if __name__ == "__main__":
    sys.exit(main())
