"""Saving and resuming: seconds, the time in which training waits, and bytes read by a rank, next to torch's own ways.

    python scripts/bench/checkpoints.py                 # GPT-2's 124 M parameters, two ranks: some minutes and 8 GB of disk
    python scripts/bench/checkpoints.py --quick         # a tiny model: does the harness run?
    python scripts/bench/checkpoints.py --manifests     # manifests of large models on many ranks: nothing is trained or saved

Resumes are cold: the checkpoint's pages are dropped from the system's cache before each. Seconds are measured on ranks that share
a disk. Bytes are counted with a separate copy for each rank, as on separate hosts, so no rank profits from another rank's reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engines import WORKLOADS, adamw_arguments, make_fsdp2, make_trainer
from harness import Clocks, bytes_from_disk, held_before, most_held, on_ranks, read_options, spent_in
from ranks import PRELOADED_MODULES
from safetensors.torch import save_file
from tables import show_and_keep
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import Trainer, TrainerCallback

from hf_zero.checkpoint.commit import most_chunks, seal
from hf_zero.checkpoint.disks import Disk
from hf_zero.checkpoint.hashes import CHUNK_BYTES, HASH_DIGITS, FileRecord, unhashed
from hf_zero.checkpoint.live_pieces import lay_out
from hf_zero.checkpoint.manifest import MANIFEST_NAME, Manifest, row_file
from hf_zero.checkpoint.reader import CheckpointReader
from hf_zero.checkpoint.rows import RowsOfRanks
from hf_zero.comm.all_or_none import Merged
from hf_zero.comm.control import listed_bytes, rounds
from hf_zero.layout import ParameterSpec, plan_buckets, rows_of_shard
from hf_zero.layout.intervals import Interval, even_cuts, joined_intervals

LIMIT_S = 900


class _LoadedError(Exception):
    """Ends a run at the beginning of its training."""


class StopsWhenLoaded(TrainerCallback):
    """Ends `Trainer.train` after everything has been loaded."""

    def on_train_begin(self, args, state, control, **kwargs):
        raise _LoadedError


def saves_of_ours(
    rank: int, world_size: int, *, model: str, stage: int, folder: str, repeats: int
) -> dict[str, list[float]]:
    """Seconds of a synchronous save; for an asynchronous one, of training's wait, and of the save with a step in parallel."""
    from hf_zero.integrations.trainer_saves import CheckpointSaver

    trainer = make_trainer(rank, world_size, model=model, stage=stage, folder=folder)
    trainer.train()
    [engine] = trainer.accelerator.zero_engines
    savers = {}
    for name, is_async in (("at once", False), ("behind", True)):
        checkpoint = dataclasses.replace(engine.config.checkpoint, async_save=is_async)
        engine.config = dataclasses.replace(engine.config, checkpoint=checkpoint)
        savers[name] = CheckpointSaver(trainer, engine, Trainer.save_model)
    seconds: dict[str, list[float]] = {"at once": [], "stall": [], "behind": []}

    def behind() -> None:
        savers["behind"].save(None, None)
        # Parts not on the disk before the optimizer's step are copied then: this copy is part of the wait.
        batch = WORKLOADS[model].make_batch(rank, len(seconds["stall"]))
        trainer.model(**batch).loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        seconds["stall"].append(savers["behind"].take_stall_s())
        savers["behind"].finish()

    for repeat in range(repeats):
        steps = (10 + 2 * repeat, 11 + 2 * repeat)
        trainer.state.global_step = steps[0]
        seconds["at once"].append(spent_in(lambda: savers["at once"].save(None, None)).wall_s)
        trainer.state.global_step = steps[1]
        seconds["behind"].append(spent_in(behind).wall_s)
        if rank == 0 and repeat < repeats - 1:
            for step in steps:
                shutil.rmtree(f"{folder}/checkpoint-{step}")
    return seconds


def saves_of_torch(rank: int, world_size: int, *, model: str, folder: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of torch.save by rank 0, of DCP by all ranks from FSDP2, and of safetensors for the weights only."""
    engine = make_fsdp2(WORKLOADS[model].make_model, adamw_arguments(True))
    engine.step({name: ids[:1, :16] for name, ids in WORKLOADS[model].make_batch(rank, 0).items()})
    plain, target = WORKLOADS[model].make_model(), Path(folder)
    optimizer = torch.optim.AdamW(plain.parameters())
    for parameter in plain.parameters():
        moments = {name: torch.rand_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.ones(()), **moments}
    stalls: list[float] = []

    def by_torch() -> None:
        if rank == 0:
            torch.save(plain.state_dict(), target / "model.pt")
            torch.save(optimizer.state_dict(), target / "optimizer.pt")
            _to_disk(target / "model.pt", target / "optimizer.pt")

    def by_dcp(is_async: bool) -> None:
        shutil.rmtree(target / "dcp", ignore_errors=True)
        dist.barrier()
        clocks = Clocks()
        states = dict(zip(("model", "optimizer"), get_state_dict(engine.model, engine.optimizer)))
        if not is_async:
            dcp.save(states, checkpoint_id=target / "dcp")
            return
        saving = dcp.async_save(states, checkpoint_id=target / "dcp", process_group=dist.new_group())
        stalls.append(clocks.spent().wall_s)
        saving.result()

    def by_safetensors() -> None:
        if rank == 0:
            save_file({name: p.detach() for name, p in plain.named_parameters()}, target / "weights.safetensors")
            _to_disk(target / "weights.safetensors")

    ways = {"torch.save": by_torch, "DCP": partial(by_dcp, False), "DCP async": partial(by_dcp, True)}
    ways["safetensors"] = by_safetensors
    seconds = {name: [spent_in(way).wall_s for _ in range(repeats)] for name, way in ways.items()}
    engine.close()
    return seconds | {"DCP async: stall": stalls}


def saves_for_merging(rank: int, world_size: int, *, model: str, folder: str) -> None:
    """Saves the model with FSDP2 and torch's DCP, for accelerate's merge."""
    engine = make_fsdp2(WORKLOADS[model].make_model, adamw_arguments(True))
    dcp.save({"model": get_state_dict(engine.model, ())[0]}, checkpoint_id=folder)
    engine.close()


def merges(rank: int, world_size: int, *, source: str, out: str, way: str) -> dict[str, float]:
    """Returns the seconds and the peak memory growth of this process, for one way to merge ranks' parts to a model folder."""
    from accelerate.utils import merge_fsdp_weights

    from hf_zero.integrations.weights import consolidate

    before_bytes, clocks = held_before(), Clocks()
    if way.startswith("hf-zero"):
        consolidate(Path(source), Path(out))
    else:
        merge_fsdp_weights(source, out)
    return {"seconds": clocks.spent().wall_s, "peak_bytes": most_held() - before_bytes}


def makes_a_checkpoint(rank: int, world_size: int, *, model: str, stage: int | str | None, folder: str) -> None:
    trainer = make_trainer(rank, world_size, model=model, stage=stage, folder=folder, saves=stage is None)
    trainer.train()
    if stage is not None:
        trainer._save_checkpoint(trainer.model, None)
        trainer._checkpoint_saver.finish()


def resumes(
    rank: int, world_size: int, *, model: str, stage: int | None, folder: str, is_shared: bool
) -> dict[str, float]:
    """Returns the seconds from `train(resume_from_checkpoint)` to the first step, and the bytes this rank has read from disk."""
    if not is_shared:
        from hf_zero.integrations import resume

        shutil.copytree(folder, f"{folder}-of-rank-{rank}")
        folder = f"{folder}-of-rank-{rank}"
        # The copies represent one file system without a page cache in common, and ranks divide the checking.
        resume.disk_with = lambda path, rank, exchange: Disk.shared(rank, world_size)
    trainer = make_trainer(rank, world_size, model=model, stage=stage, folder=folder, callbacks=(StopsWhenLoaded(),))
    gc.collect()
    _to_disk(*(path for path in Path(folder).rglob("*") if path.is_file()), forgets=True)
    dist.barrier()
    read_before, clocks = bytes_from_disk(), Clocks()
    try:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    except _LoadedError:
        seconds = clocks.spent().wall_s
    figures = {"seconds": seconds, "read_bytes": bytes_from_disk() - read_before}
    if not is_shared:
        shutil.rmtree(folder)
    return figures


def _to_disk(*paths: Path, forgets: bool = False) -> None:
    """Makes the system write files to the disk, and optionally drop them from its cache for a cold read."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        if forgets:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure_saves(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Returns the seconds of saves, by way of saving."""
    saves: dict[str, list[float]] = {}
    common = {"model": options.model, "repeats": options.repeats, "folder": str(folder / "saves")}
    for stage in options.stages:
        by_rank = on_ranks(saves_of_ours, options.ranks, limit_s=LIMIT_S, stage=stage, **common)
        for what in by_rank[0]:
            saves[f"stage {stage}: {what}"] = [max(pair) for pair in zip(*(seconds[what] for seconds in by_rank))]
        shutil.rmtree(folder / "saves")
    (folder / "saves").mkdir()
    saves |= on_ranks(saves_of_torch, options.ranks, limit_s=LIMIT_S, **common)[0]
    shutil.rmtree(folder / "saves")
    return saves


def measure_resumes(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Returns engine → seconds and bytes of resumes."""
    loads: dict[str, dict[str, list[float]]] = {}
    for name, stage in [("DDP", None), *((f"stage {stage}", stage) for stage in options.stages)]:
        place = folder / name.replace(" ", "")
        common = {"model": options.model, "stage": stage, "folder": str(place)}
        on_ranks(makes_a_checkpoint, options.ranks, limit_s=LIMIT_S, **common)
        resumed = partial(on_ranks, resumes, options.ranks, limit_s=LIMIT_S, **common)
        rounds, apart = [resumed(is_shared=True) for _ in range(options.repeats)], resumed(is_shared=False)
        seconds = [max(figures["seconds"] for figures in by_rank) for by_rank in rounds]
        loads[name] = {"seconds": seconds, "read_bytes": [figures["read_bytes"] for figures in apart]}
        shutil.rmtree(place)
    return loads


def measure_merges(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Returns way → seconds and peak memory of merging the ranks' saves to a model folder."""
    ours, theirs = folder / "ours", folder / "dcp"
    settings = "stage=3,checkpoint.layout=sharded"
    on_ranks(makes_a_checkpoint, options.ranks, limit_s=LIMIT_S, model=options.model, stage=settings, folder=str(ours))
    on_ranks(saves_for_merging, options.ranks, limit_s=LIMIT_S, model=options.model, folder=str(theirs))
    sources = {"hf-zero consolidate": ours / "checkpoint-1", "accelerate merge-weights": theirs}
    return {
        way: on_ranks(merges, 1, limit_s=LIMIT_S, source=str(source), out=str(folder / f"{way} out"), way=way)[0]
        for way, source in sources.items()
    }


# ---- The manifest of a large model on many ranks: only its layout, without tensors ----

LARGE = {"7 B": (291, 6_738_415_616, 192 * 2**20), "70 B": (723, 70_553_706_496, 256 * 2**20)}
"""Number of parameters, number of their elements, and the bytes of a bucket in bf16."""

WORLD_SIZES = (8, 64, 512, 4096)
KINDS = ("master", "exp_avg", "exp_avg_sq")


Held = list[tuple[str, Interval]]
"""Parameters and their elements that one rank has."""


def held_by(parameters: int, numel: int, bucket_bytes: int, ranks: int) -> tuple[list[ParameterSpec], list[Held]]:
    """Returns the parameters of a model, and for each rank what it has of them."""
    specs = [
        ParameterSpec(name=f"model.layers.{i}.weight", numel=numel // parameters, key="x") for i in range(parameters)
    ]
    held: list[Held] = [[] for _ in range(ranks)]
    for bucket in plan_buckets(specs, bucket_numel=bucket_bytes // 2, shards=ranks):
        for rank in range(ranks):
            held[rank] += [(row.name, row.in_parameter) for row in rows_of_shard(bucket, rank)]
    return specs, held


def rows_of(
    specs: list[ParameterSpec], held: list[Held], ranks: Iterable[int], *, residuals: bool = False
) -> RowsOfRanks:
    """Returns what `plan_rows` has of these ranks after they have merged their rows."""
    parts: dict[str, list[tuple[Interval, int]]] = {}
    for rank in ranks:
        for name, interval in held[rank]:
            parts.setdefault(name, []).append((interval, rank))
    kinds = tuple((kind, "F32") for kind in KINDS)
    rows: dict = {(name, kinds, None): even_cuts(of_name) for name, of_name in parts.items()}
    if residuals:
        for spec in specs:
            each = [(Interval(0, spec.numel).shift(rank * spec.numel), rank) for rank in ranks]
            rows[spec.name, (("residual.*", "BF16"),), None] = even_cuts(each)
    return RowsOfRanks(
        ranks=tuple(joined_intervals(Interval(rank, rank + 1) for rank in ranks)),
        shapes={spec.name: (spec.numel,) for spec in specs},
        scalars={spec.name: {"step": {"dtype": "float32", "value": 1.0}} for spec in specs},
        own_shapes={spec.name: {"residual.*": (len(held), spec.numel)} for spec in specs} if residuals else {},
        rows=rows,
    )


def merge_rows(
    specs: list[ParameterSpec], held: list[Held], *, residuals: bool = False
) -> tuple[RowsOfRanks, int, float]:
    """Merges the rows of all ranks on one of them, in the rounds of `Control`; returns them, received bytes and CPU seconds."""
    size, rank = len(held), len(held) // 2
    mine, known, received, cpu_s = rows_of(specs, held, [rank], residuals=residuals), 1, 0, 0.0
    for distances in rounds(size):
        # What each sender has merged in the rounds before, as its message.
        messages = [
            pickle.dumps(
                rows_of(specs, held, [(rank - far - near) % size for near in range(known)], residuals=residuals)
            )
            for far in distances
        ]
        received += sum(map(len, messages))
        clocks = Clocks()
        pickle.dumps(mine)
        for message in messages:
            mine = mine.merged(pickle.loads(message))
        cpu_s += clocks.spent().cpu_s
        known = min(size, known + known * len(distances))
    return mine, received, cpu_s


def received_in_seal(manifest: Manifest, ranks: int) -> int:
    """Counts the bytes that one rank receives while it seals its part, in the rounds of `Control`. All ranks have its values."""
    received = 0

    def merge(value: Merged) -> Merged:
        nonlocal received
        received += sum(map(len, rounds(ranks))) * len(pickle.dumps(value))
        return value

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zero"
        path.mkdir()
        lay_out(path / row_file(1, ranks), {})
        # Not rank 0, which writes the manifest.
        disk = Disk.shared(1, ranks)
        seal(Path(folder), manifest, folder="zero", within="", disk=disk, merge=merge)
    return received


def recorded(nbytes: list[int]) -> dict[str, FileRecord]:
    """Returns the records that a save makes of the ranks' files of these sizes."""
    names = {f"zero/{row_file(rank, len(nbytes))}": size for rank, size in enumerate(nbytes)}
    files = {name: unhashed(size, most_chunks(name, len(nbytes))) for name, size in names.items()}
    return {name: dataclasses.replace(file, xxh3=("0" * HASH_DIGITS,) * file.chunks) for name, file in files.items()}


def digits_of(records: Iterable[FileRecord]) -> int:
    return HASH_DIGITS * sum(record.chunks for record in records)


def digits_in_format_8(nbytes: list[int]) -> int:
    return digits_of(FileRecord(size=size, chunk_bytes=CHUNK_BYTES) for size in nbytes)


def header_bytes(held: Held) -> int:
    """Returns the bytes of the header of a rank's file."""
    entries = {
        f"{kind}/{name}": {"dtype": "F32", "shape": [interval.numel], "data_offsets": [10**9, 10**9]}
        for kind in KINDS
        for name, interval in held
    }
    return len(json.dumps(entries, separators=(",", ":")))


def sizes_of_files(held: list[Held]) -> list[int]:
    return [4 * len(KINDS) * sum(interval.numel for _, interval in of_rank) for of_rank in held]


def written_bytes(manifest: Manifest, read: Callable[[Path], object] = Manifest.read) -> tuple[int, float, float]:
    """Writes and reads a manifest; returns its bytes, and the CPU seconds of both. `read` may return the manifest, to compare."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zero"
        path.mkdir()
        clocks = Clocks()
        manifest.write(path)
        write_s = clocks.spent().cpu_s
        clocks = Clocks()
        back = read(path)
        read_s = clocks.spent().cpu_s
        assert back in (None, manifest)
        return (path / MANIFEST_NAME).stat().st_size, write_s, read_s


def manifest_bytes(specs: list[ParameterSpec], held: list[Held]) -> int:
    """Returns the bytes of the manifest that these ranks write, after a comparison with what a reader gets from the manifest."""
    manifest = (
        rows_of(specs, held, range(len(held))).manifest(len(held), 3, ()).with_files(recorded(sizes_of_files(held)))
    )
    assert sum(len(each.ranks) for each in manifest.rows) == len(KINDS) * sum(map(len, held))
    return written_bytes(manifest)[0]


def show_manifests() -> None:
    print(
        "model  ranks       rows  entries       bytes  checksums  in format 8  write s  read s  header  received  in a list"
        "  merge s  received in seal"
    )
    for model, sizes in LARGE.items():
        for ranks in WORLD_SIZES:
            specs, held = held_by(*sizes, ranks)
            merged, received, merge_s = merge_rows(specs, held)
            own = pickle.dumps(rows_of(specs, held, [0]))
            file_bytes = sizes_of_files(held)
            manifest = merged.manifest(ranks, 3, ()).with_files(recorded(file_bytes))
            rows = len(KINDS) * sum(map(len, held))
            assert sum(len(each.ranks) for each in manifest.rows) == rows
            nbytes, write_s, read_s = written_bytes(manifest)
            print(
                f"{model:>5}  {ranks:>5} {rows:>10,}  {len(manifest.rows):>7,}  {nbytes:>10,}  "
                f"{digits_of(manifest.files.values()):>9,}  {digits_in_format_8(file_bytes):>11,}  {write_s:>7.2f} "
                f"{read_s:>7.2f}  {header_bytes(held[0]):>6,}  {received:>8,}  {(ranks - 1) * len(own):>9,}  {merge_s:>7.2f}  "
                f"{received_in_seal(manifest, ranks):>16,}",
                flush=True,
            )


def show_residuals() -> None:
    """Prints the same of error feedback, with which each rank saves a residual of the whole model."""
    print(
        "model  ranks  entries of residuals       bytes  checksums  in format 8  rows in format 7  write s  read s  received"
    )
    for model, sizes in LARGE.items():
        for ranks in WORLD_SIZES:
            specs, held = held_by(*sizes, ranks)
            merged, received, _ = merge_rows(specs, held, residuals=True)
            file_bytes = [2 * sizes[1] + nbytes for nbytes in sizes_of_files(held)]
            manifest = merged.manifest(ranks, 3, ()).with_files(recorded(file_bytes))
            entries = [rows for rows in manifest.rows if rows.kind == "residual.*"]
            # A kind, and a row with a kind, a name, a dtype and seven numbers, for each rank.
            before = sum(
                len(json.dumps([kind := f"residual.{rank}", [kind, rows.name, "BF16", None, rank, 1, 0, *[stop] * 2]]))
                for rows, stop in ((rows, rows.cuts.cut) for rows in entries)
                for rank in range(ranks)
            )

            def read(path: Path, ranks: int = ranks, specs: list[ParameterSpec] = specs) -> None:
                with CheckpointReader(path) as reader:
                    assert all(len(reader.kinds_of(spec.name)) == len(KINDS) + ranks for spec in specs)

            nbytes, write_s, read_s = written_bytes(manifest, read)
            print(
                f"{model:>5}  {ranks:>5}  {len(entries):>20,}  {nbytes:>10,}  {digits_of(manifest.files.values()):>9,}  "
                f"{digits_in_format_8(file_bytes):>11,}  {before:>16,}  {write_s:>7.2f}  {read_s:>6.2f}  {received:>8,}",
                flush=True,
            )


def received_in_exchange(values: list) -> tuple[int, int]:
    """Counts the bytes of values that one rank receives in an exchange of one value of each rank: as lists, and as runs."""
    ranks, data = len(values), [pickle.dumps(value) for value in values]
    rank, as_lists, as_runs = ranks // 2, 0, 0
    for distances in rounds(ranks):
        for distance in distances:
            known = [data[(rank - distance - near) % ranks] for near in range(min(distances.start, ranks - distance))]
            as_lists += len(pickle.dumps(known))
            as_runs += len(listed_bytes(known))
    return as_lists, as_runs


def show_exchanges() -> None:
    """Prints the bytes that a rank receives in the exchanges of a save with Trainer, without the 1 KiB of each message."""
    name, folder = "0" * 32, "outputs/run"
    exchanges: dict[str, Callable[[int, int], tuple[object, object]]] = {
        # Returns the value that a rank sent before, and the value that it sends now.
        "save ID, output_dir": lambda rank, ranks: ((f"{rank:032}", folder), (None if rank else name, folder)),
        "is the former save finished": lambda rank, ranks: (True, True),
        "may the save be asynchronous": lambda rank, ranks: (False, False),
        "find_disk: name of the marks": lambda rank, ranks: (None, None if rank else name),
        "find_disk: marks are made": lambda rank, ranks: ((None, f".hf_zero-{rank:032}"), (None, None)),
        "find_disk: marks are seen": lambda rank, ranks: (None, True),
        # The last rank has less than the others.
        "state_bytes": lambda rank, ranks: (10**9 + rank // (ranks - 1),) * 2,
        "positions in the weights file": lambda rank, ranks: ((None, None if rank else "0" * 10**5),) * 2,
        "Trainer's state is written": lambda rank, ranks: ((None, rank == 0),) * 2,
    }
    print("ranks  exchange                            as lists  as runs")
    for ranks in WORLD_SIZES:
        for what, value in exchanges.items():
            before, after = zip(*(value(rank, ranks) for rank in range(ranks)))
            print(
                f"{ranks:>5}  {what:<34}  {received_in_exchange(before)[0]:>8,}  {received_in_exchange(after)[1]:>7,}"
            )


def main() -> None:
    options = read_options(
        __doc__,
        quick={"model": "tiny", "repeats": 1},
        model=("124m", None, WORKLOADS),
        ranks=2,
        repeats=3,
        stages=[1, 3],
        folder=(Path, "on the disk to measure; the system's temporary folder otherwise"),
        manifests=(False, "bytes and CPU seconds of manifests of large models on many ranks, of files and of saves"),
    )
    if options.manifests:
        show_manifests()
        show_residuals()
        show_exchanges()
        return
    PRELOADED_MODULES.extend(["transformers.trainer", "torch.distributed.checkpoint", "hf_zero.integrations.arguments"])
    with tempfile.TemporaryDirectory(prefix="io-", dir=options.folder) as folder:
        figures = {
            "kind": "checkpoints",
            "model": options.model,
            "saves": measure_saves(options, Path(folder)),
            "resumes": measure_resumes(options, Path(folder)),
            "merges": measure_merges(options, Path(folder)),
        }
    show_and_keep("io", options, figures)


if __name__ == "__main__":
    main()
