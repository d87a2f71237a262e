"""Runs of FSDP and DeepSpeed go on in hf_zero, bit for bit as the same run of plain Trainer; FSDP's files; `hf-zero convert`."""

import json
import os
import pickle
import resource
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from accelerate_job import make_accelerator
from cells import slow
from deepspeed_folder import WholeState, write_deepspeed
from foreign_checks import KINDS, Harm, on_ranks, refusal, same_bits
from ranks import run_alone
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from trainer_job import as_launched, history, make_trainer
from training import adamw_in_two_groups, bert, gpt2, gpt2_batch
from typer.testing import CliRunner

from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.verify import checkpoint_faults
from hf_zero.cli.app import app
from hf_zero.engine.engine import ZeroEngine
from hf_zero.foreign import dcp
from hf_zero.foreign.convert import load_foreign_weights, open_foreign, open_saved_by_others
from hf_zero.foreign.pickles import load_dcp_metadata
from hf_zero.integrations.plain_optimizers import open_plain
from hf_zero.integrations.state_io import load_state
from hf_zero.layout.intervals import Interval

pytestmark = pytest.mark.timeout(180)

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.pt"


def trains(rank: int, world_size: int, output_dir: str) -> dict:
    """A plain DDP run of six steps with checkpoints at 4; its losses and the optimizer's groups by name."""
    as_launched(rank, world_size)
    trainer = make_trainer("ddp", "bert", output_dir, max_steps=6, save_strategy="steps", save_steps=4)
    trainer.train()
    names = {
        id(parameter): name for name, parameter in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    }
    groups = [[names[id(p)] for p in group["params"]] for group in trainer.optimizer.param_groups]
    return {**history(trainer), "groups": groups}


def writes_fsdp(rank: int, world_size: int, folder: str, whole: WholeState) -> None:
    """The state as an FSDP2 run of accelerate saves it."""
    as_launched(rank, world_size)
    PartialState()
    model, _ = bert(), torch.manual_seed(1)
    for layer in model.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{**s, "params": [parameters[n] for n in names]} for s, names in whole.groups])
    saved = {"state": whole.state, "param_groups": [{**s, "params": names} for s, names in whole.groups]}
    set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(full_state_dict=True))
    set_model_state_dict(model, whole.weights, options=StateDictOptions(full_state_dict=True))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(num_processes=world_size, process_index=rank, is_fsdp2=True)
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> SimpleNamespace:
    """A DDP run: its folder, losses, and whole state at step 4."""
    folder = tmp_path_factory.mktemp("plain")
    run = on_ranks(trains, output_dir=str(folder))[0]
    saved = torch.load(folder / "checkpoint-4" / OPTIMIZER, weights_only=True)
    names = [name for group in run["groups"] for name in group]
    whole = WholeState(
        weights=load_file(folder / "checkpoint-4" / WEIGHTS),
        groups=[
            ({key: value for key, value in group.items() if key != "params"}, group_names)
            for group, group_names in zip(saved["param_groups"], run["groups"])
        ],
        state={names[index]: values for index, values in saved["state"].items()},
    )
    return SimpleNamespace(folder=folder, losses=run["losses"], whole=whole)


def without_state(plain: SimpleNamespace, folder: Path) -> Path:
    """The run's checkpoint less its weights and optimizer, for another engine's to be put beside the rest."""
    shutil.copytree(plain.folder / "checkpoint-4", folder / "checkpoint-4")
    for name in (WEIGHTS, OPTIMIZER):
        (folder / "checkpoint-4" / name).unlink()
    return folder / "checkpoint-4"


@pytest.fixture(scope="module")
def sharded(plain, tmp_path_factory) -> Path:
    """The same run with the checkpoint of FSDP on two ranks."""
    folder = tmp_path_factory.mktemp("fsdp")
    on_ranks(writes_fsdp, folder=str(without_state(plain, folder)), whole=plain.whole)
    return folder


@pytest.fixture(scope="module")
def zeroed(plain, tmp_path_factory) -> dict[str, Path]:
    """The same run with checkpoints of DeepSpeed."""
    folders = {}
    for stage, world_size in ((2, 3), (3, 2)):
        folders[f"stage {stage}"] = folder = tmp_path_factory.mktemp(f"deepspeed{stage}")
        checkpoint = without_state(plain, folder)
        write_deepspeed(checkpoint, plain.whole, stage=stage, world_size=world_size, sub_group_numel=4000)
    return folders


def goes_on(rank: int, world_size: int, checkpoints: list[str], stages: list[int], out: str) -> list[list[dict]]:
    """Goes on from each checkpoint to step 6 at each stage, a new model of other weights each time."""
    as_launched(rank, world_size)
    return [goes_on_at(stage, checkpoints, f"{out}/{stage}") for stage in stages]


def goes_on_at(stage: int, checkpoints: list[str], out: str) -> list[dict]:
    outcomes = []
    for number, checkpoint in enumerate(checkpoints):
        trainer = make_trainer(f"flag {stage}", "bert", f"{out}/{number}", seed=77 + number, max_steps=6)
        trainer.train(resume_from_checkpoint=checkpoint)
        state = trainer.accelerator.get_state_dict(trainer.model)
        outcomes.append({**history(trainer), "state": {name: value.tolist() for name, value in state.items()}})
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "stages"), [slow(1, [0, 1, 2, 3]), (2, [3]), slow(2, [0, 1, 2]), slow(3, [0, 1, 2, 3])]
)
def test_runs_of_fsdp_and_deepspeed_go_on_at_every_stage_as_the_same_run_of_plain_trainer(
    world_size, stages, plain, sharded, zeroed, tmp_path
):
    folders = [plain.folder, sharded, *zeroed.values()]
    checkpoints = [str(folder / "checkpoint-4") for folder in folders]
    of_ranks = on_ranks(goes_on, world_size, checkpoints=checkpoints, stages=stages, out=str(tmp_path))
    for stage, (expected, *others) in ((s, o) for outcomes in of_ranks for s, o in zip(stages, outcomes, strict=True)):
        assert len(expected["losses"]) == 6
        if world_size == 2:
            assert expected["losses"] == plain.losses, stage
        assert others == [expected] * 3, stage


# ---- FSDP: torch.distributed.checkpoint ----


def test_an_fsdp_checkpoint_holds_the_run_bit_for_bit_in_any_cut(plain, sharded):
    foreign, whole = open_foreign(sharded / "checkpoint-4"), plain.whole
    assert [list(group.names) for group in foreign.groups] == [names for _, names in whole.groups]
    for group, (expected, _) in zip(foreign.groups, whole.groups):
        assert {**group.settings, "betas": tuple(group.settings["betas"])} == {
            **expected,
            "betas": tuple(expected["betas"]),
        }
    for name in foreign.shapes:
        assert foreign.scalars_of(name) == {"step": torch.tensor(4.0)}
        for kind in ("master", *KINDS):
            expected = (whole.weights[name] if kind == "master" else whole.state[name][kind]).reshape(-1)
            cuts = [0, expected.numel() // 3, expected.numel() // 3 + 1, expected.numel()]
            parts = [foreign.read(kind, name, Interval(a, b)) for a, b in pairwise(cuts)]
            assert same_bits(torch.cat(parts), expected), (kind, name)
    assert {n: v.shape for n, v in foreign.weights()} == {n: v.shape for n, v in whole.weights.items()}


def writes_boxes(rank: int, world_size: int, folder: str) -> None:
    """A tensor sharded over its columns, one over both dimensions' blocks, and a whole one."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    square = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    tensor = torch.arange(35.0).view(5, 7)
    both = [dist.tensor.Shard(0), dist.tensor.Shard(1)]
    content = {
        "columns": dist.tensor.distribute_tensor(tensor, mesh, [dist.tensor.Shard(1)]),
        "blocks": dist.tensor.distribute_tensor(tensor, square, both),
        "whole": tensor,
        "scalar": torch.tensor(3.0),
    }
    dist.checkpoint.save({"model": content}, checkpoint_id=folder)


def test_boxes_of_any_direction_are_put_together(tmp_path):
    on_ranks(writes_boxes, 4, folder=str(tmp_path))
    folder, expected = dcp.DcpFolder(tmp_path), torch.arange(35.0)
    for name in ("columns", "blocks", "whole"):
        for start, stop in ((0, 35), (3, 4), (6, 22), (34, 35), (9, 9)):
            assert torch.equal(folder.read(("model", name), Interval(start, stop)), expected[start:stop]), name
    assert folder.read(("model", "scalar"), Interval(0, 1)).tolist() == [3.0]


def test_a_rank_reads_only_the_chunks_of_its_rows(sharded, monkeypatch):
    read_bytes = []
    load = dcp.load_stream
    monkeypatch.setattr(
        dcp, "load_stream", lambda content, path: read_bytes.append(len(content)) or load(content, path)
    )
    foreign = open_foreign(sharded / "checkpoint-4")
    name = "bert.embeddings.word_embeddings.weight"
    numel = torch.Size(foreign.shapes[name]).numel()
    sizes = []
    for interval in (Interval(0, numel), Interval(0, numel // 2), Interval(numel - 1, numel)):
        read_bytes.clear()
        foreign.read("exp_avg", name, interval)
        sizes.append(sum(read_bytes))
    assert sizes[0] > 4 * numel > sizes[1] > 2 * numel and sizes[2] < 0.6 * sizes[0]


@pytest.fixture
def fsdp(sharded, tmp_path) -> Path:
    shutil.copytree(sharded / "checkpoint-4", tmp_path / "checkpoint-4")
    return tmp_path / "checkpoint-4"


def test_an_unfinished_or_partial_fsdp_checkpoint_is_refused(fsdp):
    (fsdp / "optimizer_0" / ".metadata").rename(fsdp / "kept")
    assert "was not finished" in refusal(fsdp)
    (fsdp / "kept").rename(fsdp / "optimizer_0" / ".metadata")
    os.truncate(fsdp / "optimizer_0" / ".metadata", 2000)
    assert "is not a DCP checkpoint's metadata, or is damaged" in refusal(fsdp)
    shutil.rmtree(fsdp / "optimizer_0")
    assert "has no optimizer_0/" in refusal(fsdp)


def test_a_missing_or_truncated_file_of_an_fsdp_rank_is_named(fsdp):
    path = fsdp / "pytorch_model_fsdp_0" / "__1_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    assert "__1_0.distcp is truncated" in refusal(fsdp)
    path.unlink()
    assert "__1_0.distcp is missing" in refusal(fsdp)


def test_nothing_in_the_metadata_of_fsdp_is_run(fsdp, tmp_path):
    (fsdp / "optimizer_0" / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    assert "posix.mkdir, which is not a class of a DCP checkpoint" in refusal(fsdp)
    assert not (tmp_path / "harm").exists()


def doubled(first: bytes, end: bytes = b"", make: bytes = b"", call: bytes = b"", times: int = 60) -> bytes:
    """A pickle that makes a tuple of two of the value before, `times` times, and calls `make` with each where that is given."""
    steps = [
        make + b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86" + call + b"q" + bytes([n + 1]) for n in range(times)
    ]
    return b"\x80\x04" + first + b"q\x00" + b"".join(steps) + end + b"."


PATH, LAYOUT = b"cpathlib\nPosixPath\n", b"ctorch.serialization\n_get_layout\n"
BOMBS = {
    "a place of 16 GiB": b"\x80\x04Nr" + (2**30).to_bytes(4, "little") + b".",
    "a place of many digits": b"\x80\x04Np" + b"9" * 4000 + b"\n.",
    "bytes of 2**50": b"\x80\x04\x8e" + (2**50).to_bytes(8, "little") + b"x.",
    "a text of 2**50": b"\x80\x04\x8d" + (2**50).to_bytes(8, "little") + b"x.",
    "an array of 2**50": b"\x80\x05\x96" + (2**50).to_bytes(8, "little") + b"x.",
    "a path that doubles": doubled(b"X\x08\x00\x00\x00" + b"a" * 8, make=PATH, call=b"R"),
    "tuples in tuples for a key": doubled(b")", b"}(h\x3cK\x01u"),
    "a list in several places": doubled(b"]"),
    "a layout of tuples in tuples": doubled(b")", LAYOUT + b"h\x3c\x85R"),
    "tuples a million deep": b"\x80\x04)" + b"\x85" * 10**6 + b".",
    "a number of many digits": b"\x80\x04L" + b"9" * 10**6 + b"L\n.",
}


def reads_metadata(content: bytes, folder: str) -> tuple[str, int]:
    """The refusal, and the bytes by which reading has raised the peak of this process."""
    path = Path(folder, ".metadata")
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load_dcp_metadata(path)
    except CheckpointError as error:
        return str(error), 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return "", 0


@pytest.mark.short_cells(
    "a place of 16 GiB",
    "a place of many digits",
    "bytes of 2**50",
    "a text of 2**50",
    "an array of 2**50",
    "a path that doubles",
    "tuples in tuples for a key",
    "a list in several places",
    "a layout of tuples in tuples",
    "a number of many digits",
)
@pytest.mark.parametrize("name", BOMBS)
def test_metadata_of_a_few_bytes_takes_no_memory_and_no_time(name, tmp_path):
    arguments = {"content": BOMBS[name], "folder": str(tmp_path)}
    said, grown = run_alone(reads_metadata, time_limit_s=20, keyword_arguments=arguments)
    assert "is not a DCP checkpoint's metadata" in said and len(said) < 500 and said.isprintable()
    assert grown < 256 * 2**20


def test_a_full_state_dict_is_refused_by_name(tmp_path):
    (tmp_path / "pytorch_model_fsdp.bin").write_bytes(b"")
    assert "state_dict_type FULL_STATE_DICT, which is not supported" in refusal(tmp_path)


# ---- another model, another optimizer, no scheduler ----


def refuses(rank: int, world_size: int, checkpoint: str, model: str, overrides: dict) -> str:
    as_launched(rank, world_size)
    frozen = overrides.pop("frozen", False)
    trainer = make_trainer("flag 2", model, f"{checkpoint}-out", max_steps=6, **overrides)
    if frozen:
        trainer.model.classifier.requires_grad_(False)
    with pytest.raises((CheckpointError, ValueError)) as refused:
        trainer.train(resume_from_checkpoint=checkpoint)
    return str(refused.value)


@pytest.mark.short_cells("another model-deepspeed", "frozen-deepspeed")
@pytest.mark.parametrize("origin", ["fsdp", "deepspeed"])
@pytest.mark.parametrize(
    ("model", "overrides", "says"),
    [
        ("gpt2", {}, "is from a different model: 'bert.embeddings.word_embeddings.weight' has shape (211, 24) in the"),
        ("bert", {"weight_decay": 0.1, "optim": "sgd"}, "an optimizer that has betas, but SGD has none"),
        (
            "bert",
            {"weight_decay": 0.1, "frozen": True},
            "'classifier.weight' is trained in the checkpoint but not in this run",
        ),
    ],
    ids=["another model", "another optimizer", "frozen"],
)
def test_another_model_or_optimizer_is_refused_on_every_rank(origin, model, overrides, says, sharded, zeroed):
    folder = sharded if origin == "fsdp" else zeroed["stage 3"]
    for message in on_ranks(refuses, checkpoint=str(folder / "checkpoint-4"), model=model, overrides=overrides):
        assert says in message


def test_a_scheduler_of_deepspeeds_config_is_refused(zeroed, tmp_path):
    shutil.copytree(zeroed["stage 2"], tmp_path / "run")
    (tmp_path / "run" / "checkpoint-4" / "scheduler.pt").unlink()
    [message] = on_ranks(refuses, 1, checkpoint=str(tmp_path / "run" / "checkpoint-4"), model="bert", overrides={})
    assert "it was made with a scheduler of DeepSpeed's config" in message


# ---- hf-zero convert ----


@pytest.mark.short_cells("deepspeed")
@pytest.mark.parametrize("origin", ["fsdp", "deepspeed"])
def test_a_converted_checkpoint_is_good_and_goes_on_as_its_source_does(origin, plain, sharded, zeroed, tmp_path):
    source = (sharded if origin == "fsdp" else zeroed["stage 2"]) / "checkpoint-4"
    done = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "checkpoint-4")])
    assert done.exit_code == 0, done.output
    assert checkpoint_faults(tmp_path / "checkpoint-4", "zero") == []
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "checkpoint-4")]).exit_code == 0
    weights = load_file(tmp_path / "checkpoint-4" / WEIGHTS)
    assert weights.keys() == plain.whole.weights.keys()
    assert all(same_bits(weights[name], value) for name, value in plain.whole.weights.items())
    assert json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
    checkpoints = [str(plain.folder / "checkpoint-4"), str(tmp_path / "checkpoint-4")]
    for [(expected, converted)] in on_ranks(goes_on, checkpoints=checkpoints, stages=[3], out=str(tmp_path / "out")):
        assert converted == expected


def test_what_cannot_be_converted_is_refused_in_one_line(zeroed, plain, tmp_path):
    source = zeroed["stage 3"] / "checkpoint-4"

    def said(*arguments: object) -> str:
        done = CliRunner().invoke(app, ["convert", *map(str, arguments)])
        assert done.exit_code == 1
        assert not (tmp_path / "out").exists()
        return " ".join(done.output.split())

    assert "is not a checkpoint of DeepSpeed ZeRO" in said(plain.folder / "checkpoint-4", tmp_path / "out")
    assert "is not an empty folder" in said(source, plain.folder)
    (tmp_path / "other").mkdir()
    assert "has no config.json; pass the model's folder with --config" in said(
        source, tmp_path / "out", "--config", tmp_path / "other"
    )
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(
        json.dumps({**config, "id2label": {str(n): str(n) for n in range(5)}})
    )
    assert "has shape" in said(source, tmp_path / "out", "--config", tmp_path / "other")


def trained_losses(model: nn.Module, optimizer: torch.optim.Optimizer, backward, steps: range) -> list[float]:
    """Steps on batches that are the same on every rank."""
    losses = []
    for step in steps:
        loss = model(**gpt2_batch(torch.Generator().manual_seed(step), 4)).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loads(rank: int, world_size: int, folder: str, stages: list[int]) -> list[list[float]]:
    as_launched(rank, world_size)
    losses = []
    for stage in stages:
        accelerator = make_accelerator(f"attach {stage}", cpu=True)
        torch.manual_seed(8)
        model = gpt2()
        model, optimizer = accelerator.prepare(model, adamw_in_two_groups(model))
        with pytest.raises(ValueError, match="convert it with `hf-zero convert"):
            accelerator.load_state(f"{folder}/deepspeed")
        accelerator.load_state(f"{folder}/ours")
        losses.append(trained_losses(model, optimizer, accelerator.backward, range(3, 6)))
        accelerator.free_memory()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_converted_checkpoint_is_loaded_by_accelerate(world_size, tmp_path):
    torch.manual_seed(0)
    model = gpt2()
    optimizer = adamw_in_two_groups(model)
    trained_losses(model, optimizer, torch.Tensor.backward, range(3))
    names = {parameter: name for name, parameter in model.named_parameters()}
    whole = WholeState(
        weights={name: parameter.detach().clone() for parameter, name in names.items()},
        groups=[
            ({key: value for key, value in group.items() if key != "params"}, [names[p] for p in group["params"]])
            for group in optimizer.param_groups
        ],
        state={names[p]: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()},
    )
    write_deepspeed(tmp_path / "deepspeed", whole, stage=2, world_size=4)
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(tmp_path / "deepspeed")
    expected = trained_losses(model, optimizer, torch.Tensor.backward, range(3, 6))
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "deepspeed"), str(tmp_path / "ours")])
    assert done.exit_code == 0, done.output
    for losses in on_ranks(loads, world_size, folder=str(tmp_path), stages=[0, 2, 3]):
        assert losses == [pytest.approx(expected, rel=1e-5)] * 3


# ---- options of torch.distributed.checkpoint that are seldom met: each goes on, or is refused by one message ----


class Frozen(torch.nn.Module):
    """Two layers that are trained, perhaps with one weight, around one that is not."""

    def __init__(self, *, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen, self.last = (torch.nn.Linear(6, 6) for _ in range(3))
        self.frozen.requires_grad_(False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(values)))


def in_two_groups(model: torch.nn.Module, kind=torch.optim.AdamW) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    vectors = {"params": [p for p in trained if p.dim() == 1], "lr": 5e-3}
    return kind([{"params": [p for p in trained if p.dim() > 1]}, vectors], lr=1e-2)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        dtype = model.first.weight.dtype
        model(torch.ones(2, 6, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved_by_torch(folder: Path, model: torch.nn.Module, kind=torch.optim.AdamW) -> torch.optim.Optimizer:
    """Saves a run after two steps."""
    optimizer = in_two_groups(model, kind)
    steps(model, optimizer, 2)
    weights, state = get_state_dict(model, optimizer)
    torch.distributed.checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=str(folder), no_dist=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return optimizer


def goes_on_as_torch(folder: Path, model: torch.nn.Module, kind=torch.optim.AdamW) -> None:
    load_foreign_weights(model, folder)
    optimizer = in_two_groups(model, kind)
    engine = ZeroEngine(model, [optimizer], 2)
    load_state(engine, folder, open_saved_by_others)
    steps(model, optimizer, 2)
    engine.close()


@pytest.mark.parametrize("tied", [False, True])
def test_groups_frozen_and_tied_parameters_go_on_as_torch_would(tied, tmp_path):
    theirs, ours = Frozen(tied=tied), Frozen(tied=tied)
    optimizer = saved_by_torch(tmp_path, theirs)
    steps(theirs, optimizer, 2)
    goes_on_as_torch(tmp_path, ours)
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_in_bfloat16_goes_on_in_the_dtype_that_is_stepped(dtype, tmp_path):
    theirs = saved_by_torch(tmp_path, Frozen().bfloat16())
    saved = [theirs.state[p] for group in theirs.param_groups for p in group["params"]]
    for file, opens in ((tmp_path, open_saved_by_others), (tmp_path / "optimizer.pt", open_plain)):
        model = Frozen().to(dtype)
        load_foreign_weights(model, tmp_path)
        optimizer = in_two_groups(model)
        engine = ZeroEngine(model, [optimizer], 2)
        load_state(engine, file, opens)
        rows = [row for group in optimizer.param_groups for row in group["params"]]
        for row, before in zip(rows, saved, strict=True):
            for kind in ("exp_avg", "exp_avg_sq"):
                found = optimizer.state[row][kind]
                # On bfloat16 parameters it is the master in float32 that is stepped.
                assert found.dtype == row.dtype == torch.float32
                assert torch.equal(found.flatten(), before[kind].float().flatten()), kind
        steps(model, optimizer, 1)
        assert all(p.isfinite().all() for p in model.parameters())
        engine.close()


@pytest.mark.parametrize(
    ("there", "here", "lacks"),
    [
        (torch.optim.Adagrad, torch.optim.AdamW, "exp_avg"),
        (torch.optim.AdamW, torch.optim.Adamax, "exp_inf"),
        (torch.optim.AdamW, torch.optim.NAdam, "mu_product"),
        (partial(torch.optim.SGD, momentum=0.9), torch.optim.RMSprop, "square_avg"),
    ],
)
def test_state_of_another_optimizer_is_refused_by_what_it_lacks(there, here, lacks, tmp_path):
    saved_by_torch(tmp_path, Frozen(), there)
    with pytest.raises(CheckpointError, match=f"as state of a parameter, and {here.__name__} needs '{lacks}'"):
        goes_on_as_torch(tmp_path, Frozen(), here)


def test_the_file_of_a_plain_trainer_with_state_of_another_optimizer_is_refused(tmp_path):
    saved_by_torch(tmp_path, Frozen())
    model = Frozen()
    engine = ZeroEngine(model, [in_two_groups(model, torch.optim.Adamax)], 2)
    with pytest.raises(CheckpointError, match="as state of a parameter, and Adamax needs 'exp_inf'"):
        load_state(engine, tmp_path / "optimizer.pt", open_plain)
