"""hf_zero.init: pretrained weights go from their files into shards, without a copy of the model on any rank."""

import inspect
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import short_of
from ranks import RankFailedError
from shared_ranks import run_on_ranks
from training import fused_adamw, gpt2, gpt2_batch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    core_model_loading,
)

import hf_zero
from hf_zero.buckets.unread_weights import is_loaded
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(120)
STAGE_3 = {"stage": 3, "bucket_bytes": "20KiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("pretrained") / "gpt2"
    gpt2().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory) -> str:
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    path = tmp_path_factory.mktemp("pretrained") / "bert"
    BertForMaskedLM(BertConfig(vocab_size=211, max_position_embeddings=16, **sizes)).save_pretrained(path)
    return str(path)


def trained(rank: int, world_size: int, folder: str, dtype: torch.dtype, with_init: bool) -> dict:
    if with_init:
        with hf_zero.init(STAGE_3):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        assert all(is_loaded(p) for p in model.parameters())
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    optimizer = fused_adamw(model)
    engine = ZeroEngine(model.train(), [optimizer], STAGE_3)
    losses = []
    for step in range(4):
        loss = model(**gpt2_batch(torch.Generator().manual_seed(10 * step + rank), 2)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert ("broadcast of parameters" in {row.kind for row in engine.comm_report().rows}) is not with_init
    tensors = {name: value.float().numpy().copy() for name, value in model.state_dict().items()}
    return {"losses": losses, "tensors": tensors, "dtypes": {str(p.dtype) for p in model.parameters()}}


@pytest.mark.parametrize("dtype", short_of([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_trains_as_after_an_ordinary_load(folder, dtype):
    arguments = {"folder": folder, "dtype": dtype}
    ordinary = run_on_ranks(trained, **arguments, with_init=False)
    found = run_on_ranks(trained, **arguments, with_init=True)
    for here, there in zip(found, ordinary):
        assert here["losses"] == there["losses"]
        assert here["dtypes"] == there["dtypes"] == {str(dtype)}
        assert here["tensors"].keys() == there["tensors"].keys()
        assert all(np.array_equal(here["tensors"][name], value) for name, value in there["tensors"].items())


def with_a_new_head(rank: int, world_size: int, folder: str) -> dict:
    # Every rank makes its new head from other random numbers.
    torch.manual_seed(rank)
    with hf_zero.init(STAGE_3):
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    before = model.classifier.weight.detach().clone()
    ZeroEngine(model, [fused_adamw(model)], STAGE_3)
    whole = model.state_dict()
    reference = BertForMaskedLM.from_pretrained(folder).state_dict()
    shared = [name for name in whole if name in reference and name.startswith("bert.")]
    return {
        "before": before.numpy(),
        "head": whole["classifier.weight"].numpy().copy(),
        "equal": all(torch.equal(whole[name], reference[name]) for name in shared),
        "shared": len(shared),
    }


def test_a_new_head_is_rank_0s_and_the_rest_the_files(bert_folder):
    first, second = run_on_ranks(with_a_new_head, folder=bert_folder)
    assert not np.array_equal(first["before"], second["before"])
    assert np.array_equal(first["head"], first["before"])
    assert np.array_equal(second["head"], first["before"])
    assert first["equal"] and second["equal"] and first["shared"] > 20


def anonymous_mib() -> float:
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024


def growth(rank: int, world_size: int, folder: str, dtype: torch.dtype) -> dict:
    AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50))
    before = most = anonymous_mib()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with hf_zero.init(3):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    engine = ZeroEngine(model, [torch.optim.AdamW(model.parameters())], 3)
    done.set()
    watcher.join()
    held = sum(b.own.nbytes + (b.master.nbytes if b.precision.has_master else 0) for b in engine.buckets)
    unit = max(unit.passing_bytes for unit in engine.sharded.schedule.units)
    return {"grown": max(most, anonymous_mib()) - before, "held": held / 2**20, "unit": unit / 2**20}


@pytest.mark.parametrize("dtype", short_of([torch.float32, torch.bfloat16], [torch.float32]))
def test_memory_grows_by_the_shard_and_no_more_than_a_unit(tmp_path, dtype):
    sizes = {"vocab_size": 20_000, "n_embd": 512, "n_layer": 12, "n_head": 8, "n_positions": 128}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path)
    for seen in run_on_ranks(growth, folder=str(tmp_path), dtype=dtype):
        print(f"{dtype}: grown {seen['grown']:.1f} MiB, shard {seen['held']:.1f}, largest unit {seen['unit']:.1f}")
        assert seen["grown"] <= 1.05 * (seen["held"] + seen["unit"])


def test_a_model_from_a_config_has_the_weights_of_an_ordinary_seeded_run(folder):
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(11)
    ordinary = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(11)
    with hf_zero.init(3):
        model = AutoModelForCausalLM.from_config(config)
    for (name, here), there in zip(model.named_parameters(), ordinary.parameters(), strict=True):
        assert torch.equal(here, there), name


def other_files(rank: int, world_size: int, folders: list[str]) -> None:
    with hf_zero.init(3):
        model = AutoModelForCausalLM.from_pretrained(folders[rank])
    ZeroEngine(model, [fused_adamw(model)], 3)


def test_ranks_that_read_other_files_are_told_at_the_start(folder, tmp_path):
    other = gpt2()
    other.resize_token_embeddings(100, mean_resizing=False)
    other.save_pretrained(tmp_path)
    with pytest.raises(
        RankFailedError,
        match=r"the ranks do not train the same model with the same settings. files of the weights: model.saf",
    ):
        run_on_ranks(other_files, folders=[folder, str(tmp_path)])


def test_below_stage_3_nothing_is_changed(folder):
    stock = PreTrainedModel._load_pretrained_model
    with hf_zero.init(2):
        assert PreTrainedModel._load_pretrained_model is stock
    with pytest.raises(LookupError), hf_zero.init(3):
        assert PreTrainedModel._load_pretrained_model is not stock
        raise LookupError
    assert PreTrainedModel._load_pretrained_model is stock


def test_transformers_still_loads_the_way_init_stands_on():
    arguments = list(inspect.signature(PreTrainedModel._load_pretrained_model).parameters)
    assert arguments[:4] == ["model", "state_dict", "checkpoint_files", "load_config"], "the order of arguments moved"
    assert list(inspect.signature(core_model_loading._materialize_copy).parameters) == ["tensor", "device", "dtype"]
    assert "_materialize_copy(" in inspect.getsource(core_model_loading.spawn_materialize), "the cast moved elsewhere"
    assert hasattr(core_model_loading, "WeightConverter")
