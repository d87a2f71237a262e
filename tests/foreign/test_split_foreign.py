"""Runs that FSDP2 sharded beside tensor parallelism, saved by torch.distributed.checkpoint, go on in hf_zero."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from cells import slow
from safetensors.torch import load_file, save_file
from shared_ranks import run_on_ranks
from split_runs import KINDS, SplitJob, load, moments_of, save_models
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from trainer_job import as_launched
from transformers import LlamaForCausalLM, Trainer, TrainerCallback
from typer.testing import CliRunner

from hf_zero import ZeroTrainingArguments, engine_of
from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.cli.app import app
from hf_zero.foreign.convert import open_foreign
from hf_zero.foreign.dcp import DcpFolder
from hf_zero.foreign.states import Chunk
from hf_zero.layout.boxes import Box
from hf_zero.layout.intervals import Interval

pytestmark = pytest.mark.usefixtures("splits_models")
transformers_distributed = pytest.importorskip("transformers.distributed")
KIND = "llama"


def whole(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def writes_fsdp(rank: int, world_size: int, folder: Path) -> dict[str, np.ndarray]:
    """FSDP2 beside tensor parallelism, saved as accelerate, transformers and a plain loop do it; returns what was saved."""
    as_launched(rank, world_size)
    PartialState()
    config = transformers_distributed.DistributedConfig(tp_size=2, fsdp_size=2)
    model = KINDS[KIND][0].from_pretrained(folder / KIND, distributed_config=config)
    named = dict(model.named_parameters())
    decayed = [p for name, p in named.items() if "norm" not in name]
    others = [p for name, p in named.items() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    with torch.no_grad():
        for parameter in named.values():
            state = {"step": torch.tensor(2.0), "exp_avg": parameter * 0.3, "exp_avg_sq": parameter * parameter}
            optimizer.state[parameter] = state
    checkpoint = folder / "checkpoint-2"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = SimpleNamespace(num_processes=world_size, process_index=rank, is_fsdp2=True)
    save_fsdp_model(plugin, accelerator, model, checkpoint)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, checkpoint)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    content = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=flat),
    }
    dist.checkpoint.save(content, checkpoint_id=folder / "plain-2")
    model.save_pretrained(folder / "transformers-2", distributed_checkpoint=True)
    transformers_distributed.save_optimizer_distributed(model, optimizer, folder / "transformers-2" / "optimizer")
    saves_experts(folder)
    if rank == 0:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        for made in (checkpoint, folder / "plain-2", folder / "transformers-2"):
            torch.save(schedule.state_dict(), made / "scheduler.pt")
            (made / "trainer_state.json").write_text(
                json.dumps({"global_step": 2, "max_steps": 2, "train_batch_size": 2})
            )
            model.config.save_pretrained(made)
    kept = {name: whole(p) for name, p in named.items()}
    for name, parameter in named.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            kept[f"{kind} of {name}"] = whole(optimizer.state[parameter][kind])
    return kept


def saves_experts(folder: Path) -> None:
    """A mixture of experts under FSDP2 alone, with an optimizer that keeps no state."""
    config = transformers_distributed.DistributedConfig(fsdp_size=4)
    model = KINDS["mixtral"][0].from_pretrained(folder / "mixtral", distributed_config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model.save_pretrained(folder / "experts-2", distributed_checkpoint=True)
    transformers_distributed.save_optimizer_distributed(model, optimizer, folder / "experts-2" / "optimizer")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> SimpleNamespace:
    """Folders of one run, and the values that it had."""
    folder = tmp_path_factory.mktemp("fsdp")
    save_models(folder)
    [saved, *_] = run_on_ranks(writes_fsdp, world_size=4, folder=folder)
    return SimpleNamespace(folder=folder, saved=saved)


class Kept(TrainerCallback):
    """What a run has when it has been resumed."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.values: dict[str, np.ndarray] = {}

    def on_train_begin(self, args, state, control, model=None, **_):
        engine = engine_of(model)
        assert {float(scalars["step"]) for scalars in engine.state.scalars().values()} == {2.0}
        weights = self.trainer.accelerator.get_state_dict(model)
        self.values = moments_of(engine, model) | {name: value.numpy().copy() for name, value in weights.items()}


def resumes(rank: int, world_size: int, folder: Path, tp: int, name: str, stage: int) -> dict[str, np.ndarray]:
    """Values that a Trainer has which resumes from a checkpoint: moments, and on the first rank weights."""
    as_launched(rank, world_size)
    model = load(SplitJob(folder=str(folder), kind=KIND, tp=tp))
    torch.nn.init.zeros_(model.model.norm.weight)
    arguments = ZeroTrainingArguments(
        zero=str(stage),
        output_dir=str(folder / f"out-{world_size}-{tp}"),
        per_device_train_batch_size=2,
        max_steps=3,
        weight_decay=0.1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    ids = torch.zeros(8, dtype=torch.long)
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 16)
    trainer.add_callback(kept := Kept(trainer))
    trainer.train(resume_from_checkpoint=str(folder / name))
    return kept.values


@pytest.mark.parametrize(
    "name, world_size, tp, stage",
    [
        ("plain-2", 2, 1, 3),
        slow("checkpoint-2", 1, 1, 2),
        slow("transformers-2", 2, 2, 1),
        slow("checkpoint-2", 4, 2, 2),
        slow("transformers-2", 4, 1, 3),
    ],
)
def test_fsdp_beside_tensor_parallelism_is_resumed_bit_for_bit(sharded, name, world_size, tp, stage):
    everyone = run_on_ranks(resumes, world_size=world_size, folder=sharded.folder, tp=tp, name=name, stage=stage)
    assert everyone[0].keys() == sharded.saved.keys()
    for kept in everyone:
        assert kept.keys() >= {key for key in sharded.saved if key.startswith("exp_avg")}
        for key, value in kept.items():
            assert np.array_equal(value, sharded.saved[key]), key


@pytest.mark.parametrize(
    "command, name",
    [
        ("consolidate", "checkpoint-2"),
        ("convert", "plain-2"),
        ("convert", "transformers-2"),
        ("consolidate", "transformers-2"),
    ],
)
def test_fsdp_beside_tensor_parallelism_is_written_for_from_pretrained(sharded, tmp_path, command, name):
    done = CliRunner().invoke(app, [command, str(sharded.folder / name), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert not list((tmp_path / "out").glob(".metadata")) and not list((tmp_path / "out").glob("*.distcp"))
    for key, parameter in LlamaForCausalLM.from_pretrained(tmp_path / "out").named_parameters():
        assert np.array_equal(parameter.detach().numpy(), sharded.saved[key]), key


def load_counted(chunk: Chunk, read: list[Chunk]) -> object:
    read.append(chunk)
    return chunk.load()


def test_a_rank_reads_the_chunks_of_its_own_part_once(sharded):
    foreign = open_foreign(sharded.folder / "checkpoint-2")
    read = []
    name = "model.layers.0.self_attn.o_proj.weight"
    entries = foreign._optimizer.saved.entries
    path = ("optimizer", "state", name, "exp_avg")
    counted = [replace(chunk, load=partial(load_counted, chunk, read)) for chunk in entries[path].chunks]
    entries[path] = replace(entries[path], chunks=tuple(counted))
    box = Box.whole(foreign.shapes[name]).split(1, 2, 1)
    values = foreign.read_part("exp_avg", name, box, Interval(box.numel // 2, box.numel))
    assert values.tolist() == sharded.saved[f"exp_avg of {name}"][16:, 16:].reshape(-1).tolist()
    # One of four: the others have other rows or other columns.
    assert [chunk.offsets for chunk in read] == [(16, 16)]


def test_chunks_that_overlap_are_refused(sharded):
    folder = DcpFolder(sharded.folder / "checkpoint-2" / "pytorch_model_fsdp_0")
    path = ("model", "lm_head.weight")
    first, second, *rest = folder.entries[path].chunks
    twice = SimpleNamespace(**{**vars(second), "offsets": (second.offsets[0] - 1, 0)})
    folder.entries[path] = SimpleNamespace(shape=folder.entries[path].shape, chunks=(first, twice, *rest))
    with pytest.raises(CheckpointError, match="two chunks share elements"):
        folder.read(path, Interval(0, 1))


def test_weights_of_transformers_without_an_optimizer_or_a_ranks_file_are_refused(sharded, tmp_path):
    folder = tmp_path / "saved"
    shutil.copytree(sharded.folder / "transformers-2", folder)
    shards = sorted(folder.glob("shard-*.safetensors"))
    assert len(shards) == 4
    shutil.copytree(folder / "optimizer", folder / "optimizer-of-before")
    with pytest.raises(CheckpointError, match="several folders that may be the optimizer's"):
        open_foreign(folder)
    shutil.rmtree(folder / "optimizer-of-before")
    (folder / "optimizer").rename(tmp_path / "optimizer")
    with pytest.raises(CheckpointError, match="save_optimizer_distributed"):
        open_foreign(folder)
    (tmp_path / "optimizer").rename(folder / "optimizer")
    for missing, fault in ((shards[1], "has no shard-00002-model"), (shards[3], "rank's weights file is missing")):
        content = missing.read_bytes()
        missing.unlink()
        with pytest.raises(CheckpointError, match=fault):
            open_foreign(folder)
        missing.write_bytes(content)
    shards[2].write_bytes(shards[2].read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is cut off or damaged"):
        open_foreign(folder)


@pytest.mark.slow
def test_experts_in_a_file_a_rank_are_written_as_files_have_them_with_an_optimizer_or_without(sharded, tmp_path):
    folder = Path(shutil.copytree(sharded.folder / "experts-2", tmp_path / "saved"))
    commands = [["convert", "--optimizer", "SGD"], ["consolidate"]]
    for (command, *options), has_optimizer in zip(commands, (True, False)):
        if not has_optimizer:
            shutil.rmtree(folder / "optimizer")
        out = tmp_path / command
        for words in ([command, str(folder), str(out), *options], ["verify", str(out)], ["verify", str(folder)]):
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, done.output
        saved = load_file(sharded.folder / "mixtral" / "model.safetensors")
        written = load_file(out / "model.safetensors")
        assert written.keys() == saved.keys()
        assert all(torch.equal(written[name], saved[name]) for name in saved)
        assert not list(out.glob("shard-*"))


def test_the_last_ranks_file_is_missed_where_no_optimizer_tells_the_shapes(sharded, tmp_path):
    folder = Path(shutil.copytree(sharded.folder / "experts-2", tmp_path / "saved"))
    sorted(folder.glob("shard-*.safetensors"))[-1].unlink()
    for words, fault in (
        (["verify", str(folder)], "further files after shard-00003"),
        (["consolidate", str(folder), str(tmp_path / "out")], "further files after shard-00003"),
        (["convert", str(folder), str(tmp_path / "out"), "--optimizer", "SGD"], "a file of the checkpoint is missing"),
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 1
        assert fault in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def rewritten(path: Path, placed: str) -> None:
    """A rank's file again, with something else in the place of where its boxes begin."""
    save_file(load_file(path), path, metadata={"DCP_SHARDING_INFO": placed})


@pytest.mark.parametrize(
    "placed, fault",
    [
        ("{}", "does not state which part of 'lm_head.weight'"),
        ("[", "in its header is damaged"),
        ('{"lm_head.weight": {}}', "in its header is damaged"),
        ('{"lm_head.weight": {"saved_offsets": [0.5, 0]}}', "in its header is damaged"),
    ],
)
def test_a_file_that_does_not_say_what_it_holds_is_refused(sharded, tmp_path, placed, fault):
    folder = Path(shutil.copytree(sharded.folder / "experts-2", tmp_path / "saved"))
    rewritten(sorted(folder.glob("shard-*.safetensors"))[0], placed)
    with pytest.raises(CheckpointError, match=fault):
        open_foreign(folder)
    assert CliRunner().invoke(app, ["verify", str(folder)]).exit_code == 1
