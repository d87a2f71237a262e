"""Training runs of small models split by transformers' tensor and expert parallelism, with and without the engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.model_parallel import parallel_config

VOCABULARY = 97
LENGTH = 8
_SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    bos_token_id=0,
    eos_token_id=0,
)
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SMALL, intermediate_size=56)),
    "tied": (LlamaForCausalLM, LlamaConfig(**_SMALL, intermediate_size=56, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**(_SMALL | {"num_key_value_heads": 2}), intermediate_size=56, head_dim=8)),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**_SMALL, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2),
    ),
}


@dataclass(frozen=True, kw_only=True)
class SplitJob:
    """One training run of a few steps.

    Attributes:
        folder: filled by `save_models`.
        settings: of the engine; None trains without it, with gradients averaged over the ranks with the same part.
        tp, ep: sizes; a tp of 1 is a whole model.
        dtype: of the model.
    """

    folder: str
    kind: str = "llama"
    settings: dict | None = None
    tp: int = 2
    ep: int = 1
    steps: int = 3
    accumulation: int = 1
    max_norm: float | None = None
    dtype: torch.dtype = torch.float32
    learning_rate: float = 1e-2


@dataclass
class SplitOutcome:
    """Losses and norms per step, the whole parameters at the end, and this rank's own parts."""

    losses: list[float]
    norms: list[float]
    whole: dict[str, np.ndarray]
    own: dict[str, np.ndarray]
    sent_bytes: int = 0
    state_bytes: int = 0


def save_models(folder: Path) -> None:
    """Writes one small model of each kind."""
    for kind, (make, config) in KINDS.items():
        torch.manual_seed(0)
        make(config).save_pretrained(folder / kind)


_MESHES: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], Any]]" = WeakKeyDictionary()


def load(job: SplitJob) -> nn.Module:
    make, _ = KINDS[job.kind]
    folder = f"{job.folder}/{job.kind}"
    if job.tp == 1 and job.ep == 1:
        return make.from_pretrained(folder, dtype=job.dtype).train()
    with _mesh_made_once(job.tp, job.ep):
        split = parallel_config(tp_size=job.tp, ep_size=job.ep)
        return make.from_pretrained(folder, dtype=job.dtype, distributed_config=split).train()


@contextmanager
def _mesh_made_once(tp: int, ep: int) -> Iterator[None]:
    """Reuses meshes: torch keeps the groups of each mesh made by transformers, with their threads, until the ranks end."""
    # Import here, because older releases of transformers lack this module.
    from transformers.distributed import mixin

    make, made = mixin.initialize_distributed_mesh, _MESHES.setdefault(dist.group.WORLD, {})

    def mesh_of(config: Any) -> Any:
        if (tp, ep) not in made:
            made[tp, ep] = make(config)
        return made[tp, ep]

    with patch.object(mixin, "initialize_distributed_mesh", mesh_of):
        yield


def batches(job: SplitJob, place: int, world_size: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yields the micro-batches of each step for one of `world_size` data ranks, in total the same for up to 4 ranks."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(job.steps):
        micros = []
        for _ in range(job.accumulation):
            ids = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
            mine = ids.chunk(world_size)[place]
            micros.append({"input_ids": mine, "labels": mine})
        yield micros


def train_split(rank: int, world_size: int, job: SplitJob) -> SplitOutcome:
    """Runs the job on this rank."""
    model = load(job)
    make_optimizer = partial(torch.optim.AdamW, lr=job.learning_rate, weight_decay=0.1)
    if job.settings is None:
        return _train_without(model, make_optimizer, rank, world_size, job)
    optimizer = make_optimizer(model.parameters())
    engine = ZeroEngine(model, [optimizer], job.settings)
    losses, norms = [], []
    for micros in batches(job, engine.groups.rank, engine.groups.world_size):
        total = 0.0
        for batch in micros:
            loss = model(**batch).loss / len(micros)
            loss.backward()
            total += loss.item()
        losses.append(_mean(total))
        if job.max_norm is not None:
            norms.append(engine.clip_grad_norm_(job.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    outcome = SplitOutcome(losses, norms, {}, {}, sent_bytes(engine), state_bytes(optimizer))
    engine.close()
    outcome.whole, outcome.own = whole_of(model), local_of(model)
    return outcome


def _train_without(
    model: nn.Module, make_optimizer: Callable[..., torch.optim.Optimizer], rank: int, world_size: int, job: SplitJob
) -> SplitOutcome:
    # AdamW updates each element independently. A step on this rank's parts equals the step on the DTensors, which would take a
    # third of the run, because torch computes the sharding of each operation on each of them.
    parts = [nn.Parameter(local(parameter).detach()) for parameter in model.parameters()]
    optimizer = make_optimizer(parts)
    data_size, place = world_size // job.tp, rank // job.tp
    [group, expert_group] = [_alike(rank, world_size, size) for size in (job.tp, max(job.tp, job.ep))]
    losses, norms = [], []
    for micros in batches(job, place, data_size):
        total = 0.0
        for batch in micros:
            loss = model(**batch).loss / len(micros)
            loss.backward()
            total += loss.item()
        losses.append(_mean(total))
        with torch.no_grad():
            for parameter, part in zip(model.parameters(), parts):
                if isinstance(parameter.grad, DTensor):
                    # An embedding's gradient is replicated.
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
                gradient = local(parameter.grad)
                dist.all_reduce(gradient, group=expert_group if is_expert(parameter) else group)
                part.grad = gradient.div_(data_size)
        if job.max_norm is not None:
            norms.append(_clip(model, job.max_norm))
        optimizer.step()
        model.zero_grad()
    return SplitOutcome(losses, norms, whole_of(model), local_of(model))


def _alike(rank: int, world_size: int, size: int) -> dist.ProcessGroup:
    """Makes the group of ranks with the same part as this one, if each `size` ranks together have a copy."""
    groups = [dist.new_group(list(range(start, world_size, size))) for start in range(size)]
    return groups[rank % size]


def is_expert(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("ep",)


def _clip(model: nn.Module, max_norm: float) -> float:
    gradients = [parameter.grad for parameter in model.parameters()]
    squares = [(g.full_tensor() if isinstance(g, DTensor) else g).double().square().sum() for g in gradients]
    norm = torch.stack(squares).sum().sqrt()
    for gradient in gradients:
        local(gradient).mul_(min(1.0, max_norm / (norm.item() + 1e-6)))
    return norm.item()


def _mean(loss: float) -> float:
    if not dist.is_initialized():
        return loss
    everyone = torch.tensor([loss], dtype=torch.float64)
    dist.all_reduce(everyone)
    return everyone.item() / dist.get_world_size()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(model: nn.Module) -> dict[str, np.ndarray]:
    """Returns every parameter, whole. Collective."""
    wholes = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: value.detach().float().numpy().copy() for name, value in wholes.items()}


def local_of(model: nn.Module) -> dict[str, np.ndarray]:
    """Returns this rank's part of every parameter."""
    return {name: local(p).detach().float().numpy().copy() for name, p in model.named_parameters()}


def moments_of(engine: ZeroEngine, model: nn.Module) -> dict[str, np.ndarray]:
    """Returns whole moments of every parameter. Collective."""
    mesh = engine._parts.mesh
    found = {}
    for name, parameter in model.named_parameters():
        box = mesh.split.box_of(parameter)
        for kind, value in engine.full_state(parameter).items():
            if torch.is_tensor(value) and value.dim():
                whole = torch.zeros(box.shape)
                everyone = (
                    [(box, value.numpy())] if box.is_whole else mesh.model_parallel.exchange((box, value.numpy()))
                )
                for part, values in everyone:
                    for there, here in part.slices():
                        whole[there] = torch.from_numpy(values)[here]
                found[f"{kind} of {name}"] = whole.numpy()
    return found


def sent_bytes(engine: ZeroEngine) -> int:
    """Returns the bytes of gradients and parameters sent by this rank."""
    by_verb = engine.comm_report().bytes_by_verb()
    return sum(by_verb.get(verb, 0) for verb in ("reduce-scatter", "all-gather", "all-reduce"))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of this rank's optimizer state with one value per element."""
    values = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim() > 0]
    return sum(value.nbytes for value in values)


def train_each(rank: int, world_size: int, job: SplitJob, variants: list[dict]) -> list[SplitOutcome]:
    """Runs the same job with each of some changes."""
    return [train_split(rank, world_size, replace(job, **changes)) for changes in variants]
