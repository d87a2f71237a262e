"""Runs a folder of scripts, each with one fault, and prints a table of results.

    python tests/support/fault_scripts.py FOLDER [SCRIPT ...]

A script shows its fault by a nonzero exit status or a printed `FAILS`. For some scripts an error of hf_zero is the correct end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 600


@dataclass(frozen=True)
class Start:
    """How one script is started.

    Attributes:
        ranks: number of ranks under torchrun; 0 runs plain `python SCRIPT`.
        zero: value of `--zero`, if the script itself does not turn hf_zero on.
        arguments: one run of the script for each entry.
            refusal: an error of hf_zero with these words is a correct end.
            right: pattern printed by each rank if the script works instead of being refused.
    """

    ranks: int = 0
    zero: str = ""
    arguments: tuple[tuple[str, ...], ...] = ((),)
    refusal: str = ""
    right: str = "$^"


STAGES = (("0",), ("1",), ("2",), ("3",))
STARTS = {
    "buffers_of_a_later_step": Start(),
    "card_arguments_lost": Start(2, "2"),
    "card_link": Start(),
    "checkpoint_edited_by_hand": Start(
        2, "2", tuple((kind,) for kind in ["rng", "scheduler", "state", "config", "arguments"])
    ),
    "compiled_layers_stage3": Start(2),
    "compiled_optimizer_step": Start(2, arguments=STAGES),
    "dcp_optimizer_state": Start(2, arguments=STAGES),
    "engine_without_process_group": Start(2, refusal="process group"),
    "flip_of_an_owner": Start(),
    "frozen_after_prepare_stage3": Start(2),
    "guide_model_in_the_loss": Start(2, "2", ((), ("frozen",))),
    "load_state_dict_on_one_rank": Start(2, refusal="load_state_dict"),
    "lock_is_lost": Start(),
    "optimizer_scope": Start(2),
    "optimizer_state_by_parameter": Start(2),
    "output_dir_of_each_rank": Start(2, "2", (("1",), ("2",))),
    "parts_of_two_saves": Start(),
    "rank_with_other_settings": Start(),
    "reference_model_not_sharded": Start(2, "3", ((), ("frozen",))),
    "report_temp_link": Start(),
    "save_state_returns_text": Start(2, "2"),
    "scale_agreement": Start(),
    "scale_end": Start(),
    "scale_groups": Start(),
    "scale_manifest": Start(),
    "selective_checkpointing_stage3": Start(2),
    "silent_store_in_a_save": Start(),
    "state_saved_by_a_subclass": Start(2, "2"),
    "step_hooks_and_subclasses": Start(2),
    "tensor_subclass_parameter": Start(2, arguments=STAGES),
    "torch_gradscaler_with_accelerate": Start(2, refusal="GradScaler", right=r"rows changed: 0\b"),
    "trainer_with_an_abstract_base": Start(2, "2", tuple((kind,) for kind in ["abc", "generic", "slots", "last"])),
    "windows_import": Start(refusal="Linux"),
    "xpu_launch": Start(),
}
MOVED = {
    "hf_zero.hub.push import render": "hf_zero.hub.card import render",
    "hf_zero.comm.arrivals": "hf_zero.presence.arrivals",
    # lock_is_lost looks for the message of the refusal.
    "another run writes there now": "another run is writing there",
    # scale_end: at the end of a run, ranks read one counter in the store instead of one key for each other rank.
    "processes._store, processes._known = Store(), {}": (
        "processes._store, processes._known, processes._here, processes._counted = Store(), {}, {}, set()"
    ),
    "at_work = [rank for rank in range(ranks) if not processes.has_gone(rank)]": "processes.all_have_gone(ranks)",
    "        def check(self, keys):\n": (
        "        def add(self, key, amount):\n"
        '            count["add"] += 1\n'
        "            self[key] = str(int(dict.get(self, key, 0)) + amount)\n"
        "            return int(self[key])\n\n"
        "        def find(self, key):\n"
        '            count["find"] += 1\n'
        "            return dict.get(self, key)\n\n"
        "        def check(self, keys):\n"
    ),
    # scale_manifest: instead of adding up the old format, write manifests with the shards of all ranks, and read them back.
    "from hf_zero.checkpoint import manifest, writer": (
        f"import sys\n\nsys.path.insert(0, {str(ROOT / 'scripts/bench')!r})\n"
        "from checkpoints import manifest_bytes\nfrom hf_zero.checkpoint import manifest"
    ),
    "    looked = range(0, ranks, max(1, ranks // 64))\n": (
        "    held = [[(r.name, r.in_parameter) for b in layouts for r in rows_of_shard(b, rank)] for rank in range(ranks)]\n"
        "    return manifest_bytes(specs, held)\n"
    ),
}
"""Outdated text in the scripts → what is in its place today. A script counts what the present code does."""
LAUNCH = ("-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc_per_node")


@dataclass(frozen=True)
class Outcome:
    """One run of a script: `verdict` is `right`, `refused` (right as well), `fault`, or `needs PACKAGE`."""

    script: str
    verdict: str
    words: str


def run_script(script: Path, arguments: tuple[str, ...], start: Start) -> Outcome:
    """Runs one script once, with a time limit, and judges its end."""
    command = [sys.executable]
    if start.ranks:
        command += [*LAUNCH, str(start.ranks)]
        command += ["-m", "hf_zero.run", "--zero", start.zero] if start.zero else []
    name = " ".join((script.stem, *arguments))
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*command, str(_with_moved_imports(script, Path(folder))), *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIME_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return Outcome(name, "fault", f"still running after {TIME_LIMIT_S} s")
    said = done.stdout + done.stderr
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)'", said)
    if missing and not start.refusal:
        return Outcome(name, f"needs {missing[1]}", "")
    if start.refusal:
        named = next((line for line in said.splitlines() if start.refusal in line and "hf_zero" in line), None)
        works = done.returncode == 0 and len(re.findall(start.right, done.stdout)) == start.ranks > 0
        verdict = "refused" if named and "RESULT" not in said else "right" if works else "fault"
        return Outcome(name, verdict, named if verdict == "refused" and named else telling_line(said))
    failed = done.returncode != 0 or re.search(r"\bFAILS?\b", done.stdout)
    return Outcome(name, "fault" if failed else "right", telling_line(said if failed else done.stdout))


def _with_moved_imports(script: Path, folder: Path) -> Path:
    """Returns the script, or a copy of it in `folder` with updated imports."""
    text = moved = script.read_text(encoding="utf-8")
    for then, now in MOVED.items():
        moved = moved.replace(then, now)
    if moved == text:
        return script
    copy = folder / script.name
    copy.write_text(moved, encoding="utf-8")
    return copy


def telling_line(text: str) -> str:
    """Returns the script's own verdict if there is one, else the last error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for pattern in (r"(rank \d: )?(FAILS?|HOLDS)\b|RESULT|.*\boff by\b", r"(\[rank\d\]: ?)?[\w.]*Error\b.*:"):
        told = [line for line in lines if re.match(pattern, line) and "ChildFailedError" not in line]
        if told:
            return told[-1]
    return lines[-1] if lines else "nothing printed"


def outcomes(folder: Path, names: list[str]) -> Iterator[Outcome]:
    for name in names or sorted(path.stem for path in folder.glob("*.py")):
        start = STARTS[name]
        for arguments in start.arguments:
            yield run_script(folder / f"{name}.py", arguments, start)


def main() -> int:
    folder, *names = sys.argv[1:]
    print("| script | result | its words |\n|---|---|---|", flush=True)
    faults = 0
    for outcome in outcomes(Path(folder).resolve(), [Path(name).stem for name in names]):
        faults += outcome.verdict == "fault"
        words = outcome.words.replace("|", "\\|")[:140]
        print(f"| {outcome.script} | {outcome.verdict} | {words} |", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
