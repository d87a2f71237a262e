"""Frozen parameters that are codes, at stage 3: bases of bitsandbytes in four and eight bits, and plain ones of any dtype."""


import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from shared_ranks import on_shared_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from hf_zero.engine.engine import ZeroEngine

pytest.importorskip("bitsandbytes", reason="bitsandbytes, of the extra `dev`, is not installed")
pytestmark = pytest.mark.timeout(120)

VOCABULARY, LENGTH = 64, 8
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NESTED = {**FOUR, "bnb_4bit_use_double_quant": True}
EIGHT = {"load_in_8bit": True}


def llama() -> nn.Module:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **size))


def bert() -> nn.Module:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    return BertForSequenceClassification(BertConfig(num_labels=3, vocab_size=VOCABULARY, num_hidden_layers=2, **size))


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    for make in (llama, bert):
        make().save_pretrained(folder / make.__name__)
    return str(folder)


def quantised(make, bases: str, says: dict, *, prepares: bool = True) -> nn.Module:
    model = {llama: LlamaForCausalLM, bert: BertForSequenceClassification}[make].from_pretrained(
        f"{bases}/{make.__name__}",
        quantization_config=BitsAndBytesConfig(**says),
        device_map={"": "cpu"},
        dtype=torch.float32,
    )
    if prepares:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def batch(rank: int, number: int, make) -> dict:
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(10 * number + rank))
    return {"input_ids": ids, "labels": ids if make is llama else ids[:, 0] % 2}


def steps(model, entry, optimizer, rank, make, numbers=range(3)) -> list[float]:
    losses = []
    for number in numbers:
        loss = entry(**batch(rank, number, make)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(rank, make, bases, says, settings):
    model = quantised(make, bases, says).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if settings is None:
        return model, steps(model, DistributedDataParallel(model), optimizer, rank, make)
    engine = ZeroEngine(model, [optimizer], {"bucket_bytes": "20KiB", **settings})
    return engine, steps(model, model, optimizer, rank, make)


@pytest.mark.parametrize("says", [FOUR, NESTED, EIGHT], ids=["four", "nested", "eight"])
@pytest.mark.parametrize("make", [llama, bert])
@on_shared_ranks
def test_losses_are_ddps(rank, world_size, make, says, bases):
    _, expected = run(rank, make, bases, says, None)
    _, losses = run(rank, make, bases, says, {"stage": 2})
    assert losses == expected
    engine, losses = run(rank, make, bases, says, {"stage": 3})
    assert losses == expected
    print(engine.memory_report())
