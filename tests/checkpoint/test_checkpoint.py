"""Rows written and read by themselves: any split reads any other, odd state to the bit, faults of one rank are every rank's."""

import contextlib
import importlib.metadata
import itertools
import json
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate_job import make_accelerator
from cells import examples, short_of, short_rows
from hostile_folders import as_format_8, list_rows, resign
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from shared_ranks import on_ranks, run_on_ranks
from torch import nn
from trainer_job import as_launched
from training import adamw_in_two_groups, gpt2, gpt2_batch, save_engine

import hf_zero
from hf_zero import engine_of, gathered
from hf_zero.checkpoint import hashes
from hf_zero.checkpoint.commit import most_chunks, seal
from hf_zero.checkpoint.disks import Disk
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.hashes import CHUNK_BYTES, FileRecord, share_of, unhashed
from hf_zero.checkpoint.manifest import Manifest, SavedRow, joined_rows, row_file
from hf_zero.checkpoint.own_chunks import own_chunks
from hf_zero.checkpoint.reader import CheckpointReader
from hf_zero.checkpoint.rows import RowsOfRanks, plan_rows, versions_of, write_pieces
from hf_zero.checkpoint.safetensors_headers import spans_in, tensors_in
from hf_zero.checkpoint.structure import row_faults
from hf_zero.checkpoint.verify import checkpoint_faults
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.group_settings import plain_settings, restore_settings
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine
from hf_zero.layout.boxes import Box
from hf_zero.layout.buckets import ParameterSpec, plan_buckets, rows_of_shard
from hf_zero.layout.intervals import Interval
from hf_zero.optimizer.nested_state import flat_state, nested_state

pytestmark = pytest.mark.timeout(120)


def save_alone(folder, rows, scalars=None) -> Manifest:
    return save_of_ranks(folder, [rows], scalars)


def save_of_ranks(folder, rows_of_ranks, scalars=None) -> Manifest:
    """Saves as these ranks would, one after the other."""
    merged: list = []

    def plan(rank: int) -> tuple[Manifest, list]:
        return plan_rows(
            folder,
            rank=rank,
            world_size=len(rows_of_ranks),
            stage=2,
            save="",
            rows=rows_of_ranks[rank],
            shapes={"w": (10, 3)},
            scalars=scalars or {},
            optimizers=list,
            merge=merge,
        )

    def merge(value):
        merged.append(merged[-1].merged(value) if merged else value)
        return merged[-1]

    ranks = range(len(rows_of_ranks))
    planned = [plan(rank) for rank in ranks]
    manifest = planned[-1][0]
    for _, pieces in planned:
        manifest = write_pieces(pieces, folder, lambda value: value, 0, manifest)
    files = [row_file(rank, len(ranks)) for rank in ranks]
    manifest = manifest.with_files(
        {f"{folder.name}/{file}": FileRecord(size=0, chunk_bytes=CHUNK_BYTES, xxh3=("0" * 16,)) for file in files}
    )
    manifest.write(folder)
    return manifest


@examples(50)
@given(st.sets(st.integers(1, 29)), st.sets(st.integers(1, 29)))
def test_any_split_reads_any_other(tmp_path_factory, cuts_then, cuts_now):
    folder = tmp_path_factory.mktemp("rows")
    values = torch.arange(30, dtype=torch.float32)
    edges = [0, *sorted(cuts_then), 30]
    save_of_ranks(folder, [[("exp_avg", "w", Interval(a, b), values[a:b])] for a, b in itertools.pairwise(edges)])
    edges = [0, *sorted(cuts_now), 30]
    with CheckpointReader(folder) as reader:
        for a, b in itertools.pairwise(edges):
            assert torch.equal(reader.read("exp_avg", "w", Interval(a, b)), values[a:b])


sizes = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(["a", "b"])), min_size=1, max_size=8)


def of_size(nbytes: int, name: str, world_size: int) -> FileRecord:
    """Returns the record that a save makes of a file of this size."""
    record = unhashed(nbytes, most_chunks(name, world_size))
    return replace(record, xxh3=("0" * 16,) * record.chunks)


def assert_can_be_read(folder, sizes, intact, cap, shards, parts, random) -> None:
    """Writes the manifest of a model on these ranks, with residuals, and compares it with what is read."""
    specs = [ParameterSpec(name=f"p{i}", numel=n, key=key, intact=intact) for i, (n, key) in enumerate(sizes)]
    shapes = {spec.name: (parts * spec.numel, 2) for spec in specs}
    # Each of `parts` neighboring ranks has another part of the model, and shares it with every further `parts`th rank.
    boxes = [{name: Box.whole(shape).split(0, parts, part) for name, shape in shapes.items()} for part in range(parts)]
    own_shapes = {name: {"residual.*": (shards, *shape)} for name, shape in shapes.items() if shape[0]}
    rows: dict[int, list[SavedRow]] = {rank: [] for rank in range(shards * parts)}
    for bucket in plan_buckets(specs, bucket_numel=cap, shards=shards):
        for shard, part, row in (
            (s, p, row) for s in range(shards) for row in rows_of_shard(bucket, s) for p in range(parts)
        ):
            interval = Interval(2 * row.in_parameter.start, 2 * row.in_parameter.stop)
            box = boxes[part][row.name] if parts > 1 else None
            rows[shard * parts + part] += [
                SavedRow(kind=kind, name=row.name, interval=interval, rank=shard * parts + part, dtype="F32", box=box)
                for kind in ("master", "exp_avg")
            ]
    for rank, spec in ((rank, spec) for rank in rows for spec in specs if spec.numel):
        interval = Interval(0, 2 * spec.numel).shift(rank // parts * 2 * spec.numel)
        box = boxes[rank % parts][spec.name].stacked(shards) if parts > 1 else None
        rows[rank].append(
            SavedRow(kind="residual.*", name=spec.name, interval=interval, rank=rank, dtype="F32", box=box)
        )
    # One rank has state of another shape, as Adafactor does.
    first, factor = specs[0].name, {"row": (3,)}
    if parts == 1:
        rows[0].append(SavedRow(kind="row", name=first, interval=Interval(0, 3), rank=0, dtype="F32"))
    of_rank = [
        RowsOfRanks.of_rank(
            rank,
            [(row.kind, row.name, row.interval, torch.empty(0)) for row in of_rank],
            shapes=shapes,
            scalars={},
            own_shapes=own_shapes | ({first: factor | own_shapes.get(first, {})} if rank == 0 and parts == 1 else {}),
            boxes=boxes[rank % parts] if parts > 1 else {},
        )
        for rank, of_rank in rows.items()
    ]
    # The ranks' values are merged in any order, and some ranks' twice.
    at = random.randrange(len(of_rank) + 1)
    some, others = of_rank[at:] + of_rank[: at // 2], of_rank[:at]
    random.shuffle(others)
    merged = [reduce(RowsOfRanks.merged, each) for each in (some, others) if each]
    files = {
        f"zero/{row_file(rank, shards * parts)}": FileRecord(size=0, chunk_bytes=CHUNK_BYTES, xxh3=("0" * 16,))
        for rank in rows
    }
    manifest = reduce(RowsOfRanks.merged, merged).manifest(shards * parts, 2, ()).with_files(files)
    # One entry for all ranks that share a tensor, in any order of the values.
    assert len(manifest.rows) <= 3 * parts * len(specs) + (parts == 1)
    assert ("row" in manifest.own_shapes.get(first, {})) == (parts == 1)
    listed = list(itertools.chain(*rows.values()))
    assert set(joined_rows(reversed(listed))) == set(joined_rows(listed)) == set(manifest.rows)
    expanded = [row for each in manifest.rows for row in each]
    assert len(expanded) == len(listed) and set(expanded) == set(listed)
    assert manifest.writers() == sorted({row.rank for row in listed}) and row_faults(manifest) == []
    folder.mkdir()
    nbytes = [0, 1, CHUNK_BYTES + 1, random.randrange(10**10), 10**13]
    random.shuffle(nbytes)
    written = manifest.with_files(
        {name: of_size(nbytes[number % 5], name, shards * parts) for number, name in enumerate(files)}
    )
    written.write(folder)
    assert Manifest.read(folder) == written
    # However large the files are.
    checksums = sum(record.chunks for record in written.files.values())
    assert checksums <= max(2**16, 16 * len(files))
    manifest.write(folder)
    resign(folder.parent, list_rows)
    before = Manifest.read(folder)
    assert json.loads((folder / "manifest.json").read_text())["format_version"] == 6
    assert row_faults(before) == [] and before.writers() == manifest.writers()
    assert [each for each in before.rows if "residual" not in each.kind] == [
        each for each in manifest.rows if "residual" not in each.kind
    ]
    # Each residual has the same name in both.
    kinds = {name: ("master", "exp_avg", *(f"residual.{rank}" for rank in range(shards))) for name in own_shapes}
    for each in (before, manifest):
        each.write(folder)
        with CheckpointReader(folder) as reader:
            assert {name: reader.kinds_of(name) for name in own_shapes} == kinds


@given(sizes, st.booleans(), st.integers(1, 3000), st.integers(1, 40), st.integers(1, 3), st.randoms())
def test_a_written_manifest_can_be_read_and_has_the_rows_of_all_ranks(
    tmp_path_factory, sizes, intact, cap, shards, parts, random
):
    folder = tmp_path_factory.mktemp("checkpoint") / "zero"
    assert_can_be_read(folder, sizes, intact, cap, shards, parts, random)


@pytest.mark.slow
@examples(3)
@given(
    st.lists(st.tuples(st.integers(1, 50_000), st.just("a")), min_size=1, max_size=3),
    st.integers(41, 4096),
    st.randoms(),
)
def test_a_written_manifest_of_thousands_of_ranks_can_be_read(tmp_path_factory, sizes, shards, random):
    folder = tmp_path_factory.mktemp("checkpoint") / "zero"
    assert_can_be_read(folder, sizes, False, 10_000, shards, 1, random)
    assert (folder / "manifest.json").stat().st_size < 4000 + 3 * 400 + 120 * shards


def test_a_manifest_is_written_if_and_only_if_it_can_be_read(tmp_path, monkeypatch):
    manifest = save_alone(tmp_path, [("exp_avg", "w", Interval(0, 30), torch.arange(30.0))])
    nbytes = (tmp_path / "manifest.json").stat().st_size
    for limit in (nbytes, nbytes - 1):
        (tmp_path / "manifest.json").unlink()
        monkeypatch.setattr("hf_zero.checkpoint.manifest._LARGEST_BYTES", limit)
        if limit == nbytes:
            manifest.write(tmp_path)
            assert Manifest.read(tmp_path) == manifest
        else:
            with pytest.raises(CheckpointError, match=r"would have .* at most .*: 1 entries for parameter shards"):
                manifest.write(tmp_path)
            assert not (tmp_path / "manifest.json").exists()


def test_scalars_and_settings_come_back_as_they_were(tmp_path):
    scalars = {"w": {"step": torch.tensor(7.0), "note": "x", "count": 3, "eta": torch.tensor(0.5, dtype=torch.float64)}}
    save_alone(tmp_path, [], scalars)
    with CheckpointReader(tmp_path) as reader:
        back = reader.scalars_of("w")
    assert back["step"].dtype == torch.float32 and back["eta"].dtype == torch.float64
    assert {**back, "step": back["step"].item(), "eta": back["eta"].item()} == {
        "step": 7.0,
        "note": "x",
        "count": 3,
        "eta": 0.5,
    }
    group = {"params": [], "lr": torch.tensor(0.25), "betas": (0.9, 0.99), "amsgrad": False}
    saved = json.loads(json.dumps(plain_settings(group)))
    other = {"params": [], "lr": torch.tensor(0.0), "betas": (0.0, 0.0), "amsgrad": True}
    restore_settings(other, saved)
    assert other == group


def test_the_manifest_is_there_last_or_not_at_all(tmp_path, monkeypatch):
    save_alone(tmp_path, [("exp_avg", "w", Interval(0, 30), torch.zeros(30))])
    assert (tmp_path / "manifest.json").is_file()

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", no_space)
    with pytest.raises(
        CheckpointError, match=r"rank 0 could not write to .*No space left on device.*training state is unchanged"
    ):
        save_alone(tmp_path, [("exp_avg", "w", Interval(0, 30), torch.ones(30))])
    with pytest.raises(CheckpointError, match=r"holds no manifest\.json"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is damaged"),
        ('{"format_version": 99}', "has format version 99"),
        ('{"format_version": 1}', "has format version 1, and this version of hf_zero reads 4"),
        ('{"format_version": 4}', "is damaged"),
        ('{"format_version": 4, "xxh3": "0123456789abcdef"}', "is damaged"),
        ("[]", "is damaged"),
    ],
)
def test_damaged_manifests(tmp_path, text, says):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        Manifest.read(tmp_path)


def trained_engine(stage: int, optimizer=torch.optim.AdamW, dtype=torch.float32):
    torch.manual_seed(0)
    model = gpt2().to(dtype)
    opt = optimizer(model.parameters(), lr=1e-3)
    engine = ZeroEngine(model, [opt], {"stage": stage, "bucket_bytes": "20KiB"})
    for seed in range(2):
        model(**gpt2_batch(torch.Generator().manual_seed(seed), 2)).loss.backward()
        opt.step()
        opt.zero_grad()
    return model, opt, engine


def fails_on_one_rank(rank: int, world_size: int, folder: str) -> str:
    as_launched(rank, world_size)
    _, _, engine = trained_engine(2)
    place = folder if rank == 0 else f"{folder}/file/below"
    with pytest.raises(CheckpointError) as error:
        save_engine(engine, place)
    return str(error.value)


def test_a_fault_on_one_rank_is_every_ranks(tmp_path):
    (tmp_path / "file").write_text("in the way")
    messages = run_on_ranks(fails_on_one_rank, folder=str(tmp_path))
    for message in messages:
        assert message.startswith("hf_zero: rank 1 could not write to") and "Not a directory" in message
    assert not (tmp_path / ZERO_FOLDER / "manifest.json").exists()


def saved_state(rank: int, world_size: int, folder: str, stage: int, bf16: bool) -> dict:
    model, _, engine = trained_engine(stage, dtype=torch.bfloat16 if bf16 else torch.float32)
    save_engine(engine, folder)
    return {
        n: {k: torch.as_tensor(v).tolist() for k, v in engine.full_state(p).items()}
        for n, p in model.named_parameters()
    }


def loaded_state(rank: int, world_size: int, folder: str, stage: int, bf16: bool) -> dict:
    torch.manual_seed(5)
    model = gpt2().to(torch.bfloat16 if bf16 else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    engine = ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "9KiB"})
    load_engine(engine, Path(folder) / ZERO_FOLDER)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    return {
        n: {k: torch.as_tensor(v).tolist() for k, v in engine.full_state(p).items()}
        for n, p in model.named_parameters()
    }


@pytest.mark.short_cells("wrote2-reads2-True")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("wrote", "reads"),
    short_rows(
        [((2, 2), (3, 1)), ((3, 1), (2, 2)), ((2, 0), (4, 2)), ((4, 2), (2, 0))], [((3, 1), (2, 2)), ((2, 0), (4, 2))]
    ),
)
def test_state_is_the_same_at_another_world_size_and_stage(tmp_path, wrote, reads, bf16):
    arguments = {"folder": str(tmp_path), "bf16": bf16}
    world, stage = wrote
    saved = run_on_ranks(saved_state, world_size=world, **arguments, stage=stage)
    world, stage = reads
    for loaded in run_on_ranks(loaded_state, world_size=world, **arguments, stage=stage):
        assert loaded == saved[0]


class Counting(torch.optim.AdamW):
    """Counts its steps outside of its groups, and saves the count as a value of its own."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "count"})


@on_ranks(2)
def test_values_that_a_class_adds_to_its_state_dict_are_saved_and_loaded(rank, world_size, tmp_path):
    _, optimizer, engine = trained_engine(2, Counting)
    save_engine(engine, tmp_path)
    assert optimizer.count > 0
    model, other, fresh = trained_engine(2, Counting)
    other.count = 0
    load_engine(fresh, tmp_path / ZERO_FOLDER)
    assert other.count == optimizer.count and other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    # The state of the parameters is the saved one, and is still found by row and by parameter.
    assert all(row.tensor in other.state for row in fresh.optimizers[0].rows)
    assert next(model.parameters()) in other.state


@pytest.mark.parametrize(
    ("there", "here"),
    list(itertools.permutations([partial(transformers.Adafactor, relative_step=False), torch.optim.Adafactor])),
    ids=["transformers", "torch"],
)
def test_another_optimizer_of_the_same_name_is_refused(there, here, tmp_path):
    _, _, engine = trained_engine(2, there)
    save_engine(engine, tmp_path)
    _, _, other = trained_engine(2, here)
    with pytest.raises(CheckpointError, match="was made with a different optimizer also called Adafactor: it has"):
        load_engine(other, tmp_path / ZERO_FOLDER)


def test_other_models_and_optimizers_are_refused(tmp_path):
    _, _, engine = trained_engine(2)
    save_engine(engine, tmp_path)
    _, _, other = trained_engine(2, torch.optim.SGD)
    with pytest.raises(CheckpointError, match="was made with the optimizer AdamW, and this run has SGD"):
        load_engine(other, tmp_path / ZERO_FOLDER)
    torch.manual_seed(0)
    model = gpt2()
    model.resize_token_embeddings(300, mean_resizing=False)
    larger = ZeroEngine(model, [torch.optim.AdamW(model.parameters())], 2)
    with pytest.raises(
        CheckpointError, match=r"'transformer.wte.weight' has shape \(211, 24\) in the checkpoint and \(300"
    ):
        load_engine(larger, tmp_path / ZERO_FOLDER)
    frozen = gpt2()
    frozen.transformer.wpe.weight.requires_grad_(False)
    fewer = ZeroEngine(frozen, [torch.optim.AdamW([p for p in frozen.parameters() if p.requires_grad])], 2)
    with pytest.raises(
        CheckpointError, match=r"'transformer\.wpe\.weight' is in the checkpoint but is not trained in this run"
    ):
        load_engine(fewer, tmp_path / ZERO_FOLDER)


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.none() | st.integers(1, 100)), min_size=1, max_size=8),
    st.integers(1, 9),
)
def test_ranks_share_the_hashing_of_files_by_their_bytes(sizes, world_size):
    files = {f"file{i}": unhashed(size, most) for i, (size, most) in enumerate(sizes)}
    verify = [share_of(files, rank, world_size) for rank in range(world_size)]
    everything = [(name, index) for name, file in files.items() for index in range(file.chunks)]
    assert sorted(chunk for share in verify for chunk in share) == sorted(everything)
    assert all(file.chunks <= most for file, (_, most) in zip(files.values(), sizes) if most)
    for share in verify:
        nbytes = sum(files[name].bytes_of(index) for name, index in share)
        assert nbytes <= sum(size for size, _ in sizes) / world_size + max(file.chunk_bytes for file in files.values())


def test_an_error_of_the_reader_does_not_repeat_a_long_name_of_the_checkpoint(tmp_path):
    long = "k" * 6000
    save_alone(tmp_path, [(long, "w", Interval(0, 30), torch.randn(30))])
    with CheckpointReader(tmp_path) as reader:
        attempts = [
            lambda: reader.read(f"{long} and more", "w", Interval(0, 30)),
            lambda: reader.read("master", long, Interval(0, 30)),
            lambda: reader.check_names({"w": (10, 3), long: (1,)}),
        ]
        # The file of another save with the same name, without this row.
        file = tmp_path / row_file(0, 1)
        file.unlink()
        save_file({"other": torch.zeros(1)}, file)
        attempts.append(lambda: reader.read(long, "w", Interval(0, 30)))
        for attempt in attempts:
            with pytest.raises(CheckpointError) as raised:
                attempt()
            assert str(raised.value).startswith("hf_zero: ") and len(str(raised.value)) < 1000


def sealed_by_threads(folders: list[Path], ranks_of_disk: list[tuple[int, ...]], manifest: Manifest) -> int | Exception:
    """Seals a checkpoint whose ranks are threads; returns the most bytes that a rank received in a message, or its error."""
    ranks = len(ranks_of_disk)
    values, received = [None] * ranks, [0] * ranks
    barrier = threading.Barrier(ranks)

    def seal_as(rank: int) -> Exception | None:
        def merge(value):
            # Each rank hears of one more rank in a round.
            for distance in range(1, ranks):
                values[rank] = pickle.dumps(value)
                barrier.wait(30)
                found = values[rank - distance]
                barrier.wait(30)
                received[rank] = max(received[rank], len(found))
                value = value.merged(pickle.loads(found))
            return value

        disk = Disk(ranks=ranks_of_disk[rank], rank=rank, world_size=ranks)
        try:
            seal(folders[rank], manifest, folder="zero", within="", disk=disk, merge=merge)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(ranks) as pool:
        [error, *_] = pool.map(seal_as, range(ranks))
    return error or max(received)


def test_a_ranks_checksums_go_to_the_writer_of_its_disks_manifest_alone(tmp_path, monkeypatch):
    """Two disks, and three ranks for one of them: what a rank receives does not grow with the files."""
    monkeypatch.setattr(hashes, "CHUNK_BYTES", 100)
    cuts = [Interval(0, 8), Interval(8, 16), Interval(16, 24), Interval(24, 30)]
    rows = [[("exp_avg", "w", cut, torch.randn(cut.numel))] for cut in cuts]
    disks = [(0, 1, 3), (0, 1, 3), (2,), (0, 1, 3)]
    received = []
    for nbytes in (10, 90_000):
        folders = {ranks: tmp_path / f"{nbytes}-{ranks[0]}" for ranks in disks}
        manifest = save_of_ranks(tmp_path / f"{nbytes}" / "zero", rows)
        for ranks, folder in folders.items():
            (folder / "zero").mkdir(parents=True)
            (folder / "other").write_bytes(bytes(nbytes))
            # Of a killed run: the mark of a faster rank of this run looks the same.
            (folder / ".hf_zero-left").touch()
            for rank in ranks:
                shutil.copy2(tmp_path / f"{nbytes}" / "zero" / row_file(rank, 4), folder / "zero")
        received.append(sealed_by_threads([folders[ranks] for ranks in disks], disks, manifest))
        for ranks, folder in folders.items():
            found = Manifest.read(folder / "zero")
            assert set(found.files) == {"other", *(f"zero/{row_file(rank, 4)}" for rank in ranks)}
            assert not checkpoint_faults(folder, "zero", rank=0, world_size=1)
            assert [left.name for left in folder.rglob(".hf_zero-*")] == [".hf_zero-left"]
            (folder / ".hf_zero-left").unlink()
    assert received[0] == received[1] < 200
    for lost in (2, 3):
        folders[disks[lost]].joinpath("zero", row_file(lost, 4)).unlink()
        for folder in folders.values():
            (folder / "zero" / "manifest.json").unlink(missing_ok=True)
        error = sealed_by_threads([folders[ranks] for ranks in disks], disks, manifest)
        assert f"{row_file(lost, 4)} was written but no longer exists" in str(error)
        assert not [left for folder in folders.values() for left in folder.rglob(".hf_zero-*")]
        # Not even on the disk that has all files of its ranks.
        assert not [folder for folder in folders.values() if (folder / "zero" / "manifest.json").exists()]
        shutil.copy2(tmp_path / "90000" / "zero" / row_file(lost, 4), folders[disks[lost]] / "zero")


def test_a_flipped_bit_in_any_chunk_of_a_file_is_found_by_the_rank_that_looks_there(tmp_path, monkeypatch):
    monkeypatch.setattr(hashes, "CHUNK_BYTES", 1000)
    manifest = save_alone(tmp_path / "zero", [("exp_avg", "w", Interval(0, 30), torch.randn(30))])
    (tmp_path / "other").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "empty").touch()
    seal(tmp_path, manifest, folder="zero", within="", disk=Disk.shared(), merge=lambda value: value)
    assert len(Manifest.read(tmp_path / "zero").files["other"].xxh3) == 11
    content = bytearray((tmp_path / "other").read_bytes())
    for position in range(0, len(content), 137):
        content[position] ^= 4
        (tmp_path / "other").write_bytes(content)
        found = [checkpoint_faults(tmp_path, "zero", rank=rank, world_size=3) for rank in range(3)]
        assert sum(len(faults) for faults in found) == 1 and any(
            "other differs from the contents" in str(f) for f in found
        )
        content[position] ^= 4
    (tmp_path / "empty").unlink()
    (tmp_path / "other").write_bytes(content)
    assert any(
        "empty is missing" in fault
        for rank in range(3)
        for fault in checkpoint_faults(tmp_path, "zero", rank=rank, world_size=3)
    )


@pytest.mark.parametrize("readers", [1, 3, 7])
def test_a_flipped_bit_of_a_ranks_file_is_found_in_chunks_that_grow_with_the_file(readers, tmp_path, monkeypatch):
    monkeypatch.setattr(hashes, "CHUNK_BYTES", 16)
    monkeypatch.setattr("hf_zero.checkpoint.commit._MOST_ROW_CHUNKS", 20)
    monkeypatch.setattr("hf_zero.checkpoint.commit._FEWEST_ROW_CHUNKS", 4)
    edges = itertools.pairwise([0, 8, 29, 30])
    rows = [[(k, "w", Interval(a, b), torch.randn(b - a)) for k in ("exp_avg", "exp_avg_sq")] for a, b in edges]
    manifest = save_of_ranks(tmp_path / "zero", rows)
    seal(tmp_path, manifest, folder="zero", within="", disk=Disk.shared(), merge=lambda value: value)
    for name, record in Manifest.read(tmp_path / "zero").files.items():
        assert 1 < record.chunks <= 6 and record.chunk_bytes > 16 and record.chunk_bytes % 16 == 0
        written = (tmp_path / name).read_bytes()
        spans = spans_in(tmp_path / name)
        for position in range(0, len(written), 11):
            (tmp_path / name).write_bytes(written[:position] + bytes([written[position] ^ 4]) + written[position + 1 :])
            found = [checkpoint_faults(tmp_path, "zero", rank=rank, world_size=readers) for rank in range(readers)]
            assert any(fault.startswith(f"{name} differs from the contents") for faults in found for fault in faults)
            for tensor, span in spans.items():
                if span.begin <= position < span.end:
                    assert any(tensor in fault for faults in found for fault in faults)
        (tmp_path / name).write_bytes(written)
    assert not any(checkpoint_faults(tmp_path, "zero", rank=rank, world_size=readers) for rank in range(readers))


def test_a_rank_reads_no_header_of_another_ranks_file(tmp_path):
    rows = [[("exp_avg", "w", Interval(10 * rank, 10 * rank + 10), torch.randn(10))] for rank in range(3)]
    manifest = save_of_ranks(tmp_path / "zero", rows)
    for rank in range(3):
        assert own_chunks(tmp_path, manifest, rank=rank, world_size=3) == [(f"zero/{row_file(rank, 3)}", 0)]


def test_a_checkpoint_of_format_8_is_verified_by_its_chunks(tmp_path):
    manifest = save_alone(tmp_path / "zero", [("exp_avg", "w", Interval(0, 30), torch.randn(30))])
    content = bytearray(2 * CHUNK_BYTES + 5)
    (tmp_path / "other").write_bytes(content)
    seal(tmp_path, manifest, folder="zero", within="", disk=Disk.shared(), merge=lambda value: value)
    now = Manifest.read(tmp_path / "zero")
    resign(tmp_path, as_format_8)
    assert json.loads((tmp_path / "zero" / "manifest.json").read_text())["files"]["other"][0] == 2 * CHUNK_BYTES + 5
    assert Manifest.read(tmp_path / "zero") == now and now.files["other"].chunks == 3
    assert checkpoint_faults(tmp_path, "zero") == []
    content[CHUNK_BYTES + 7] ^= 1
    (tmp_path / "other").write_bytes(content)
    [fault] = checkpoint_faults(tmp_path, "zero")
    assert f"(1 damaged pieces of {CHUNK_BYTES} bytes, the first at {CHUNK_BYTES})" in fault


def test_a_file_that_changes_while_ranks_hash_it_is_not_recorded(tmp_path, monkeypatch):
    manifest = save_alone(tmp_path / "zero", [("exp_avg", "w", Interval(0, 30), torch.randn(30))])
    (tmp_path / "other").write_bytes(bytes(3))
    monkeypatch.setattr("hf_zero.checkpoint.commit.hashes_of", lambda path, indices, chunk_bytes: {})
    (tmp_path / "zero" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"could not write the manifest of .*: other changed while it was hashed"):
        seal(tmp_path, manifest, folder="zero", within="", disk=Disk.shared(), merge=lambda value: value)
    assert not (tmp_path / "zero" / "manifest.json").exists()


@given(
    cut=st.integers(0, 4000),
    writers=st.integers(2, 6),
    readers=st.integers(1, 6),
    small=st.lists(st.integers(0, 3000), max_size=3),
)
def test_each_chunk_is_looked_at_and_by_the_rank_that_loads_it_where_that_is_known(
    tmp_path_factory, cut, writers, readers, small
):
    folder = tmp_path_factory.mktemp("shares")
    weights = {"a": torch.zeros(3000), "b": torch.zeros(40, 25)}
    save_file(weights, folder / "model.safetensors")
    # Writer 0 had the first `cut` elements of a and b in a row, and the others about as many each of the remaining ones.
    most = max(1, -(-(4000 - cut) // (writers - 1)))
    edges = [0, *(min(4000, cut + most * writer) for writer in range(writers))]
    parts = [
        {"a": Interval(min(start, 3000), min(stop, 3000)), "b": Interval(max(0, start - 3000), max(0, stop - 3000))}
        for start, stop in itertools.pairwise(edges)
    ]
    rows = [
        SavedRow(kind="exp_avg", name=name, interval=interval, rank=writer, dtype="F32")
        for writer, part in enumerate(parts)
        for name, interval in part.items()
        if interval.numel
    ]
    sizes = {"model.safetensors": (folder / "model.safetensors").stat().st_size}
    for writer, part in enumerate(parts):
        sizes[f"zero/{row_file(writer, writers)}"] = 4 * sum(interval.numel for interval in part.values())
    sizes |= {f"small{i}": size for i, size in enumerate(small)}
    manifest = Manifest(
        world_size=writers,
        stage=3,
        shapes={name: tuple(value.shape) for name, value in weights.items()},
        kinds={name: ("exp_avg",) for name in weights},
        rows=joined_rows(rows),
        scalars={},
        optimizers=(),
        files={
            # Chunks of different sizes: a rank's file may have larger ones.
            name: FileRecord(size=size, chunk_bytes=700 if name.startswith("zero") else 512)
            for name, size in sizes.items()
        },
    )
    looked_at = [set(own_chunks(folder, manifest, rank=rank, world_size=readers)) for rank in range(readers)]
    everything = {(name, index) for name, file in manifest.files.items() for index in range(file.chunks)}
    assert set().union(*looked_at) == everything
    assert all(("model.safetensors", 0) in chunks for chunks in looked_at)
    header_bytes = min(begin for begin, _ in tensors_in(folder / "model.safetensors").values())
    if readers == writers:
        for rank, part in enumerate(parts):
            own = f"zero/{row_file(rank, writers)}"
            loads = sizes[own] + 4 * sum(interval.numel for interval in part.values())
            mine = [(name, index) for name, index in looked_at[rank] if not name.startswith("small")]
            # Two chunks at each of four edges, and the header's.
            assert 512 * len(mine) <= loads + 512 * 8 + header_bytes
            # No chunk of another rank's file.
            assert {name for name, _ in mine} <= {"model.safetensors", own}


# ---- on other numbers of ranks ----

GLOBAL_BATCH = 12
BEFORE, AFTER = range(3), range(3, 8)


def prepared(stage: int, seed: int, lr: float) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = make_accelerator(f"attach {stage}", cpu=True)
    torch.manual_seed(seed)
    model = gpt2()
    optimizer = adamw_in_two_groups(model)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return accelerator, *accelerator.prepare(model, optimizer)


def trained(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The global batch's loss at each step: the same batches, whatever the number of ranks."""
    size = GLOBAL_BATCH // dist.get_world_size()
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    losses = []
    for step in steps:
        batch = gpt2_batch(torch.Generator().manual_seed(step), GLOBAL_BATCH)
        loss = model(**{key: value[mine] for key, value in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and all its optimizer state, whole. Collective."""
    engine = engine_of(model)
    with gathered(model):
        state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for kind, value in engine.full_state(parameter).items():
            state[f"{kind} of {name}"] = torch.as_tensor(value).clone()
    return state


def saves(rank: int, world_size: int, folder: str) -> list[float]:
    """Trains, saves, trains on; the losses of the second half."""
    as_launched(rank, world_size)
    accelerator, model, optimizer = prepared(stage=3, seed=0, lr=1e-3)
    trained(accelerator, model, optimizer, BEFORE)
    accelerator.save_state(f"{folder}/state")
    state = whole_state(model)
    if rank == 0:
        torch.save(state, f"{folder}/whole.pt")
    return trained(accelerator, model, optimizer, AFTER)


def loads(rank: int, world_size: int, folder: str) -> list[list[float]]:
    """The losses of the second half at each stage, after a look at every bit of what was loaded."""
    as_launched(rank, world_size)
    saved = torch.load(f"{folder}/whole.pt", weights_only=True)
    losses = []
    for stage in range(4):
        accelerator, model, optimizer = prepared(stage=stage, seed=5 + stage, lr=0.5)
        accelerator.load_state(f"{folder}/state")
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3]
        state = whole_state(model)
        assert state.keys() == saved.keys() and len(state) == 4 * len(dict(model.named_parameters()))
        for name, value in saved.items():
            assert value.dtype == state[name].dtype == torch.float32, name
            assert torch.equal(value.view(torch.int32), state[name].view(torch.int32)), f"{name} at stage {stage}"
        losses.append(trained(accelerator, model, optimizer, AFTER))
        accelerator.free_memory()
    return losses


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("saved")
    losses = run_on_ranks(saves, world_size=4, folder=str(folder))
    assert losses[0] == losses[3] and len(losses[0]) == len(AFTER)
    return folder, losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", short_of([1, 2, 3, 4], [3]))
def test_a_state_of_4_ranks_at_stage_3_is_the_same_at_every_stage(world_size, uninterrupted):
    folder, expected = uninterrupted
    for losses in run_on_ranks(loads, world_size=world_size, folder=str(folder)):
        for stage, after in enumerate(losses):
            assert np.allclose(after, expected, rtol=1e-5, atol=0), f"stage {stage}"
        if world_size == 4:
            assert losses[3] == expected


# ---- state unlike torch's own ----


class Named(torch.optim.Optimizer):
    """Keeps what it is told to: names of tensors with one value an element, numbers, and steps in a tensor of one element."""

    def __init__(self, parameters, names=(), numbers=(), counts=False, **settings):
        super().__init__(parameters, {"lr": 0.1, "names": names, "numbers": numbers, "counts": counts, **settings})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                for number, name in enumerate(group["names"]):
                    state.setdefault(name, torch.zeros_like(parameter)).add_(parameter.grad, alpha=number + 1)
                if group["counts"]:
                    state.setdefault("count", torch.zeros(1)).add_(1)
                state |= {str(number): torch.tensor(number) for number in group["numbers"]}
                parameter.add_(parameter.grad, alpha=-group["lr"])


def built(
    make_optimizer, config: dict, *, before: int = 0, steps: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    """A model with a parameter without dimensions, as CLIP's temperature is, and its engine, after some steps.

    Args:
        before: steps before there is an engine.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    model.temperature = nn.Parameter(torch.tensor(2.0))
    optimizer = make_optimizer(model.parameters())
    step(model, optimizer, before)
    engine = ZeroEngine(model, [optimizer], config)
    step(model, optimizer, steps)
    return model, optimizer, engine


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        (model(torch.ones(2, 4, dtype=model.weight.dtype)) * model.temperature).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def states(model: nn.Module, engine: ZeroEngine) -> dict[str, dict]:
    return {name: engine.full_state(parameter) for name, parameter in model.named_parameters()}


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


# A parameter without dimensions


@pytest.mark.parametrize("make_optimizer", [adamw, torch.optim.Adagrad], ids=["adamw", "adagrad"])
def test_state_of_a_parameter_without_dimensions_goes_to_rows_that_have_one(tmp_path, make_optimizer):
    model, _, engine = built(make_optimizer, {"stage": 0}, before=1)
    save_engine(engine, tmp_path)
    saved = states(model, engine)
    for loads in (True, False):
        in_rows = {"stage": 2, "param_dtype": "bfloat16"}
        other, optimizer, loaded = built(make_optimizer, in_rows, before=0 if loads else 1)
        if loads:
            load_engine(loaded, tmp_path / ZERO_FOLDER)
        assert optimizer.param_groups[0]["params"][-1].shape == (1,)
        torch.testing.assert_close(states(other, loaded), saved, rtol=0, atol=0)
        step(other, optimizer)
        assert loaded.full_state(other.temperature)["step"] == 2


def test_parameters_without_state_have_no_entry_that_looks_like_a_step(tmp_path):
    """Optimizers may ask `parameter in self.state`."""
    _, _, engine = built(adamw, {"stage": 2})
    save_engine(engine, tmp_path)
    _, optimizer, loaded = built(adamw, {"stage": 2}, steps=1)
    load_engine(loaded, tmp_path / ZERO_FOLDER)
    assert not optimizer.state


# A counter with a dimension


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.ones(1000))

    def forward(self) -> torch.Tensor:
        return self.values.square().sum()


def counts(rank: int, world_size: int, folder: str) -> float:
    """On one rank it saves, on several it goes on; returns the count after a further step."""
    model = Vector()
    optimizer = Named(model.parameters(), names=("m",), counts=True)
    engine = ZeroEngine(model, [optimizer], 2)
    if world_size > 1:
        load_engine(engine, Path(folder) / ZERO_FOLDER)
    model().backward()
    optimizer.step()
    if world_size == 1:
        save_engine(engine, folder)
    return engine.full_state(model.values)["count"].item()


def test_a_counter_with_a_dimension_is_no_state_of_the_whole_parameter(tmp_path):
    arguments = {"folder": str(tmp_path)}
    assert run_on_ranks(counts, world_size=1, **arguments) == [1]
    assert run_on_ranks(counts, **arguments) == [2, 2]


# Names


OF_THE_FORMAT = ("master", "weights", "residual.0", "outer.momentum", "replica.1.x", "own.master")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_optimizer_may_call_its_state_by_words_of_the_format(tmp_path, dtype):
    def make_optimizer(parameters):
        return Named(parameters, names=OF_THE_FORMAT)

    settings = {} if dtype is None else {"param_dtype": dtype}
    model, _, engine = built(make_optimizer, {"stage": 2, **settings}, steps=2)
    save_engine(engine, tmp_path)
    assert checkpoint_faults(tmp_path, ZERO_FOLDER) == []
    other, _, loaded = built(make_optimizer, {"stage": 1, **settings})
    load_engine(loaded, tmp_path / ZERO_FOLDER)
    assert states(model, engine)["weight"].keys() == set(OF_THE_FORMAT)
    torch.testing.assert_close(states(other, loaded), states(model, engine), rtol=0, atol=0)
    masters = [
        {row.name: row.tensor.clone() for row in each.state.rows() if row.kind == "master"} for each in (engine, loaded)
    ]
    assert bool(masters[0]) == (dtype is not None)
    torch.testing.assert_close(*masters, rtol=0, atol=0)


class InLists(torch.optim.Optimizer):
    """Keeps factors of each parameter as SOAP and Shampoo do, and values in containers of every kind."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, shape = self.state[parameter], parameter.shape
                if not state:
                    # An empty list stands for a dimension that is too large to have a factor.
                    factors = [[] if size > 4 else torch.zeros(size, size, dtype=parameter.dtype) for size in shape]
                    named = {"steps": torch.tensor(0.0), 3: None, "last": [1.5, "as it was", (True,)]}
                    state |= {"GG": factors, "shape": (shape, torch.zeros(0)), "named": named, "master": [], "GG.x": 1}
                for dimension, factor in enumerate(state["GG"]):
                    if torch.is_tensor(factor):
                        along = parameter.grad.movedim(dimension, 0).flatten(1)
                        factor.add_(along @ along.T)
                        parameter.sub_(factor.norm() * parameter.grad, alpha=group["lr"])
                state["named"]["steps"].add_(1)
                assert state["shape"][0] == shape and type(state["shape"][0]) is torch.Size


def in_lists(rank: int, world_size: int, folder: str, saves: bool) -> None:
    """Compares state and weights after three steps, of which two are before the save, with those that the saving ranks had."""
    torch.manual_seed(0 if saves else 1)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 6, bias=False))
    engine = ZeroEngine(model, [optimizer := InLists(model.parameters())], {"stage": 2 if saves else 3})

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if saves:
        train(2)
        save_engine(engine, folder)
        if rank == 0:
            torch.save(model.state_dict(), f"{folder}/weights.pt")
        assert checkpoint_faults(Path(folder), ZERO_FOLDER) == []
    else:
        with engine.gathered(writeback=True):
            model.load_state_dict(torch.load(f"{folder}/weights.pt", weights_only=True))
        load_engine(engine, Path(folder) / ZERO_FOLDER)
    train(1)
    states = {name: engine.full_state(parameter) for name, parameter in model.named_parameters()}
    with engine.gathered():
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    if saves:
        assert states["2.weight"]["GG"][0] == [] and states["0.weight"]["named"]["last"] == [1.5, "as it was", (True,)]
        if rank == 0:
            torch.save((states, weights), f"{folder}/expected.pt")
        return
    expected, its_weights = torch.load(f"{folder}/expected.pt", weights_only=True)
    torch.testing.assert_close(weights, its_weights, rtol=1e-6, atol=0)
    for name, state in expected.items():
        assert states[name].keys() == state.keys()
        torch.testing.assert_close(states[name]["GG"], state["GG"], rtol=1e-5, atol=1e-7)
        assert states[name]["named"] == state["named"] and states[name]["shape"][0] == state["shape"][0]


def test_state_in_lists_tuples_and_dicts_goes_on_at_another_world_size_and_stage(tmp_path):
    run_on_ranks(in_lists, folder=str(tmp_path), saves=True)
    kinds = Manifest.read(tmp_path / ZERO_FOLDER).kinds
    assert {"GG.0", "GG.1"} <= set(kinds["0.weight"]) and "GG.0" not in kinds["2.weight"]
    run_on_ranks(in_lists, world_size=3, folder=str(tmp_path), saves=False)


@given(
    st.dictionaries(
        st.text("ab.0", max_size=3),
        st.recursive(
            st.none() | st.integers() | st.text() | st.just(torch.ones(2)),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.lists(inner, max_size=3).map(tuple)
                | st.dictionaries(st.text("ab.0", max_size=2) | st.integers(0, 3), inner, max_size=3)
            ),
        ),
        max_size=3,
    )
)
def test_nested_state_comes_back_from_its_flat_values(state):
    flat = flat_state(state)
    assert nested_state(flat) == state
    # Unless two values would have one name.
    is_flat = not any(isinstance(value, list | tuple | dict) for value in flat.values())
    assert is_flat or any("." in name for name in state)
    for kind in flat:
        if kind.startswith("nested."):
            for damaged in ("", "[", "3", '["list", 99]', '["other", 0]', '["dict", [[]]]', "[" * 100_000):
                with contextlib.suppress(ValueError):
                    nested_state(flat | {kind: damaged})


def test_the_word_for_masters_is_refused_in_files(tmp_path):
    settings = {"stage": 2, "param_dtype": "bfloat16", "offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    with pytest.raises(ValueError, match=r"Named names a state 'master'.*Use a different name"):
        built(lambda parameters: Named(parameters, names=("master",)), settings)


# Numbers and settings


def test_numbers_without_a_bound_come_back(tmp_path):
    """Prodigy and D-Adaptation have the setting `growth_rate=inf`."""

    def make_optimizer(parameters):
        numbers = (float("inf"), -float("inf"), float("nan"), 1e30)
        return Named(parameters, numbers=numbers, growth_rate=float("inf"), limits=(-float("inf"), 1e30))

    model, _, engine = built(make_optimizer, {"stage": 2}, steps=1)
    save_engine(engine, tmp_path)
    other, optimizer, loaded = built(make_optimizer, {"stage": 2})
    load_engine(loaded, tmp_path / ZERO_FOLDER)
    torch.testing.assert_close(states(other, loaded), states(model, engine), rtol=0, atol=0, equal_nan=True)
    assert optimizer.param_groups[0]["growth_rate"] == float("inf")
    assert optimizer.param_groups[0]["limits"] == (-float("inf"), 1e30)


def test_settings_come_back_as_the_kind_of_number_that_they_were():
    group = {
        "lr": np.float32(0.1),
        "warmup": np.int64(3),
        "betas": (torch.tensor(0.9), 0.99),
        "steps": [torch.tensor(2)],
    }
    saved = json.loads(json.dumps(plain_settings(group)))
    beta, count = torch.tensor(0.0), torch.tensor(0)
    other = {"lr": np.float32(0), "warmup": np.int64(0), "betas": (beta, 0.0), "steps": [count]}
    restore_settings(other, saved)
    assert other == group and type(other["lr"]) is np.float32 and type(other["warmup"]) is np.int64
    assert other["betas"][0] is beta and other["steps"][0] is count


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (torch.zeros(2), "setting 'odd' is a tensor of 2 numbers"),
        (len, "setting 'odd' is a builtin_function_or_method"),
        ([torch.float32], "setting 'odd' is a dtype"),
        ({1: 2}, "setting 'odd' is a dict"),
    ],
)
def test_settings_that_cannot_be_saved_are_named(tmp_path: Path, setting, says):
    _, optimizer, engine = built(adamw, {"stage": 2}, steps=1)
    optimizer.param_groups[0]["odd"] = setting
    with pytest.raises(CheckpointError, match=rf"{says}, which cannot be saved"):
        save_engine(engine, tmp_path)


def test_state_of_no_parameter_is_refused_and_not_lost(tmp_path):
    _, optimizer, engine = built(adamw, {"stage": 2}, steps=1)
    optimizer.state["count"] = 2
    with pytest.raises(
        CheckpointError, match="AdamW keeps state under 'count', which is not a parameter, and only the state of para"
    ):
        save_engine(engine, tmp_path)


def test_a_checkpoint_of_steps_that_were_one_step_late_is_resumed_without_them(tmp_path):
    """`offload.delay` kept gradients that were due, their settings and a count beside each parameter's state."""
    saved, resumed = ([], [])
    for held in (saved, resumed):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        held += [model, optimizer, ZeroEngine(model, [optimizer], {"stage": 2})]
    model, optimizer, engine = saved
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for parameter, state in optimizer.state.items():
        state |= {"delayed gradient": torch.ones_like(parameter), "delayed setting lr": 0.5}
        state["delayed after steps in time"] = 3
    save_engine(engine, tmp_path)
    with pytest.warns(UserWarning, match=r"offload.delay: 1`, which was removed from hf_zero: the delayed gradients"):
        load_engine(resumed[2], tmp_path / ZERO_FOLDER)
    rows = [each.param_groups[0]["params"] for each in (resumed[1], optimizer)]
    for row, expected_of in zip(*rows, strict=True):
        state, expected = resumed[1].state[row], optimizer.state[expected_of]
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state[name], expected[name]) for name in state)


def test_a_checkout_that_is_not_installed_knows_its_version(monkeypatch):
    def version_of(name: str) -> str:
        if name == "hf-zero":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    assert versions_of.__wrapped__("torch") == {"hf-zero": hf_zero.__version__, "torch": "1.0"}
