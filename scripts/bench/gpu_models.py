"""What is trained on GPUs: BERT and GPT-2 of their published sizes, and small ones to try the harness with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

SEED = 1234

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Model:
    """`make` builds it in host memory, the same each time; `batch` gives a rank's inputs of a step, in host memory."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]


def bert(rows: int, length: int, **shape: int) -> Model:
    """A classifier of sentences, without dropout."""
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape)

    def make() -> nn.Module:
        torch.manual_seed(SEED)
        return BertForSequenceClassification(config).train()

    def batch(rank: int, step: int) -> Batch:
        generator = _generator(rank, step)
        return {
            "input_ids": torch.randint(config.vocab_size, (rows, length), generator=generator),
            "labels": torch.randint(2, (rows,), generator=generator),
        }

    return Model(make=make, batch=batch)


def gpt2(rows: int, length: int, **shape: int) -> Model:
    """A language model, without dropout."""
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **shape)

    def make() -> nn.Module:
        torch.manual_seed(SEED)
        model = GPT2LMHeadModel(config).train()
        # transformers finds no loss by this class's name and warns before it falls back to this one.
        model.loss_type = "ForCausalLM"
        return model

    def batch(rank: int, step: int) -> Batch:
        ids = torch.randint(config.vocab_size, (rows, length), generator=_generator(rank, step))
        return {"input_ids": ids, "labels": ids}

    return Model(make=make, batch=batch)


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + 1_000_003 * rank + step)


_SMALL_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 128,
}
_SMALL_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 32}

MODELS = {
    "bert-base": bert(32, 128),
    "gpt2": gpt2(8, 512),
    "bert-tiny": bert(2, 16, **_SMALL_BERT),
    "gpt2-tiny": gpt2(2, 16, **_SMALL_GPT2, bos_token_id=0, eos_token_id=0),
}
