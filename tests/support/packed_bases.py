"""Bases quantized by bitsandbytes, with adapters to train, and layers with frozen parameters of any dtype."""

import logging
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from trainer_job import as_launched, history, make_trainer
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

FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NESTED = {**FOUR, "bnb_4bit_use_double_quant": True}
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


def save_bases(folder: Path) -> str:
    """Saves the bases without quantization. transformers only writes them on the first rank."""
    for name, (make, size, _, _) in MODELS.items():
        torch.manual_seed(0)
        make(size).save_pretrained(folder / name)
    return str(folder)


def adapted(bases: str, name: str, says: dict, *, seed: int = 1) -> PeftModel:
    """Makes a quantized base on one device, with adapters, in a script's state before `prepare`."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    base = MODELS[name][2].from_pretrained(
        f"{bases}/{name}", quantization_config=BitsAndBytesConfig(**says), device_map={"": "cpu"}, dtype=torch.float32
    )
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    torch.manual_seed(seed)
    # Adapters initialized with zeros would hide the base's second half from the first losses.
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def in_its_place(_model: nn.Module, bases: str, name: str, says: dict) -> PeftModel:
    """Returns such a base for `adapt` of a Trainer job."""
    return adapted(bases, name, says)


def trained_and_merged(rank: int, world_size: int, output_dir: str, **arguments: Any) -> dict:
    """Runs a Trainer job; returns its result and the merged model, which is saved as well."""
    as_launched(rank, world_size)
    resume = arguments.pop("resume", None)
    trainer = make_trainer(output_dir=output_dir, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(f"{output_dir}/merged")
    return {**history(trainer), "merged": {name: value.float().tolist() for name, value in merged.state_dict().items()}}


PLAIN = [
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64, torch.bool),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float64),
]


class Coded(nn.Module):
    """A layer with a frozen parameter of `dtype`, whose odd size is no multiple of a shard's end."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        values = torch.randint(1, 3, (7, 16)).to(torch.float32)
        self.codes = nn.Parameter((values > 1.5 if dtype == torch.bool else values).to(dtype), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        factor = (self.codes.real if self.codes.is_complex() else self.codes).float().mean(0)
        return torch.tanh(self.inner(hidden) * factor)
