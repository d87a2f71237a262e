"""Writing and reading rows by themselves: any split reads any other, faults on one rank are every rank's."""

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from cells import examples, short_rows
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from safetensors.torch import save_file
from saved_engines import save_engine
from trainer_job import as_launched
from training import gpt2, gpt2_batch

from hf_zero.checkpoint import files
from hf_zero.checkpoint.commit import Disk, seal
from hf_zero.checkpoint.files import CHUNK_BYTES, CheckpointError, FileRecord, chunks_in, share_of
from hf_zero.checkpoint.headers import tensors_in
from hf_zero.checkpoint.manifest import Manifest, SavedRow
from hf_zero.checkpoint.reader import CheckpointReader
from hf_zero.checkpoint.structure import plain_settings, restore_settings
from hf_zero.checkpoint.writer import plan_rows, write_pieces
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations import verify
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine
from hf_zero.integrations.verify import checkpoint_faults, own_chunks
from hf_zero.layout.slots import Interval

pytestmark = pytest.mark.timeout(120)


def save_alone(folder, rows, scalars=None) -> Manifest:
    manifest, pieces = plan_rows(
        folder,
        rank=0,
        world_size=1,
        stage=2,
        rows=rows,
        shapes={"w": (10, 3)},
        scalars=scalars or {},
        optimizers=list,
        exchange=lambda value: [value],
    )
    write_pieces(pieces, folder, lambda value: [value])
    manifest.write(folder)
    return manifest


@examples(50)
@given(st.sets(st.integers(1, 29)), st.sets(st.integers(1, 29)))
def test_any_split_reads_any_other(tmp_path_factory, cuts_then, cuts_now):
    folder = tmp_path_factory.mktemp("rows")
    values = torch.arange(30, dtype=torch.float32)
    edges = [0, *sorted(cuts_then), 30]
    rows = [(f"part{i}", "w", Interval(a, b), values[a:b]) for i, (a, b) in enumerate(itertools.pairwise(edges))]
    manifest = save_alone(folder, rows)
    # Each part was saved under a kind of its own; one kind whose rows lie in all of them is what ranks write.
    one_kind = tuple(replace(row, kind="exp_avg") for row in manifest.rows)
    replace(manifest, rows=one_kind, kinds={"w": ("exp_avg",)}).write(folder)
    edges = [0, *sorted(cuts_now), 30]
    with CheckpointReader(folder) as reader:
        for a, b in itertools.pairwise(edges):
            assert torch.equal(reader.read("exp_avg", "w", Interval(a, b)), values[a:b])


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
        CheckpointError, match=r"rank 0 could not write to .*No space left on device.*training state is unharmed"
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
    messages = run_ranks(fails_on_one_rank, world_size=2, time_limit_s=60, keyword_arguments={"folder": str(tmp_path)})
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
    saved = run_ranks(saved_state, world_size=world, time_limit_s=60, keyword_arguments={**arguments, "stage": stage})
    world, stage = reads
    for loaded in run_ranks(
        loaded_state, world_size=world, time_limit_s=60, keyword_arguments={**arguments, "stage": stage}
    ):
        assert loaded == saved[0]


@pytest.mark.parametrize(
    ("there", "here"),
    itertools.permutations([partial(transformers.Adafactor, relative_step=False), torch.optim.Adafactor]),
    ids=["transformers", "torch"],
)
def test_another_optimizer_of_the_same_name_is_refused(there, here, tmp_path):
    _, _, engine = trained_engine(2, there)
    save_engine(engine, tmp_path)
    _, _, other = trained_engine(2, here)
    with pytest.raises(CheckpointError, match="was made with another optimizer that is called Adafactor: it has"):
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
    with pytest.raises(CheckpointError, match=r"'transformer.wte.weight' has shape \(211, 24\) there and \(300, 24\)"):
        load_engine(larger, tmp_path / ZERO_FOLDER)
    frozen = gpt2()
    frozen.transformer.wpe.weight.requires_grad_(False)
    fewer = ZeroEngine(frozen, [torch.optim.AdamW([p for p in frozen.parameters() if p.requires_grad])], 2)
    with pytest.raises(
        CheckpointError, match=r"'transformer\.wpe\.weight' is in the checkpoint but is not trained now"
    ):
        load_engine(fewer, tmp_path / ZERO_FOLDER)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8), st.integers(1, 9))
def test_ranks_share_the_hashing_of_files_by_their_bytes(sizes, world_size):
    named = {f"file{i}": size for i, size in enumerate(sizes)}
    verify = [share_of(named, rank, world_size) for rank in range(world_size)]
    everything = [(name, index) for name, size in named.items() for index in range(chunks_in(size))]
    assert sorted(chunk for share in verify for chunk in share) == sorted(everything)
    for share in verify:
        nbytes = sum(min(CHUNK_BYTES, named[name] - index * CHUNK_BYTES) for name, index in share)
        assert nbytes <= sum(sizes) / world_size + CHUNK_BYTES


def test_a_flipped_bit_in_any_chunk_of_a_file_is_found_by_the_rank_that_looks_there(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(verify, "CHUNK_BYTES", 1000)
    manifest = save_alone(tmp_path / "zero", [("exp_avg", "w", Interval(0, 30), torch.randn(30))])
    (tmp_path / "other").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "empty").touch()
    seal(tmp_path, manifest, folder="zero", within="", disk=Disk.shared(), exchange=lambda value: [value])
    assert len(Manifest.read(tmp_path / "zero").files["other"].xxh3) == 11
    content = bytearray((tmp_path / "other").read_bytes())
    for position in range(0, len(content), 137):
        content[position] ^= 4
        (tmp_path / "other").write_bytes(content)
        found = [checkpoint_faults(tmp_path, "zero", rank=rank, world_size=3) for rank in range(3)]
        assert sum(len(faults) for faults in found) == 1 and any("other has other contents" in str(f) for f in found)
        content[position] ^= 4
    (tmp_path / "empty").unlink()
    (tmp_path / "other").write_bytes(content)
    assert any(
        "empty is missing" in fault
        for rank in range(3)
        for fault in checkpoint_faults(tmp_path, "zero", rank=rank, world_size=3)
    )


@given(
    cut=st.integers(0, 4000),
    readers=st.integers(1, 5),
    small=st.lists(st.integers(0, 3000), max_size=3),
)
def test_each_chunk_is_looked_at_and_by_the_rank_that_loads_it_where_that_is_known(
    tmp_path_factory, cut, readers, small
):
    folder = tmp_path_factory.mktemp("shares")
    weights = {"a": torch.zeros(3000), "b": torch.zeros(40, 25)}
    save_file(weights, folder / "model.safetensors")
    # Writer 0 had the first `cut` elements of a and b in a row, writer 1 the others.
    split = {"a": min(cut, 3000), "b": max(0, cut - 3000)}
    halves = [
        {name: Interval(0, split[name]) for name in weights},
        {name: Interval(split[name], weights[name].numel()) for name in weights},
    ]
    rows = [
        SavedRow(
            kind="exp_avg",
            name=name,
            interval=interval,
            file=f"rank-{writer}.safetensors",
            key=f"exp_avg/{name}",
            dtype="F32",
        )
        for writer, half in enumerate(halves)
        for name, interval in half.items()
        if interval.numel
    ]
    sizes = {"model.safetensors": (folder / "model.safetensors").stat().st_size}
    for writer, half in enumerate(halves):
        sizes[f"zero/rank-{writer}.safetensors"] = 4 * sum(interval.numel for interval in half.values())
    sizes |= {f"small{i}": size for i, size in enumerate(small)}
    manifest = Manifest(
        world_size=2,
        stage=3,
        shapes={name: tuple(value.shape) for name, value in weights.items()},
        kinds={name: ("exp_avg",) for name in weights},
        rows=tuple(rows),
        scalars={},
        optimizers=(),
        files={name: FileRecord(size=size, xxh3=("",) * chunks_in(size)) for name, size in sizes.items()},
    )
    with mock.patch.object(files, "CHUNK_BYTES", 512), mock.patch.object(verify, "CHUNK_BYTES", 512):
        looked_at = [set(own_chunks(folder, manifest, rank=rank, world_size=readers)) for rank in range(readers)]
        everything = {(name, index) for name, size in sizes.items() for index in range(chunks_in(size))}
        assert set().union(*looked_at) == everything
        assert all(("model.safetensors", 0) in chunks for chunks in looked_at)
        header_bytes = min(begin for begin, _ in tensors_in(folder / "model.safetensors").values())
        if readers == 2 and len({row.file for row in rows}) == 2:
            for rank, half in enumerate(halves):
                loads = sizes[f"zero/rank-{rank}.safetensors"] + 4 * sum(interval.numel for interval in half.values())
                mine = [(name, index) for name, index in looked_at[rank] if not name.startswith("small")]
                # Two chunks at each of four edges, and the header's.
                assert 512 * len(mine) <= loads + 512 * 8 + header_bytes
