"""Small models and one training loop for all engines; tests compare its results."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from loops import engine_or_ddp, take_step
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_zero.buckets.sizes import SMALLEST_UNIT_BYTES
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.state_io import ZERO_FOLDER, seal_state, write_state

USUAL_UNIT_BYTES = dict(SMALLEST_UNIT_BYTES)
"""The package's own values, for tests of a user's run with exact numbers."""

# Make each layer a unit: each whole model here would otherwise be one unit. Tests of `unit_bytes` set it themselves.
SMALLEST_UNIT_BYTES.update(cpu=0, accelerator=0)

VOCABULARY = 211
LENGTH = 16


def checkpoint_activations(model: nn.Module, kwargs: dict[str, object]) -> None:
    """Turns activation checkpointing on, by the name for which the installed transformers does not warn (new since 5.23)."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(kwargs)


def bert(dropout: float = 0.0) -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=52,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=3,
        )
    )


def gpt2(dropout: float = 0.0, layers: int = 3) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=24,
            n_layer=layers,
            n_head=4,
            n_positions=LENGTH,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama(dropout: float = 0.0) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            intermediate_size=56,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            attention_dropout=dropout,
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


@dataclass
class Answer:
    loss: torch.Tensor


class Unruly(nn.Module):
    """Contains everything beyond a plain chain: a branch unused on odd ranks or on all ranks, a layer used twice, a tied weight,
    a frozen one, batch-norm buffers, and a scalar parameter."""

    def __init__(self, sleeping: str = "none"):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.norm = nn.BatchNorm1d(24)
        self.shared = nn.Linear(24, 24)
        self.branch = nn.Linear(24, 24)
        self.never = nn.Linear(24, 8)
        self.frozen = nn.Linear(24, 24)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.sleeping = sleeping
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        self.calls += 1
        hidden = self.embed(input_ids).mean(1)
        hidden = self.norm(hidden) * self.scale
        hidden = self.frozen(self.shared(torch.tanh(self.shared(hidden))))
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        asleep = {"none": False, "odd ranks": rank % 2 == 1, "even steps": self.calls % 2 == 0}[self.sleeping]
        if not asleep:
            hidden = hidden + self.branch(hidden)
        return Answer(nn.functional.cross_entropy(self.head(hidden), labels[:, 0]))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run of a few steps, the same for every engine. `settings` None trains with DDP."""

    make_model: Callable[..., nn.Module] = gpt2
    make_batch: Callable[[torch.Generator, int], dict[str, torch.Tensor]] = gpt2_batch
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer | list[torch.optim.Optimizer]] | None = None
    settings: dict | None = None
    steps: int = 3
    accumulation: int = 1
    max_norm: float | None = None
    batch_size: int = 2
    autocast: bool = False
    find_unused: bool = False
    prepare: Callable[[nn.Module], None] | None = None
    model_arguments: dict = field(default_factory=dict)
    uneven_last_batch: bool = False


@dataclass
class Outcome:
    """A rank's results: losses and norms per step, and the state dict at the end."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, np.ndarray]
    parameter_names: list[str]

    def equals(self, other: "Outcome") -> bool:
        """Whether losses, parameters and buffers are equal bit for bit."""
        return (
            self.losses == other.losses
            and self.tensors.keys() == other.tensors.keys()
            and all(np.array_equal(self.tensors[name], other.tensors[name]) for name in self.tensors)
        )

    def loss_error(self, other: "Outcome") -> float:
        """Returns the largest relative difference of a loss."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True))

    def norm_error(self, other: "Outcome") -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(self.norms, other.norms, strict=True))


def adamw_in_two_groups(model: nn.Module, **kwargs) -> torch.optim.Optimizer:
    """Makes two groups, as Trainer does: with decay for matrices, without decay for all others."""
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() <= 1 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, **kwargs)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return adamw_in_two_groups(model, fused=True)


def of_trained(make: Callable[..., torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    return make([p for p in model.parameters() if p.requires_grad])


ELEMENTWISE = {
    "sgd": partial(of_trained, partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)),
    "rmsprop": partial(of_trained, partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True)),
    "adagrad": partial(of_trained, partial(torch.optim.Adagrad, lr=1e-2)),
    "nadam": partial(of_trained, partial(torch.optim.NAdam, lr=1e-3)),
    "radam": partial(of_trained, partial(torch.optim.RAdam, lr=1e-3)),
    "adam amsgrad": partial(of_trained, partial(torch.optim.Adam, lr=1e-3, amsgrad=True, foreach=True)),
    "adamw foreach": partial(of_trained, partial(torch.optim.AdamW, lr=1e-3, foreach=True)),
    "adadelta": partial(of_trained, partial(torch.optim.Adadelta, lr=0.5)),
}
"""Optimizers whose step treats each element independently."""


def train(rank: int, world_size: int, job: Job) -> Outcome:
    """Runs the job on this rank; every rank sees its own batches."""
    torch.manual_seed(0)
    model = job.make_model(**job.model_arguments)
    if job.prepare is not None:
        job.prepare(model)
    model.train()
    made = (job.make_optimizer or fused_adamw)(model)
    optimizers = made if isinstance(made, list) else [made]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)) for o in optimizers]
    entry, engine = engine_or_ddp(model, optimizers, job.settings, find_unused=job.find_unused)
    no_sync = (engine or entry).no_sync
    generator = torch.Generator().manual_seed(100 + rank)
    torch.manual_seed(1000 + rank)
    losses, norms = [], []
    for step in range(job.steps):
        total = 0.0
        for micro in range(job.accumulation):
            short = job.uneven_last_batch and step == job.steps - 1 and rank > 0
            batch = job.make_batch(generator, 1 if short else job.batch_size)
            autocast = torch.autocast("cpu", dtype=torch.bfloat16) if job.autocast else nullcontext()
            with nullcontext() if micro == job.accumulation - 1 else no_sync():
                with autocast:
                    loss = entry(**batch).loss / job.accumulation
                loss.backward()
            total += loss.item()
        losses.append(total)
        if job.max_norm is not None:
            norm = engine.clip_grad_norm_(job.max_norm) if engine else clip_stock(model, job.max_norm)
            norms.append(norm.item())
        for optimizer, scheduler in zip(optimizers, schedulers):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if engine is None:
        # DDP sends rank 0's buffers before the first forward of an evaluation, the engine after each step.
        entry.eval()
        with torch.no_grad():
            entry(**batch)
    tensors = {name: value.detach().float().numpy().copy() for name, value in model.state_dict().items()}
    return Outcome(losses, norms, tensors, [name for name, _ in model.named_parameters()])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: Iterable[int]) -> list[float]:
    """Returns losses of GPT-2 steps on the same batches on every rank."""
    batches = (gpt2_batch(torch.Generator().manual_seed(seed), 2) for seed in seeds)
    return [take_step(model(**batch).loss, optimizer) for batch in batches]


def clip_stock(model: nn.Module, max_norm: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def compare_with_ddp(rank: int, world_size: int, job: Job, variants: list[dict]) -> list[tuple[Outcome, Outcome]]:
    """Runs the same job under DDP and with each of the engine's settings, in one process group."""
    reference = train(rank, world_size, replace(job, settings=None))
    return [(reference, train(rank, world_size, replace(job, settings=settings))) for settings in variants]


def of_one_seed(_generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    """Makes the same batch on every rank, so the mean over ranks equals one rank's value."""
    return gpt2_batch(torch.Generator().manual_seed(5), size)


def save_engine(engine: ZeroEngine, root: str | Path) -> None:
    """Writes an engine's state as a separate checkpoint."""
    seal_state(engine, Path(root), write_state(engine, Path(root) / ZERO_FOLDER))


def built_in_bf16(
    stage: int, *, device: str = "cpu", make_optimizer=fused_adamw, **settings
) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    """Makes GPT-2 in bfloat16, whose masters are stepped by kernels."""
    torch.manual_seed(0)
    model = gpt2().to(torch.bfloat16).to(device)
    optimizer = make_optimizer(model)
    wanted = {"stage": stage, "bucket_bytes": "20KiB", "kernels": "always", **settings}
    return model, optimizer, ZeroEngine(model, [optimizer], wanted)


def backward_on_device(model: nn.Module, seed: int) -> torch.Tensor:
    batch = gpt2_batch(torch.Generator().manual_seed(seed), 2)
    device = next(model.parameters()).device
    loss = model(**{name: values.to(device) for name, values in batch.items()}).loss
    loss.backward()
    return loss.detach()


class Small(nn.Module):
    """A model of parameters with and without padding after them, for steps by kernels."""

    def __init__(self, sizes: tuple[int, ...] = (32, 5, 48)):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.linspace(-1, 1, size)) for size in sizes)

    def forward(self) -> torch.Tensor:
        return sum((part.square() * (index + 1)).sum() for index, part in enumerate(self.parts))


def small_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def small(
    sizes: tuple[int, ...] = (32, 5, 48), *, make_optimizer=small_adamw, **more
) -> tuple[Small, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = Small(sizes)
    optimizer = make_optimizer(model)
    return model, optimizer, ZeroEngine(model, [optimizer], {"stage": 2, "kernels": "always", **more})
