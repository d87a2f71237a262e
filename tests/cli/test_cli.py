"""The command hf-zero: faults in one line each and exit status 1, and folders that from_pretrained loads."""

import importlib.metadata
import json
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate_job import make_accelerator
from command_runs import hf_zero, refusals
from hostile_folders import by_command, make_card
from launching import ROOT, run_forked
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from trainer_job import as_launched, make_trainer
from training import bert, gpt2
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.cli.app import app
from hf_zero.config.checks import CUT_NAMES
from hf_zero.extras import extra
from hf_zero.integrations import weights
from hf_zero.integrations.run_facts import card_facts
from hf_zero.integrations.saved_weights import FileWeights, SavedTensor

pytestmark = pytest.mark.timeout(120)

ROWS = "zero/rank-00001-of-00002.safetensors"


def saves(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    make_trainer("flag 3", "bert", folder, **saving).train()


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A Trainer's checkpoint of stage 3 on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(saves, world_size=2, time_limit_s=100, keyword_arguments={"folder": str(folder)})
    return folder / "checkpoint-2"


@pytest.fixture
def checkpoint(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "checkpoint-2"))


@pytest.fixture
def plain(tmp_path) -> Path:
    """A model folder with one weights file."""
    torch.manual_seed(1)
    bert().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A model with tied weights in several files and an index."""
    torch.manual_seed(1)
    gpt2().save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    return tmp_path / "sharded"


# ---- verify ----


def test_verify_says_what_it_has_checked(trained, plain, sharded):
    result = hf_zero("verify", trained)
    assert (result.exit_code, result.stdout) == (0, f"{trained}: good: checksums, rows and weights\n")
    for folder in (plain, sharded):
        result = hf_zero("verify", folder)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == f"{folder}: good: weights (no manifest to compare with)\n"


def saves_state(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    accelerator = make_accelerator("attach 3", cpu=True)
    model = gpt2()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(folder)


def test_a_state_of_accelerate_has_no_config_and_is_good(tmp_path):
    run_ranks(saves_state, world_size=2, time_limit_s=100, keyword_arguments={"folder": str(tmp_path)})
    assert hf_zero("verify", tmp_path).exit_code == 0
    assert "2 ranks at stage 3" in hf_zero("inspect", tmp_path).stdout
    flipped(tmp_path / "model.safetensors")
    [line] = refusals("verify", tmp_path)
    assert "model.safetensors differs from the contents" in line


ONE_SMALL_LAYER = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = {"vocab_size": 32, "num_key_value_heads": 2, "num_local_experts": 2}
IMAGES = {"image_size": 8, "patch_size": 4}


@pytest.mark.parametrize(
    "model",
    [
        lambda: MixtralForCausalLM(MixtralConfig(**ONE_SMALL_LAYER, **EXPERTS)),
        lambda: ViTForImageClassification(ViTConfig(**ONE_SMALL_LAYER, **IMAGES)),
    ],
    ids=["experts in one tensor", "other names in files"],
)
def test_verify_knows_models_whose_files_have_other_names_than_their_modules(model: Callable, tmp_path):
    saved: PreTrainedModel = model()
    saved.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) != set(saved.state_dict())
    result = hf_zero("verify", tmp_path)
    assert result.exit_code == 0, result.stderr


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2))


def with_old_names(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "LayerNorm" in name]:
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensors[old] = tensors.pop(name)


def without_the_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)


def with_a_tied_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()


AS_ON_THE_HUB = {
    "position ids": (bert, lambda tensors: tensors.update({"bert.embeddings.position_ids": torch.arange(32)[None]})),
    "old names": (bert, with_old_names),
    "another head": (bert, lambda tensors: tensors.update({"cls.seq_relationship.weight": torch.ones(2, 24)})),
    "no prefix, masks": (gpt2, without_the_prefix),
    "a tied tensor by both names": (gpt2, with_a_tied_name),
    "a bias that decoders do without": (
        t5,
        lambda tensors: tensors.update(
            {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(32, 2)}
        ),
    ),
}


@pytest.mark.short_cells("old names", "no prefix, masks")
@pytest.mark.extra("hub")
@pytest.mark.parametrize("name", AS_ON_THE_HUB)
def test_a_model_that_from_pretrained_takes_as_it_is_on_the_hub_is_good(name, tmp_path):
    make_model, change = AS_ON_THE_HUB[name]
    torch.manual_seed(1)
    live = make_model()
    folder = tmp_path / "hub"
    live.save_pretrained(folder)
    changed(folder, change)
    for words in (("verify", folder), ("inspect", folder), ("consolidate", folder, tmp_path / "out")):
        done = hf_zero(*words)
        assert done.exit_code == 0, done.stderr
    code, said = by_command("push", folder, "me/model")
    assert code == 1 and "files would be sent" in said
    back = type(live).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, back[name]) for name, value in live.state_dict().items())


def test_a_tensor_under_another_name_does_not_stand_for_one_that_is_missing(plain):
    changed(plain, lambda tensors: [with_old_names(tensors), tensors.pop("bert.embeddings.LayerNorm.gamma")])
    assert f"{plain}: bert.embeddings.LayerNorm.weight is missing" in refusals("verify", plain)


def test_whole_numbers_do_not_stand_for_weights_under_an_old_name(plain):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        with_old_names(tensors)
        tensors["bert.embeddings.LayerNorm.gamma"] = torch.ones(24, dtype=torch.int32)

    changed(plain, change)
    assert f"{plain}: bert.embeddings.LayerNorm.weight is missing" in refusals("verify", plain)


def says_quantized(folder: Path, value: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": value}))


def in_codes(tensors: dict[str, torch.Tensor]) -> None:
    """As bitsandbytes saves four bits: codes in the place of the weight, and what they stand for below its name."""
    name = "bert.encoder.layer.0.attention.self.query.weight"
    tensors[name] = torch.zeros(tensors[name].numel() // 2, 1, dtype=torch.uint8)
    tensors |= {f"{name}.absmax": torch.ones(9), f"{name}.quant_map": torch.ones(16)}
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(80, dtype=torch.uint8)


def in_groups(tensors: dict[str, torch.Tensor]) -> None:
    """As GPTQ does: other tensors in the place of the weight."""
    module = "bert.encoder.layer.0.attention.self.query"
    tensors.pop(f"{module}.weight")
    tensors |= {f"{module}.qweight": torch.zeros(3, 24, dtype=torch.int32), f"{module}.scales": torch.ones(1, 24)}


@pytest.mark.parametrize("change", [in_codes, in_groups])
def test_quantized_weights_are_good_with_a_config_that_says_so_and_not_without(change, plain):
    changed(plain, change)
    assert hf_zero("verify", plain).exit_code == 1
    says_quantized(plain, {"quant_method": "any", "load_in_4bit": True})
    done = hf_zero("verify", plain)
    assert done.exit_code == 0, done.stderr
    changed(plain, lambda tensors: tensors.pop("classifier.weight"))
    assert refusals("verify", plain) == [f"{plain}: classifier.weight is missing"]


@pytest.mark.parametrize("value", [{"quant_method": "bitsandbytes", "load_in_4bit": True}, {}, [], "x", 4, {"bits": 4}])
def test_a_config_that_claims_a_quantization_which_the_weights_do_not_have_is_a_fault(value, plain):
    says_quantized(plain, value)
    [line] = refusals("verify", plain)
    assert "config.json has a quantization_config" in line or "config.json cannot be read" in line
    says_quantized(plain, None)
    assert hf_zero("verify", plain).exit_code == 0


HEAD, BIAS = "classifier.weight", "classifier.bias"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda tensors: tensors.update({HEAD: torch.empty(0, 24)}),
            [f"{HEAD} is empty", f"{HEAD} has shape (0, 24), but (3, 24) in the config's model"],
        ),
        (lambda tensors: tensors.pop(HEAD), [f"{HEAD} is missing"]),
        (
            lambda tensors: tensors.update({HEAD: torch.zeros(3, 23)}),
            [f"{HEAD} has shape (3, 23), but (3, 24) in the config's model"],
        ),
        (
            lambda tensors: tensors.update({"module." + BIAS: tensors.pop(BIAS)}),
            [f"module.{BIAS} is not a tensor of the config's model", f"{BIAS} is missing"],
        ),
    ],
    ids=["empty", "missing", "wrong shape", "unknown name"],
)
def test_faults_of_weights_are_one_line_each(change, says, plain):
    changed(plain, change)
    assert refusals("verify", plain) == [f"{plain}: {fault}" for fault in says]
    [line] = refusals("consolidate", plain, plain.with_name("out"))
    assert says[0] in line and not plain.with_name("out").exists()


def test_a_tensor_in_two_files_is_a_fault(sharded):
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    name = min(load_file(first))
    save_file({**load_file(second), name: load_file(first)[name]}, second, metadata={"format": "pt"})
    assert refusals("verify", sharded) == [f"{sharded}: {name} is in two files"]


def test_a_tied_tensor_that_is_under_none_of_its_names_is_missing(sharded):
    for file in sharded.glob("model-*.safetensors"):
        tensors = load_file(file)
        tensors.pop("transformer.wte.weight", None)
        save_file(tensors, file, metadata={"format": "pt"})
    lines = refusals("verify", sharded)
    assert sorted(lines) == [f"{sharded}: {name} is missing" for name in ("lm_head.weight", "transformer.wte.weight")]


def with_index(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: next(folder.glob("model-00002*")).unlink(), r"names 'model-00002.*', which is not a file of"),
        (
            lambda folder: with_index(folder, lambda index: index["weight_map"].update(x="../../x")),
            r"index\.json names '../../x', which is not a file of",
        ),
        (lambda folder: with_index(folder, lambda index: index.pop("weight_map")), r"index\.json is damaged"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is damaged"),
        (lambda folder: (folder / "config.json").unlink(), r"there is no config\.json to compare the weights with"),
        (shutil.rmtree, r"there is no folder .*sharded$"),
    ],
    ids=["missing file", "file elsewhere", "index", "config", "no config", "no folder"],
)
def test_a_folder_that_cannot_be_read_is_one_line(damage, says, sharded):
    damage(sharded)
    [line] = refusals("verify", sharded)
    assert line.startswith(f"{sharded}: ") and re.search(says, line)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def with_giant_header(path: Path) -> None:
    with path.open("r+b") as opened:
        opened.write(struct.pack("<Q", 10 * 2**30))


@pytest.mark.parametrize("name", ["model.safetensors", ROWS, "zero/manifest.json"])
def test_a_flipped_bit_of_a_checkpoint_is_one_line_with_the_files_name(name, checkpoint):
    flipped(checkpoint / name)
    [line] = refusals("verify", checkpoint)
    assert line.startswith(f"{checkpoint}: ") and name in line
    [line] = refusals("consolidate", checkpoint, checkpoint.with_name("out"))
    assert name in line


def test_verify_accepts_edits_of_files_without_tensors_only(checkpoint):
    text, save = (checkpoint / "zero" / "manifest.json").read_text(), Manifest.read(checkpoint / "zero").save
    (checkpoint / "scheduler.pt").unlink()
    with (checkpoint / "config.json").open("a") as opened:
        opened.write("\n")
    *lines, hint = refusals("verify", checkpoint)
    assert {line.split()[1] for line in lines} == {"scheduler.pt", "config.json"} and "--accept" in hint
    for harm in (lambda: flipped(checkpoint / ROWS), lambda: flipped(checkpoint / "model.safetensors")):
        harm()
        [line] = refusals("verify", checkpoint, "--accept")
        assert "cannot be accepted" in line and (checkpoint / "zero" / "manifest.json").read_text() == text
        harm()
    # A file that a resume would read, and that is in no manifest.
    (checkpoint / "optimizer.pt").write_bytes(b"")
    assert "cannot be accepted: optimizer.pt" in refusals("verify", checkpoint, "--accept")[0]
    (checkpoint / "optimizer.pt").unlink()
    # What is made of the weights is good, whatever the other files are.
    code, output = by_command("consolidate", checkpoint, checkpoint.with_name("out"))
    assert code == 0 and "was changed after it was written" in output
    document = json.loads(hf_zero("verify", checkpoint, "--accept", "--json").stdout)
    assert document["good"] and len(document["accepted"]) == 2 and document["faults"] == []
    manifest = Manifest.read(checkpoint / "zero")
    assert manifest.save == save and "scheduler.pt" not in manifest.files
    assert hf_zero("verify", checkpoint).exit_code == 0


def test_a_header_length_of_10_gb_is_refused_by_every_command(checkpoint, plain):
    with_giant_header(checkpoint / "model.safetensors")
    with_giant_header(plain / "model.safetensors")
    for folder in (checkpoint, plain):
        for arguments in (("verify", folder), ("inspect", folder), ("consolidate", folder, folder.with_name("out"))):
            lines = refusals(*arguments)
            assert lines and all("model.safetensors" in line for line in lines), arguments


COMMAND = Path(sys.executable).with_name("hf-zero")
GOOD = "good: checksums, rows and weights\n"


def test_the_installed_script_has_a_status_and_says_good_and_bad_on_streams_of_their_own(trained, checkpoint):
    done = run_forked(COMMAND, ["verify", trained], environment=os.environ, processes=1)
    assert (done.returncode, done.stdout) == (0, f"{trained}: {GOOD}")
    flipped(checkpoint / ROWS)
    done = run_forked(COMMAND, ["verify", checkpoint], environment=os.environ, processes=1)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"{checkpoint}: {ROWS} differs from the contents") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_command_itself(trained):
    done = subprocess.run([COMMAND, "verify", trained], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, f"{trained}: {GOOD}")


# ---- inspect ----


def test_inspect_tells_what_a_checkpoint_holds(trained):
    result = hf_zero("inspect", trained)
    assert result.exit_code == 0
    rows = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("│") for line in result.stdout.splitlines())
        if len(cells) == 4 and cells[1].strip()
    }
    tensors = load_file(trained / "model.safetensors")
    numel = sum(tensor.numel() for tensor in tensors.values())
    assert rows["weights"] == f"{len(tensors)} tensors, {numel:,} elements, F32"
    assert rows["saved by"] == "2 ranks at stage 3"
    assert rows["optimizers"] == "AdamW; state: exp_avg, exp_avg_sq"
    assert rows["trained parameters"] == str(len(tensors))
    assert rows["files"].startswith(f"{sum(p.is_file() for p in trained.rglob('*')) - 1}, ")


def test_inspect_tells_how_far_the_run_had_come_and_when_it_was_saved(trained):
    output = hf_zero("inspect", trained).stdout
    loss = json.loads((trained / "trainer_state.json").read_text())["log_history"][-1]["loss"]
    assert re.search(r"│ step +│ 2 ", output) and f"{loss:.6g} at step 2" in output
    assert re.search(r"│ saved +│ \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 ", output)


@pytest.mark.extra("hub")
def test_the_card_of_a_consolidated_checkpoint_tells_what_the_checkpoints_own_does(trained, tmp_path):
    assert hf_zero("consolidate", trained, tmp_path / "out").exit_code == 0
    assert card_facts(tmp_path / "out") == card_facts(trained)
    assert make_card(tmp_path / "out")
    assert "learning_rate" in (tmp_path / "out" / "README.md").read_text()


def test_a_command_that_was_taken_out_says_what_to_do():
    for words in (("card", "outputs/model"), ("card", "outputs/model", "--name", "mine", "--json")):
        [line] = refusals(*words)
        assert line == f"hf_zero: `hf-zero card` was removed from hf_zero. {CUT_NAMES['hf-zero card']}."


def test_the_command_says_its_version():
    result = hf_zero("--version")
    assert (result.exit_code, result.stdout) == (0, f"hf-zero {importlib.metadata.version('hf-zero')}\n")


def test_inspect_reads_plain_folders_and_refuses_others_in_one_line(sharded, tmp_path):
    result = hf_zero("inspect", sharded)
    count = sum(len(load_file(file)) for file in sharded.glob("*.safetensors"))
    assert result.exit_code == 0 and result.stdout.startswith(f"{sharded}\n")
    assert f" {count} tensors" in result.stdout and "saved by" not in result.stdout
    [line] = refusals("inspect", tmp_path)
    assert line.endswith("holds no model.safetensors and no model.safetensors.index.json.")
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-12").mkdir()
    [line] = refusals("inspect", tmp_path)
    assert line.endswith(f"; it holds checkpoints: pass the newest, {tmp_path / 'checkpoint-12'}.")


# ---- consolidate ----


def assert_equal_tensors(model: PreTrainedModel, expected: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name


def test_a_checkpoint_becomes_a_folder_with_equal_tensors_and_nothing_of_the_run(trained, tmp_path):
    result = hf_zero("consolidate", trained, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'out'}: model.safetensors\n"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "training_run.json"}
    expected = AutoModelForSequenceClassification.from_pretrained(trained).state_dict()
    assert_equal_tensors(AutoModelForSequenceClassification.from_pretrained(tmp_path / "out"), expected)
    assert hf_zero("verify", tmp_path / "out").exit_code == 0


@pytest.mark.short_cells("20KB-bfloat16", "1GB-None")
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shard_size", ["20KB", "1GB"])
def test_tied_weights_in_files_of_any_size_and_dtype_load_equal(dtype, shard_size, sharded, tmp_path):
    options = ["--max-shard-size", shard_size] + (["--dtype", dtype] if dtype else [])
    out = tmp_path / "out"
    result = hf_zero("consolidate", sharded, out, *options)
    assert result.exit_code == 0, result.stderr
    files = sorted(out.glob("*.safetensors"))
    assert result.stdout == f"{out}: {', '.join(file.name for file in files)}\n"
    expected = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    if dtype:
        expected = {name: value.to(getattr(torch, dtype)) for name, value in expected.items()}
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert_equal_tensors(model, expected)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert hf_zero("verify", out).exit_code == 0
    if shard_size == "1GB":
        assert [file.name for file in files] == ["model.safetensors"]
        return
    tensors = {file.name: load_file(file) for file in files}
    for held in tensors.values():
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 20_000
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, held in tensors.items() for name in held}
    assert index["metadata"]["total_size"] == sum(t.nbytes for held in tensors.values() for t in held.values())


def test_files_stay_below_the_limit_when_the_dtype_grows(sharded, tmp_path):
    assert hf_zero("consolidate", sharded, tmp_path / "half", "--dtype", "bfloat16").exit_code == 0
    options = ["--dtype", "float32", "--max-shard-size", "30KB"]
    assert hf_zero("consolidate", tmp_path / "half", tmp_path / "out", *options).exit_code == 0
    for file in (tmp_path / "out").glob("*.safetensors"):
        held = load_file(file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 30_000


def test_the_bytes_of_each_tensor_are_counted_once():
    """A mixture of experts has tens of thousands."""
    counted = []

    def dtype_of(tensor: SavedTensor) -> torch.dtype:
        counted.append(tensor)
        return torch.float32

    tensors = [SavedTensor.packed(f"t{i}", "file", (i % 7 + 1,), "F32") for i in range(300)]
    shards = list(weights._shards(tensors, dtype_of, 100))
    assert [tensor for shard in shards for tensor in shard] == tensors and len(counted) == 300
    sizes = [[tensor.nbytes for tensor in shard] for shard in shards]
    assert all(sum(shard) <= 100 < sum(shard) + after[0] for shard, after in pairwise(sizes))


def test_files_are_closed_where_masters_cannot_be_read(trained, tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(FileWeights, "__exit__", lambda self, *error: closed.append(self))
    monkeypatch.setattr(weights, "MasterWeights", Mock(side_effect=CheckpointError("a master is nameless")))
    with pytest.raises(CheckpointError, match="nameless"):
        weights.consolidate(trained, tmp_path / "out", masters=True)
    assert len(closed) == 1


def test_what_cannot_be_consolidated_is_refused_in_one_line(plain, tmp_path):
    [line] = refusals("consolidate", plain, plain)
    assert "is not an empty folder; pass a new or empty one" in line
    [line] = refusals("consolidate", plain, plain / "config.json")
    assert "is not an empty folder" in line
    [line] = refusals("consolidate", plain, plain / "config.json" / "out")
    assert "Not a directory" in line
    [line] = refusals("consolidate", plain, tmp_path / "out", "--max-shard-size", "many")
    assert "`--max-shard-size` is 'many'; allowed: a number of bytes above 0" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("dtype", "kept"), [("float16", "wo"), ("bfloat16", "shared")])
def test_consolidate_casts_what_the_configs_model_lets_it_cast(dtype, kept, tmp_path, monkeypatch):
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(T5ForConditionalGeneration, "_keep_in_fp32_modules_strict", ["shared"])
    assert hf_zero("consolidate", tmp_path / "model", tmp_path / "out", "--dtype", dtype).exit_code == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    wide = {name for name, values in written.items() if values.dtype == torch.float32}
    parts = ("shared",) if dtype == "bfloat16" else ("shared", ".wo.")
    assert wide == {name for name in written if any(part in name for part in parts)} and any(kept in n for n in wide)


MEASURE = """
import sys, threading
from pathlib import Path
import torch
from hf_zero.integrations.weights import consolidate

def anonymous_bytes():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024

def watch():
    global peak
    while not done.wait(0.0005):
        peak = max(peak, anonymous_bytes())

source, out, dtype = sys.argv[1:]
# What any run allocates once: the casting kernel, the writer.
consolidate(Path(source, "small"), Path(out, "small"), dtype=getattr(torch, dtype), max_shard_bytes=10**7, on_progress=print)
done, before = threading.Event(), anonymous_bytes()
peak = before
watcher = threading.Thread(target=watch)
watcher.start()
consolidate(Path(source, "large"), Path(out, "large"), dtype=getattr(torch, dtype), max_shard_bytes=10**7, on_progress=print)
done.set()
watcher.join()
print(f"growth {peak - before}")
"""


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_consolidate_holds_one_output_file_in_memory_at_a_time(dtype, tmp_path):
    for name, layers in (("small", 1), ("large", 19)):
        config = GPT2Config(vocab_size=64, n_positions=8, n_embd=256, n_layer=layers, n_head=4)
        GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
    assert 58e6 < (tmp_path / "large" / "model.safetensors").stat().st_size < 65e6
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    done = run_forked(script, [tmp_path, tmp_path / "out", dtype], environment=os.environ, processes=1)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out" / "large").glob("*.safetensors"))) >= 3
    growth = int(re.search(r"growth (\d+)", done.stdout).group(1))
    # The limit is an output file and 200 MB; this model would fit in that whole, so it is held to a file and 10 MB.
    assert growth <= 10e6 + 10e6


def document(*arguments: object) -> dict:
    """What a command prints with --json, and nothing else on stdout."""
    result = hf_zero(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_every_command_has_json_and_no_flag_shows_a_type():
    helps = {command_name(each): hf_zero(command_name(each), "--help").stdout for each in shown_commands()}
    assert not [name for name, said in helps.items() if "--json" not in said]
    assert not [name for name, said in helps.items() if "bool" in said.lower()]
    # Options that take a value show its type.
    assert "--num-processes" in helps["run"] and "<int>" in helps["run"]


def shown_commands() -> list:
    return [command for command in app.registered_commands if not command.hidden]


def test_the_help_lists_the_commands_in_the_order_of_use():
    said = hf_zero("--help").stdout
    names = [command_name(each) for each in shown_commands()]
    assert re.findall(r"^│ (\w+)  +\S", said, flags=re.MULTILINE) == names
    assert names[:5] == ["doctor", "plan", "run", "parity", "report"] and "bool" not in said


@pytest.mark.parametrize("option", ["--num-processes", "--num_processes"])
def test_an_option_has_both_spellings_of_accelerate(option, tmp_path):
    script = tmp_path / "train_it.py"
    script.touch()
    words = ("--zero", 2, "--cpu", option, 3, "--json", script, "--of_the_script", "its_value")
    command = json.loads(hf_zero("run", *words).stdout)["command"]
    assert command[command.index("--num_processes") + 1] == "3"
    # Words after the script's name stay as they are.
    assert command[-3:] == [str(script), "--of_the_script", "its_value"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--num-x", 2, "train.py"), "No such option: --num-x"),
        (("run", "--mixed-precision", "bf17", "train.py"), "'bf17' is not one of"),
        (("parity", "--steps_x", 2, "train.py"), "No such option: --steps-x"),
        (("plan", "--gpu", 2), "No such option: --gpu"),
        (("run",), "Missing argument"),
    ],
)
def test_a_wrong_word_shows_the_usage_of_the_command_that_was_called(words, said):
    result = hf_zero(*words)
    assert result.exit_code == 2 and said in result.stderr and "accelerate" not in result.output
    assert f"{words[0]} [OPTIONS]" in result.stderr.splitlines()[0]


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf_zero", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hf_zero", run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("hf-zero ")


def command_name(command) -> str:
    return command.name or command.callback.__name__


def test_a_checkpoint_is_verified_inspected_and_consolidated_in_json(checkpoint, tmp_path):
    assert document("verify", checkpoint) == {
        "folder": str(checkpoint),
        "good": True,
        "faults": [],
        "has_manifest": True,
    }
    facts = document("inspect", checkpoint)
    assert (facts["ranks"], facts["stage"], facts["step"]) == (2, 3, 2)
    assert facts["optimizers"] == ["AdamW"] and facts["state"] == ["exp_avg", "exp_avg_sq"]
    out = tmp_path / "out"
    assert document("consolidate", checkpoint, out) == {"folder": str(out), "files": ["model.safetensors"]}


def test_faults_are_listed_in_json(checkpoint):
    (checkpoint / ROWS).write_bytes((checkpoint / ROWS).read_bytes()[:-1])
    result = hf_zero("verify", checkpoint, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert not report["good"] and any("rank-00001" in fault for fault in report["faults"])


@pytest.mark.parametrize(
    "command",
    [
        *("inspect", "verify", "consolidate"),
        pytest.param("report", marks=pytest.mark.extra("report")),
        pytest.param("convert", marks=pytest.mark.extra("foreign")),
        pytest.param("push", marks=pytest.mark.extra("hub")),
    ],
)
def test_a_file_in_place_of_a_folder_is_told_from_a_folder_that_is_not_there(command, tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    file, more = tmp_path / "model.safetensors", {"convert": ["out"], "consolidate": ["out"], "push": ["a-model"]}
    file.write_bytes(b"")
    last = refusals(command, file, *more.get(command, []))[-1]
    assert f"{file} is a file; pass the folder that contains it" in last and "no folder" not in last
    last = refusals(command, tmp_path / "nowhere", *more.get(command, []))[-1]
    assert f"there is no folder {tmp_path / 'nowhere'}" in last and "token" not in last


# ---- The page for agents and scripts ----

PAGE = (ROOT / "docs" / "agents-and-scripts.md").read_text(encoding="utf-8")


def keys_on_page(name: str) -> tuple[set[str], set[str]]:
    """The keys that a row of the page's tables says are always there, and those that may be."""
    [cell] = re.findall(rf"^\| `{re.escape(name)}` \| ([^|]+) \|", PAGE, flags=re.MULTILINE)
    may_be = set(re.findall(r"\[`(\w+)`\]", cell))
    cell = cell.partition(";")[0]
    return set(re.findall(r"`(\w+)`", cell)) - may_be, may_be


def is_as_on_page(name: str, found: dict) -> None:
    always, may_be = keys_on_page(name)
    assert always <= set(found) <= always | may_be, name
    for inner, elements in found.items():
        if f"| `{name}.{inner}` |" in PAGE:
            assert elements and all(set(element) == keys_on_page(f"{name}.{inner}")[0] for element in elements)


def test_the_page_for_scripts_has_every_command():
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE))
    assert named == {command_name(command) for command in app.registered_commands if not command.hidden}


def test_documents_of_folders_have_the_keys_of_the_page(trained, plain, tmp_path):
    is_as_on_page("verify", document("verify", plain))
    is_as_on_page("consolidate", document("consolidate", trained, tmp_path / "out"))
    assert set(document("inspect", plain)) == keys_on_page("inspect")[0]
    facts = document("inspect", trained)
    is_as_on_page("inspect", facts)
    assert len(facts) > len(keys_on_page("inspect")[0])


@pytest.mark.extra("planner")
@pytest.mark.extra("report")
@pytest.mark.extra("diagnose")
@pytest.mark.extra("foreign")
@pytest.mark.extra("hub")
def test_documents_of_the_other_commands_have_the_keys_of_the_page(plain, tmp_path, monkeypatch):
    from hf_zero.diagnose.parity_report import ParityReport

    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    Path("ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}), encoding="utf-8")
    Path("run").mkdir()
    state = {"global_step": 1, "log_history": [{"loss": 1.0, "step": 1}]}
    (Path("run") / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    is_as_on_page("plan", document("plan", plain))
    is_as_on_page("migrate", document("migrate", "ds.json"))
    is_as_on_page("report", document("report", "run"))
    is_as_on_page("run", json.loads(hf_zero("run", "--zero", "2", "--json", "script.py").stdout))
    is_as_on_page("doctor", json.loads(hf_zero("doctor", "--quick", "--json").stdout))
    # A store that is kept, a push, a conversion and ranks each have tests of their own: here they are done at once.
    monkeypatch.setattr("signal.pause", lambda: None)
    is_as_on_page("rendezvous", document("rendezvous", "--port", "0", "--host", "localhost"))
    report = ParityReport(
        world_size=2, steps=1, reasons=[], tolerance=0.0, equal=True, passed=True, first=None, loss=0.0, norm=0.0,
        gradients={}, parameters={},
    )  # fmt: skip
    pushed = SimpleNamespace(commit_url="https://host.invalid/commit", oid="0")
    done = {"parity_of_script": report, "convert": "a DeepSpeed checkpoint", "push_model": pushed}

    def at_once(folder: str, name: str) -> Callable:
        return (lambda *_, **__: done[name]) if name in done else extra(folder, name)

    for name in ("parity", "convert", "push"):
        monkeypatch.setattr(f"hf_zero.cli.{name}.extra", at_once)
    is_as_on_page("parity", json.loads(hf_zero("parity", "--zero", "2", "--json", "script.py").stdout))
    is_as_on_page("convert", document("convert", "run", "out"))
    is_as_on_page("push", document("push", plain, "a-model"))


OUT_OF_RANGE = [
    (("run", "--zero", "2", "--cpu", "--num-processes", "0"), "--num-processes is 0; allowed: "),
    (("run", "--zero", "2", "--cpu", "--num-processes", "-1"), "--num-processes is -1; allowed: "),
    (("run", "--zero", "2", "--cpu", "--sp", "0"), "--sp is 0; allowed: a number that divides the 2 ranks"),
    (("run", "--zero", "2", "--cpu", "--sp", "3"), "--sp is 3; allowed: a number that divides the 2 ranks"),
    (("parity", "--zero", "2", "--cpu", "--sp", "0"), "--sp is 0; allowed"),
    (("parity", "--zero", "2", "--cpu", "--num-processes", "0"), "--num-processes is 0; allowed: "),
    *(
        ((command, "--port", port), "less than or equal to 65535")
        for command in ("run", "parity", "rendezvous")
        for port in ("65536", "70000")
    ),
]


@pytest.mark.extra("diagnose")
def test_a_number_out_of_range_is_neither_wrapped_nor_taken_for_none(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    for words, said in OUT_OF_RANGE:
        result = hf_zero(*words, *(() if words[0] == "rendezvous" else (script,)))
        shown = " ".join(result.stderr.replace("\u2502", " ").split())
        assert result.exit_code in (1, 2) and said in shown, (words, result.output)
