"""Small models and one training loop for all engines: the tests compare what it returns."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from hf_zero.config import ZeroConfig
from hf_zero.engine.engine import ZeroEngine

VOCABULARY = 211
LENGTH = 16


def bert(dropout: float = 0.0) -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=100,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=3,
        )
    )


def gpt2(dropout: float = 0.0) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=40,
            n_layer=3,
            n_head=4,
            n_positions=LENGTH,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert_batch(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(0, 3, (size,), generator=generator)}


def gpt2_batch(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run of a few steps, the same for every engine.

    `settings` of None trains with DistributedDataParallel.
    """

    make_model: Callable[[], nn.Module] = gpt2
    make_batch: Callable[[torch.Generator, int], dict[str, torch.Tensor]] = gpt2_batch
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = None
    settings: dict | None = None
    steps: int = 20
    accumulation: int = 1
    max_norm: float | None = None
    batch_size: int = 2
    autocast: bool = False
    find_unused: bool = False
    prepare: Callable[[nn.Module], None] = None
    model_arguments: dict = field(default_factory=dict)


@dataclass
class Outcome:
    """What a rank saw: losses and norms a step, parameters at the end."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, np.ndarray]


def adamw_in_two_groups(model: nn.Module, **kwargs) -> torch.optim.Optimizer:
    """Decay for matrices, none for the rest, as Trainer groups them."""
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() <= 1 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, **kwargs)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return adamw_in_two_groups(model, fused=True)


def train(rank: int, world_size: int, job: Job) -> Outcome:
    """Runs the job on this rank; every rank sees its own batches."""
    torch.manual_seed(0)
    model = job.make_model(**job.model_arguments)
    if job.prepare is not None:
        job.prepare(model)
    model.train()
    optimizer = (job.make_optimizer or fused_adamw)(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    if job.settings is None:
        engine = None
        entry = DistributedDataParallel(model, find_unused_parameters=job.find_unused)
        no_sync = entry.no_sync
    else:
        engine = ZeroEngine(model, [optimizer], ZeroConfig.from_dict(job.settings))
        entry, no_sync = model, engine.no_sync
    generator = torch.Generator().manual_seed(100 + rank)
    torch.manual_seed(1000 + rank)
    losses, norms = [], []
    for _ in range(job.steps):
        total = 0.0
        for micro in range(job.accumulation):
            batch = job.make_batch(generator, job.batch_size)
            autocast = torch.autocast("cpu", dtype=torch.bfloat16) if job.autocast else nullcontext()
            with nullcontext() if micro == job.accumulation - 1 else no_sync():
                with autocast:
                    loss = entry(**batch).loss / job.accumulation
                loss.backward()
            total += loss.item()
        losses.append(total)
        if job.max_norm is not None:
            clip = _clip_stock if engine is None else engine.clip_grad_norm_
            norms.append((clip(job.max_norm) if engine else clip(model, job.max_norm)).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    parameters = {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()}
    return Outcome(losses, norms, parameters)


def _clip_stock(model: nn.Module, max_norm: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def compare_with_ddp(rank: int, world_size: int, job: Job, variants: list[dict]) -> list[tuple[Outcome, Outcome]]:
    """The same job under DDP and under each of the engine's settings, in one process group."""
    from dataclasses import replace

    reference = train(rank, world_size, replace(job, settings=None))
    pairs = [(reference, train(rank, world_size, replace(job, settings=settings))) for settings in variants]
    dist.barrier()
    return pairs
