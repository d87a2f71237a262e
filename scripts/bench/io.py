"""Saving and resuming: seconds, how long training stands still, and bytes that a rank reads, beside torch's own ways.

    python scripts/bench/io.py                 # GPT-2's 124 M parameters, two ranks: some minutes and 8 GB of disk
    python scripts/bench/io.py --quick         # a tiny model: does the harness run?

Resumes are cold: the system is told to forget the checkpoint's pages before each. Seconds are of ranks that share a disk; bytes
are counted where each rank has a copy of its own, as on hosts of their own, so that none is served by what another has read.
"""

from __future__ import annotations

import argparse
import gc
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
from memory import status_bytes
from peers import make_fsdp2
from ranks import PRELOADED_MODULES, run_ranks
from record import BENCH_FOLDER, describe_run, write_record
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from short_trainer import make_trainer
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import Trainer, TrainerCallback
from workload import WORKLOADS, adamw_arguments


class _LoadedError(Exception):
    """Ends a run where its training would begin."""


class StopsWhenLoaded(TrainerCallback):
    """Ends `Trainer.train` once everything has been loaded."""

    def on_train_begin(self, args, state, control, **kwargs):
        raise _LoadedError


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

    from hf_zero.integrations.trainer.checkpoints import CheckpointSaver

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
        seconds["at once"].append(timed(lambda: savers["at once"].save(None, None)))
        trainer.state.global_step = 11 + 2 * repeat

        def behind() -> None:
            savers["behind"].save(None, None)
            # What is not on the disk when the optimizer steps is copied then: the copy is part of the stall.
            ids = WORKLOADS[model].make_batch(rank, len(seconds["stall"]))
            trainer.model(input_ids=ids, labels=ids).loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            seconds["stall"].append(savers["behind"].take_stall_s())
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

    stalls: list[float] = []

    def behind_training() -> None:
        shutil.rmtree(target / "dcp-async", ignore_errors=True)
        dist.barrier()
        began_s = time.perf_counter()
        states = get_state_dict(engine.model, engine.optimizer)
        saving = dcp.async_save(
            dict(zip(("model", "optimizer"), states)),
            checkpoint_id=target / "dcp-async",
            process_group=dist.new_group(),
        )
        stalls.append(time.perf_counter() - began_s)
        saving.result()

    def by_safetensors() -> None:
        if rank == 0:
            weights = {name: p.detach() for name, p in plain.named_parameters()}
            save_file(weights, target / "weights.safetensors")
            _to_disk(target / "weights.safetensors")

    ways = {"torch.save": by_torch, "DCP": by_dcp, "DCP async": behind_training, "safetensors": by_safetensors}
    seconds = {name: [timed(way) for _ in range(repeats)] for name, way in ways.items()}
    engine.close()
    return seconds | {"DCP async: stall": stalls}


def saves_for_merging(rank: int, world_size: int, *, model: str, folder: str) -> None:
    """The model as FSDP2 and torch's DCP save it, for accelerate's merge."""
    engine = make_fsdp2(WORKLOADS[model].make_model, adamw_arguments(True))
    dcp.save({"model": get_state_dict(engine.model, ())[0]}, checkpoint_id=folder)
    engine.close()


def merges(rank: int, world_size: int, *, source: str, out: str, way: str) -> dict[str, float]:
    """Seconds, and bytes by which this process grew at most, of one way to a model folder from the ranks' parts."""
    from accelerate.utils import merge_fsdp_weights

    from hf_zero.integrations.checkpoints.weights import consolidate

    ways = {
        "hf-zero consolidate": lambda: consolidate(Path(source), Path(out)),
        "accelerate merge-weights": lambda: merge_fsdp_weights(source, out),
    }
    before_bytes, began_s = status_bytes("VmRSS"), time.perf_counter()
    ways[way]()
    return {"seconds": time.perf_counter() - began_s, "peak_bytes": status_bytes("VmHWM") - before_bytes}


def _to_disk(*paths: Path) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def makes_a_checkpoint(rank: int, world_size: int, *, model: str, stage: int | str | None, folder: str) -> None:
    trainer = make_trainer(rank, world_size, model=model, stage=stage, folder=folder, saves=stage is None)
    trainer.train()
    if stage is not None:
        trainer._save_checkpoint(trainer.model, None)
        trainer._checkpoint_saver.finish()


def resumes(
    rank: int, world_size: int, *, model: str, stage: int | None, folder: str, is_shared: bool
) -> dict[str, float]:
    """Seconds from `train(resume_from_checkpoint)` to the first step, and bytes that this rank read from the disk."""
    if not is_shared:
        from hf_zero.checkpoint.folder.disks import Disk
        from hf_zero.integrations.trainer import resuming

        shutil.copytree(folder, f"{folder}-of-rank-{rank}")
        folder = f"{folder}-of-rank-{rank}"
        # The copies stand for one file system whose pages hosts do not share, where ranks share the checking.
        resuming.disk_with = lambda path, rank, exchange: Disk.shared(rank, world_size)
    trainer = make_trainer(rank, world_size, model=model, stage=stage, folder=folder, callbacks=[StopsWhenLoaded()])
    gc.collect()
    _forget(Path(folder))
    dist.barrier()
    before, began_s = _read_bytes(), time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    except _LoadedError:
        seconds = time.perf_counter() - began_s
    figures = {"seconds": seconds, "read_bytes": _read_bytes() - before}
    if not is_shared:
        shutil.rmtree(folder)
    return figures


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
    PRELOADED_MODULES.extend(["transformers.trainer", "torch.distributed.checkpoint", "hf_zero.integrations.callback"])
    with tempfile.TemporaryDirectory(prefix="io-", dir=options.folder) as folder:
        saves, loads = measure(options, Path(folder))
        merged = measure_merges(options, Path(folder))
    run = describe_run(options)
    numel = sum(parameter.numel() for parameter in WORKLOADS[options.model].make_model().parameters())
    console = Console(width=120)
    console.print(table_of_saves(saves, f"saving {options.model} from {options.ranks} ranks, commit {run['commit']}"))
    console.print(table_of_loads(loads, 4 * numel, options.ranks))
    console.print(table_of_merges(merged, 4 * numel))
    path = options.json or BENCH_FOLDER / "results" / f"io-{run['commit']}.json"
    write_record(
        path, run | {"kind": "checkpoints", "model": options.model, "saves": saves, "resumes": loads, "merges": merged}
    )
    console.print(f"written to {path}")


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict, dict]:
    """Seconds of saves by way of saving, and figures of resumes by engine."""
    common = {"model": options.model}
    saves: dict[str, list[float]] = {}
    loads: dict[str, dict[str, list[float]]] = {}

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
        shared = []
        for _ in range(options.repeats):
            by_rank = on_ranks(resumes, stage=stage, folder=str(place), is_shared=True)
            shared.append(max(figures["seconds"] for figures in by_rank))
        by_rank = on_ranks(resumes, stage=stage, folder=str(place), is_shared=False)
        loads[name] = {"seconds": shared, "read_bytes": [figures["read_bytes"] for figures in by_rank]}
        shutil.rmtree(place)
    return saves, loads


def measure_merges(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Way → seconds and peak of making a model folder of what the ranks have saved."""

    def on_ranks(target: Callable, ranks: int, **arguments: object) -> list:
        return run_ranks(target, world_size=ranks, time_limit_s=900, keyword_arguments=arguments)

    ours, theirs = folder / "ours", folder / "dcp"
    settings = "stage=3,checkpoint.layout=sharded"
    on_ranks(makes_a_checkpoint, options.ranks, model=options.model, stage=settings, folder=str(ours))
    on_ranks(saves_for_merging, options.ranks, model=options.model, folder=str(theirs))
    sources = {"hf-zero consolidate": ours / "checkpoint-1", "accelerate merge-weights": theirs}
    return {
        way: on_ranks(merges, 1, source=str(source), out=str(folder / f"{way} out"), way=way)[0]
        for way, source in sources.items()
    }


def table_of_merges(merges: dict[str, dict[str, float]], parameter_bytes: int) -> Table:
    table = Table("way", "seconds", "peak MiB", "bound", title="from the ranks' files to one for from_pretrained")
    for way, figures in merges.items():
        bound = f"{(parameter_bytes + 200e6) / 2**20:.0f}" if way.startswith("hf-zero") else ""
        table.add_row(way, f"{figures['seconds']:.2f}", f"{figures['peak_bytes'] / 2**20:.0f}", bound)
    return table


def table_of_saves(saves: dict[str, list[float]], title: str) -> Table:
    table = Table("way", "seconds", "of the save at once", title=title)
    for name, seconds in saves.items():
        stage = name.partition(":")[0]
        at_once = saves.get(f"{stage}: at once")
        part = "" if at_once is None else f"{median(s / a for s, a in zip(seconds, at_once)):.0%}"
        table.add_row(name, f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})", part)
    return table


def table_of_loads(loads: dict[str, dict[str, list[float]]], parameter_bytes: int, ranks: int) -> Table:
    table = Table("engine", "seconds", "MB that a rank read from a disk of its own, at most", "bound")
    table.title = "resume, cold"
    bounds = {"stage 3": 3 * parameter_bytes / ranks}
    for name, load in loads.items():
        bound = bounds.get(name, parameter_bytes + 2 * parameter_bytes / ranks) if name != "DDP" else None
        table.add_row(
            name,
            f"{median(load['seconds']):.2f} ({min(load['seconds']):.2f}-{max(load['seconds']):.2f})",
            f"{max(load['read_bytes']) / 1e6:.0f}",
            "" if bound is None else f"{1.05 * bound / 1e6:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
