"""Saving and resuming: seconds, how long training stands still, and bytes that a rank reads, beside torch's own ways.

    python scripts/bench/io.py                 # GPT-2's 124 M parameters, two ranks: some minutes and 8 GB of disk
    python scripts/bench/io.py --quick         # a tiny model: does the harness run?

Resumes are cold: the system is told to forget the checkpoint's pages before each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peers import make_fsdp2
from ranks import run_ranks
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from step import BENCH_FOLDER, describe_run
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import Trainer, TrainerCallback, TrainingArguments
from workload import WORKLOADS, adamw_arguments


class _LoadedError(Exception):
    """Ends a run where its training would begin."""


class StopsWhenLoaded(TrainerCallback):
    """Ends `Trainer.train` once everything has been loaded."""

    def on_train_begin(self, args, state, control, **kwargs):
        raise _LoadedError


def make_trainer(rank: int, world_size: int, *, model: str, stage: int | None, folder: str, callbacks=()) -> Trainer:
    """A Trainer of plain DDP (`stage` of None) or of the engine; one training step long."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="true")
    workload = WORKLOADS[model]
    data = [{"input_ids": row, "labels": row} for row in workload.make_batch(0, 0)[:, :16].repeat(8, 1)]
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,
        max_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps" if stage is None else "no",
        save_steps=1,
    )
    callbacks = list(callbacks)
    if stage is not None:
        from hf_zero import ZeroCallback

        callbacks.append(ZeroCallback(stage))
    return Trainer(model=workload.make_model(), args=arguments, train_dataset=data, callbacks=callbacks)


def timed(work: Callable[[], object]) -> float:
    """Seconds until the slowest rank has done it."""
    dist.barrier()
    began_s = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began_s


def saves_of_ours(
    rank: int, world_size: int, *, model: str, stage: int, folder: str, repeats: int
) -> dict[str, list[float]]:
    """Seconds of a save at once; of one behind training, how long that stands still, and of the save with a step meanwhile."""
    import dataclasses

    from hf_zero.integrations.trainer_checkpoints import CheckpointSaver

    trainer = make_trainer(rank, world_size, model=model, stage=stage, folder=folder)
    trainer.train()
    [engine] = trainer.accelerator.zero_engines
    savers = {}
    for name, is_async in (("at once", False), ("behind", True)):
        checkpoint = dataclasses.replace(engine.config.checkpoint, async_save=is_async)
        engine.config = dataclasses.replace(engine.config, checkpoint=checkpoint)
        savers[name] = CheckpointSaver(trainer, engine, Trainer.save_model)
    seconds: dict[str, list[float]] = {"at once": [], "stall": [], "behind": []}
    for repeat in range(repeats):
        trainer.state.global_step = 10 + 2 * repeat
        seconds["at once"].append(timed(lambda: savers["at once"].save(None)))
        trainer.state.global_step = 11 + 2 * repeat

        def behind() -> None:
            savers["behind"].save(None)
            # What is not on the disk when the optimizer steps is copied then: the copy is part of the stall.
            ids = WORKLOADS[model].make_batch(rank, len(seconds["stall"]))
            trainer.model(input_ids=ids, labels=ids).loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            seconds["stall"].append(savers["behind"].stall_s)
            savers["behind"].finish()

        seconds["behind"].append(timed(behind))
        if rank == 0 and repeat < repeats - 1:
            for step in (10 + 2 * repeat, 11 + 2 * repeat):
                shutil.rmtree(f"{folder}/checkpoint-{step}")
    return seconds


def saves_of_torch(rank: int, world_size: int, *, model: str, folder: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of torch.save by rank 0, of DCP by all ranks from FSDP2, and of safetensors for the weights alone."""
    engine = make_fsdp2(WORKLOADS[model].make_model, adamw_arguments(True))
    engine.step(WORKLOADS[model].make_batch(rank, 0)[:1, :16])
    plain = WORKLOADS[model].make_model()
    optimizer = torch.optim.AdamW(plain.parameters())
    for parameter in plain.parameters():
        optimizer.state[parameter] = {
            "step": torch.ones(()),
            "exp_avg": torch.rand_like(parameter),
            "exp_avg_sq": torch.rand_like(parameter),
        }
    target = Path(folder)

    def by_torch() -> None:
        if rank == 0:
            torch.save(plain.state_dict(), target / "model.pt")
            torch.save(optimizer.state_dict(), target / "optimizer.pt")
            _to_disk(target / "model.pt", target / "optimizer.pt")

    def by_dcp() -> None:
        shutil.rmtree(target / "dcp", ignore_errors=True)
        dist.barrier()
        states = get_state_dict(engine.model, engine.optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states)), checkpoint_id=target / "dcp")

    def by_safetensors() -> None:
        if rank == 0:
            weights = {name: p.detach() for name, p in plain.named_parameters()}
            save_file(weights, target / "weights.safetensors")
            _to_disk(target / "weights.safetensors")

    ways = {"torch.save": by_torch, "DCP": by_dcp, "safetensors": by_safetensors}
    seconds = {name: [timed(way) for _ in range(repeats)] for name, way in ways.items()}
    engine.close()
    return seconds


def _to_disk(*paths: Path) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def makes_a_checkpoint(rank: int, world_size: int, *, model: str, stage: int | None, folder: str) -> None:
    trainer = make_trainer(rank, world_size, model=model, stage=stage, folder=folder)
    trainer.train()
    if stage is not None:
        trainer._save_checkpoint(trainer.model, None)
        trainer._checkpoint_saver.finish()


def resumes(rank: int, world_size: int, *, model: str, stage: int | None, folder: str) -> dict[str, float]:
    """Seconds from `train(resume_from_checkpoint)` to the first step, and bytes that this rank read from the disk."""
    trainer = make_trainer(rank, world_size, model=model, stage=stage, folder=folder, callbacks=[StopsWhenLoaded()])
    gc.collect()
    if rank == 0:
        _forget(Path(folder))
    dist.barrier()
    before, began_s = _read_bytes(), time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    except _LoadedError:
        seconds = time.perf_counter() - began_s
    return {"seconds": seconds, "read_bytes": _read_bytes() - before}


def _forget(folder: Path) -> None:
    """Has the system drop what it holds of the files below a folder, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def _read_bytes() -> int:
    """Bytes that the disk has been asked for on behalf of this process, mapped files included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS, default="124m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the system's temporary folder otherwise")
    parser.add_argument("--json", type=Path, help="where the figures go (default: results/io-<commit>.json)")
    parser.add_argument("--quick", action="store_true", help="the tiny model, once")
    options = parser.parse_args()
    if options.quick:
        options.model, options.repeats = "tiny", 1
    machine = describe_run(options)
    with tempfile.TemporaryDirectory(prefix="io-", dir=options.folder) as folder:
        saves, loads = measure(options, Path(folder))
    numel = sum(parameter.numel() for parameter in WORKLOADS[options.model].make_model().parameters())
    console = Console(width=120)
    console.print(
        table_of_saves(saves, f"saving {options.model} from {options.ranks} ranks, commit {machine['commit']}")
    )
    console.print(table_of_loads(loads, 4 * numel, options.ranks))
    path = options.json or BENCH_FOLDER / "results" / f"io-{machine['commit']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {"machine": machine, "model": options.model, "saves": saves, "resumes": loads}, indent=1, default=str
        )
    )
    console.print(f"written to {path}")


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict, dict]:
    """Seconds of saves by way of saving, and figures of a resume by engine, the slowest rank's."""
    common = {"model": options.model}
    saves: dict[str, list[float]] = {}
    loads: dict[str, dict[str, float]] = {}

    def on_ranks(target: Callable, **arguments: object) -> list:
        return run_ranks(target, world_size=options.ranks, time_limit_s=900, keyword_arguments=common | arguments)

    for stage in options.stages:
        place = folder / f"stage{stage}"
        by_rank = on_ranks(saves_of_ours, stage=stage, folder=str(place), repeats=options.repeats)
        for what in by_rank[0]:
            saves[f"stage {stage}: {what}"] = [max(pair) for pair in zip(*(seconds[what] for seconds in by_rank))]
        shutil.rmtree(place)
    (folder / "torch").mkdir()
    saves |= on_ranks(saves_of_torch, folder=str(folder / "torch"), repeats=options.repeats)[0]
    shutil.rmtree(folder / "torch")
    for name, stage in [("DDP", None), *((f"stage {stage}", stage) for stage in options.stages)]:
        place = folder / name.replace(" ", "")
        on_ranks(makes_a_checkpoint, stage=stage, folder=str(place))
        by_rank = on_ranks(resumes, stage=stage, folder=str(place))
        loads[name] = {what: max(figures[what] for figures in by_rank) for what in ("seconds", "read_bytes")}
        loads[name]["read_bytes_of_all"] = sum(figures["read_bytes"] for figures in by_rank)
        shutil.rmtree(place)
    return saves, loads


def table_of_saves(saves: dict[str, list[float]], title: str) -> Table:
    table = Table("way", "seconds", "of the save at once", title=title)
    for name, seconds in saves.items():
        stage = name.partition(":")[0]
        at_once = saves.get(f"{stage}: at once")
        part = "" if at_once is None else f"{median(s / a for s, a in zip(seconds, at_once)):.0%}"
        table.add_row(name, f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})", part)
    return table


def table_of_loads(loads: dict[str, dict[str, float]], parameter_bytes: int, ranks: int) -> Table:
    table = Table("engine", "seconds", "read MB of the disk, most on a rank", "all ranks", "bound a rank")
    table.title = "resume, cold"
    bounds = {"stage 3": 3 * parameter_bytes / ranks}
    for name, load in loads.items():
        bound = bounds.get(name, parameter_bytes + 2 * parameter_bytes / ranks) if name != "DDP" else None
        table.add_row(
            name,
            f"{load['seconds']:.2f}",
            f"{load['read_bytes'] / 1e6:.0f}",
            f"{load['read_bytes_of_all'] / 1e6:.0f}",
            "" if bound is None else f"{1.05 * bound / 1e6:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
