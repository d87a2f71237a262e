"""The job every engine is given: a GPT-2-like model, a fixed seed, random batches that differ by rank and by step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SEED = 1234
DEFAULT_LEARNING_RATE = 5e-4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model's shape and a batch's shape. Weights are fp32 and dropout is 0, so losses can be compared bit for bit."""

    n_embd: int
    n_layer: int
    n_head: int
    vocab_size: int
    n_positions: int
    batch_size: int = 4
    sequence_length: int = 128
    recomputes: bool = False  # activation checkpointing

    def make_model(self) -> GPT2LMHeadModel:
        """Build the model; two calls give the same weights."""
        torch.manual_seed(SEED)
        config = GPT2Config(
            n_embd=self.n_embd,
            n_layer=self.n_layer,
            n_head=self.n_head,
            vocab_size=self.vocab_size,
            n_positions=self.n_positions,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = GPT2LMHeadModel(config).train()
        # transformers finds no loss by this class's name and warns before it falls back to this one.
        model.loss_type = "ForCausalLM"
        if self.recomputes:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def make_batch(self, rank: int, step: int) -> torch.Tensor:
        """Token ids, int64 (batch_size, sequence_length), the same for every engine at one rank and step."""
        generator = torch.Generator().manual_seed(SEED + 1_000_003 * rank + step)
        return torch.randint(self.vocab_size, (self.batch_size, self.sequence_length), generator=generator)


WORKLOADS = {
    # Starts at once: for trying the harness itself.
    "tiny": Workload(n_embd=64, n_layer=2, n_head=4, vocab_size=512, n_positions=64, batch_size=2, sequence_length=32),
    # Between the two, for curves over the size.
    "4m": Workload(n_embd=192, n_layer=6, n_head=6, vocab_size=8192, n_positions=1024),
    "12m": Workload(n_embd=320, n_layer=8, n_head=5, vocab_size=8192, n_positions=1024),
    # 29,938,688 parameters: an all-reduce of its fp32 gradients sends 119.8 MB a step from each of two ranks.
    "30m": Workload(n_embd=512, n_layer=8, n_head=8, vocab_size=8192, n_positions=1024),
    # The same with next to nothing to compute, so that what a step takes is its traffic.
    "30m-short": Workload(
        n_embd=512, n_layer=8, n_head=8, vocab_size=8192, n_positions=1024, batch_size=1, sequence_length=16
    ),
    "60m": Workload(n_embd=640, n_layer=11, n_head=10, vocab_size=8192, n_positions=1024),
    # GPT-2 as published: 124,439,808 parameters.
    "124m": Workload(n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=1024),
    # GPT-2 medium as published: 354,823,168 parameters.
    "350m": Workload(n_embd=1024, n_layer=24, n_head=16, vocab_size=50257, n_positions=1024),
    # 1,210,851,840 parameters, in the batches of torchao's table of CPU offloading (a vision model of 1.1 B parameters and 257
    # positions, batch 32, activation checkpointing): https://github.com/pytorch/ao/tree/main/torchao/optim.
    "1.2b": Workload(
        n_embd=1536,
        n_layer=40,
        n_head=24,
        vocab_size=50257,
        n_positions=256,
        batch_size=32,
        sequence_length=256,
        recomputes=True,
    ),
}


def adamw_arguments(fused: bool) -> dict[str, object]:
    """AdamW's arguments; fused is what Trainer asks for."""
    return {"lr": DEFAULT_LEARNING_RATE, "fused": fused}
