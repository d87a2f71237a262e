"""Frozen parameters that are codes, at stage 3: bases of bitsandbytes in four and eight bits, and plain ones of any dtype."""

import logging
from collections.abc import Callable

import pytest
import torch
from cells import slow
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from resident import covered_spans, living_tensors, resident_in
from shared_ranks import on_ranks, on_shared_ranks, run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import LENGTH, VOCABULARY, bert_batch, gpt2_batch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import state_plan

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes, of the extra `dev`, is not installed")
pytestmark = [pytest.mark.timeout(150), pytest.mark.filterwarnings("ignore:Merge lora module|Unmerge lora module")]

FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NESTED = {**FOUR, "bnb_4bit_use_double_quant": True}
IN_BFLOAT16 = {**FOUR, "bnb_4bit_compute_dtype": "bfloat16"}
EIGHT = {"load_in_8bit": True}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
LIMITS = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}


def llama(size: dict) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**LIMITS, **size, num_key_value_heads=2))


def bert(size: dict) -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**LIMITS, **size, **dropout, num_labels=3))


MODELS = {
    "llama": (llama, SMALL, AutoModelForCausalLM, gpt2_batch),
    "bert": (bert, SMALL, AutoModelForSequenceClassification, bert_batch),
    "large": (llama, LARGE, AutoModelForCausalLM, gpt2_batch),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> str:
    """A folder of bases that are not quantised. transformers writes none on ranks beside the first."""
    folder = tmp_path_factory.mktemp("bases")
    for name, (make, size, _, _) in MODELS.items():
        torch.manual_seed(0)
        make(size).save_pretrained(folder / name)
    return str(folder)


def adapted(bases: str, name: str, says: dict, *, seed: int = 1) -> PeftModel:
    """A quantised base, on a device map of one device, and adapters, as a script has them before `prepare`."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    base = MODELS[name][2].from_pretrained(
        f"{bases}/{name}", quantization_config=BitsAndBytesConfig(**says), device_map={"": "cpu"}, dtype=torch.float32
    )
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    torch.manual_seed(seed)
    # Adapters that begin with zeros would hide the base's second half from the first losses.
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def steps(
    rank: int, entry: nn.Module, optimizer: torch.optim.Optimizer, make_batch: Callable, numbers: range = range(3)
) -> list[float]:
    losses = []
    for number in numbers:
        loss = entry(**make_batch(torch.Generator().manual_seed(10 * number + rank), 2)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(rank: int, bases: str, name: str, says: dict, settings: dict | None) -> tuple[nn.Module, list[float]]:
    """A model that has been trained under DDP (`settings` of None) or the engine, and its losses."""
    model = adapted(bases, name, says).train()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    if settings is None:
        return model, steps(rank, DistributedDataParallel(model), optimizer, MODELS[name][3])
    ZeroEngine(model, [optimizer], {"bucket_bytes": "20KiB", **settings})
    return model, steps(rank, model, optimizer, MODELS[name][3])


def assert_same_state(ours: nn.Module, theirs: dict[str, torch.Tensor]) -> None:
    state = ours.state_dict()
    assert state.keys() == theirs.keys()
    assert [name for name in state if not torch.equal(state[name], theirs[name])] == []


STAGES = [
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "offload": {"params": "cpu", "optimizer": "cpu"}},
    {"stage": 3, "reshard_after_forward": False},
]


def losses_are_ddps(
    rank: int, world_size: int, bases: str, cells: list[tuple[str, dict]], variants: list[dict]
) -> None:
    for name, says in cells:
        model, expected = run(rank, bases, name, says, None)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        for settings in variants:
            model, losses = run(rank, bases, name, says, settings)
            assert losses == expected, (name, says, settings)
            # Everything that DDP's model has, under the same names: the scales, too.
            assert_same_state(model, state)


CELLS = [(name, says) for name in ("llama", "bert") for says in (FOUR, NESTED, IN_BFLOAT16, EIGHT)]


@pytest.mark.parametrize(
    ("cells", "variants"),
    [([("llama", NESTED), ("bert", IN_BFLOAT16), ("llama", EIGHT)], STAGES[1:2]), slow(CELLS, STAGES)],
    ids=["some", "all"],
)
@on_shared_ranks
def test_losses_and_state_are_ddps_bit_for_bit(rank, world_size, cells, variants, bases):
    losses_are_ddps(rank, world_size, bases, cells, variants)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_losses_are_ddps_on_other_numbers_of_ranks(world_size, bases):
    arguments = {"bases": bases, "cells": CELLS, "variants": STAGES}
    run_on_ranks(losses_are_ddps, world_size=world_size, **arguments)


# ---- what a rank holds ----


def bytes_of_base(model: nn.Module) -> int:
    """Of frozen parameters and of what lies beside them, each memory once."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    states = [each for held in map(vars, frozen) for each in held.values() if hasattr(each, "absmax")]
    inner = [state.state2 for state in states if state.state2 is not None]
    found = [*frozen, *(each for holder in (*frozen, *states, *inner) for each in vars(holder).values())]
    return sum({each.data_ptr(): each.nbytes for each in found if torch.is_tensor(each)}.values())


@pytest.mark.parametrize(
    ("says", "most"), [(FOUR, 0.53), (NESTED, 0.55), (EIGHT, 0.55)], ids=["four", "nested", "eight"]
)
@on_ranks(2)
def test_a_rank_of_two_holds_half_of_the_base_as_planned(rank, world_size, says, most, bases):
    before = {id(tensor) for tensor in living_tensors()}
    model = adapted(bases, "large", says).train()
    whole = bytes_of_base(model)
    optimizer = torch.optim.SGD(trained(model), lr=1e-2)
    engine = ZeroEngine(model, [optimizer], {"stage": 3})
    steps(rank, model, optimizer, gpt2_batch, range(2))
    plan = state_plan(engine)
    # The pages of every tensor of the process, without the adapters'.
    found = [each for each in living_tensors() if id(each) not in before and each.numel() and each.is_contiguous()]
    held = resident_in(covered_spans(found)) - plan.parameters
    print(f"base bytes: {whole} whole, {held} held, {held / whole:.3f}; planned {plan.frozen}")
    assert held <= most * whole
    assert abs(plan.frozen - held) <= 0.03 * held
