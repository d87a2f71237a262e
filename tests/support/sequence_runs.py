"""Training runs of small models with sequences split over several ranks, and the same on one rank."""

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import save_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from trainer_job import as_launched
from training import checkpoint_activations
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_zero import ZeroPlugin
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.model_parallel import parallel_config
from hf_zero.sequence.parallel import enable_sequence_parallel

VOCABULARY = 97
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bos_token_id=0, eos_token_id=0
)
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
KINDS: dict[str, tuple[type, Any]] = {
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ),
    ),
    # Two heads of keys and values, which is fewer than four ranks.
    "llama": (LlamaForCausalLM, LlamaConfig(**_SIZES, num_key_value_heads=2, intermediate_size=56)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SIZES, num_key_value_heads=1, intermediate_size=56, head_dim=8)),
    "mistral": (
        MistralForCausalLM,
        MistralConfig(**_SIZES, num_key_value_heads=2, intermediate_size=56, sliding_window=5),
    ),
    "bert": (BertForMaskedLM, BertConfig(**_SIZES, **_NO_DROPOUT, intermediate_size=56, max_position_embeddings=64)),
    "modernbert": (
        ModernBertForMaskedLM,
        ModernBertConfig(
            **_SIZES, intermediate_size=56, global_attn_every_n_layers=2, local_attention=6, pad_token_id=0, cls_token_id=1,
            sep_token_id=2,
        ),
    ),
}  # fmt: skip
CAUSAL = ("gpt2", "llama", "qwen3", "mistral")


@dataclass(frozen=True, kw_only=True)
class SequenceJob:
    """A training run of a few steps.

    Attributes:
        size: number of ranks per sequence; with 1, each rank has whole sequences.
        tp: number of ranks each layer is split over.
        tokens: per sample.
        layout: `plain`, `padded` (on the right, samples of several lengths) or `packed` (several sequences in a sample).
        trained: the share of tokens with a label in the first half of a sample; in the second half all have one.
        kernel: of attention.
        checkpoints: activations are recomputed in backward; "reentrant" uses torch's older implementation.
    """

    kind: str = "llama"
    size: int = 1
    tp: int = 1
    settings: dict = field(default_factory=lambda: {"stage": 2})
    steps: int = 3
    rows: int = 2
    tokens: int = 24
    layout: str = "plain"
    trained: float = 1.0
    accumulation: int = 1
    kernel: str = "sdpa"
    checkpoints: bool | str = False
    dtype: torch.dtype = torch.float32
    learning_rate: float = 0.05
    max_norm: float | None = None


@dataclass
class SequenceOutcome:
    """Losses per micro-batch, whole gradients of the last step, and whole parameters at the end."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    rows: dict[str, tuple[int, int]]
    norms: list[float] = field(default_factory=list)


def model_of(job: SequenceJob) -> nn.Module:
    torch.manual_seed(0)
    make, config = KINDS[job.kind]
    model = make._from_config(copy.deepcopy(config), attn_implementation=job.kernel, dtype=job.dtype).train()
    if job.tp > 1:
        with tempfile.TemporaryDirectory() as folder:
            # Not `save_pretrained`, which only writes on rank 0.
            model.config.save_pretrained(folder)
            save_model(model, f"{folder}/model.safetensors", metadata={"format": "pt"})
            split = parallel_config(tp_size=job.tp)
            model = make.from_pretrained(folder, attn_implementation=job.kernel, distributed_config=split).train()
    # transformers only searches for several sequences in a sample if there is no cache.
    model.config.use_cache = False
    if job.checkpoints:
        checkpoint_activations(model, {"use_reentrant": job.checkpoints == "reentrant"})
    return model


def batches(job: SequenceJob, place: int, sequences: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yields the micro-batches of each step for one of `sequences` sets of ranks."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(job.steps):
        micros = []
        for _ in range(job.accumulation):
            each = [_batch(job, generator) for _ in range(sequences)]
            micros.append(each[place])
        yield micros


def _batch(job: SequenceJob, generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (job.rows, job.tokens), generator=generator)
    labels = ids.clone()
    early = torch.rand(ids.shape, generator=generator) >= job.trained
    early[:, job.tokens // 2 :] = False
    labels[early] = -100
    batch = {"input_ids": ids, "labels": labels}
    if job.layout == "padded":
        lengths = torch.randint(3, job.tokens, (job.rows, 1), generator=generator)
        mask = torch.arange(job.tokens).unsqueeze(0) < lengths
        batch |= {"attention_mask": mask.long(), "labels": labels.masked_fill(~mask, -100)}
    if job.layout == "packed":
        cut = int(torch.randint(2, job.tokens - 2, (1,), generator=generator))
        positions = torch.cat([torch.arange(cut), torch.arange(job.tokens - cut)])
        batch["position_ids"] = positions.expand(job.rows, -1)
        batch["labels"][:, cut] = -100
    return batch


def train_sequence(rank: int, world_size: int, job: SequenceJob) -> SequenceOutcome:
    """Runs the job on this rank."""
    model = model_of(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)
    engine = ZeroEngine(model, [optimizer], job.settings)
    if job.size > 1:
        enable_sequence_parallel(engine, job.size)
    losses, gradients, norms = [], {}, []
    together = job.size * job.tp
    for micros in batches(job, rank // together, world_size // together):
        for place, batch in enumerate(micros):
            with engine.no_sync() if place + 1 < len(micros) else torch.enable_grad():
                loss = model(**batch).loss
                losses.append(_mean(loss.item()))
                # Divide in place, as Trainer does.
                loss /= len(micros)
                loss.backward()
        gradients = {
            name: _numpy(engine.state.as_whole(p, cast(torch.Tensor, engine.full_grad(p))))
            for name, p in model.named_parameters()
        }
        if job.max_norm is not None:
            norms.append(engine.clip_grad_norm_(job.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    rows = {row.kind: (row.calls, row.bytes_sent) for row in engine.comm_report().rows}
    engine.close()
    parameters = {name: _numpy(_whole(p)) for name, p in model.named_parameters()}
    return SequenceOutcome(losses, gradients, parameters, rows, norms)


def train_each_sequence(rank: int, world_size: int, jobs: list[SequenceJob]) -> list[SequenceOutcome]:
    """Runs the jobs one after the other."""
    return [train_sequence(rank, world_size, job) for job in jobs]


def furthest(ours: SequenceOutcome, theirs: SequenceOutcome) -> dict[str, float]:
    """Returns the largest differences: of losses relative to their size, of gradients and parameters to the model's largest."""
    losses = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours.losses, theirs.losses, strict=True))
    found = {"losses": losses}
    for what in ("gradients", "parameters"):
        mine, others = getattr(ours, what), getattr(theirs, what)
        assert mine.keys() == others.keys()
        scale = max(float(np.abs(each).max()) for each in others.values())
        found[what] = max(float(np.abs(mine[name] - others[name]).max()) for name in others) / scale
    return found


def _whole(values: torch.Tensor) -> torch.Tensor:
    return values.full_tensor() if isinstance(values, DTensor) else values


def _numpy(values: torch.Tensor | None) -> np.ndarray:
    assert values is not None
    return values.detach().float().numpy().copy()


def _mean(loss: float) -> float:
    if not dist.is_initialized():
        return loss
    everyone: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, loss)
    return sum(everyone) / len(everyone)


# ---- The same through accelerate and Trainer ----


def rows_of(job: SequenceJob, count: int) -> list[dict[str, torch.Tensor]]:
    """Returns samples of a data set, the same on all ranks."""
    one, generator = replace(job, rows=1), torch.Generator().manual_seed(11)
    return [{name: values[0] for name, values in _batch(one, generator).items()} for _ in range(count)]


def loop_with_accelerate(rank: int, world_size: int, job: SequenceJob, backend: str = "no") -> dict[str, Any]:
    """Returns losses of a loop with accelerate and of an evaluation after it, whole logits, and generated tokens.

    Args:
        backend: of torch.compile, by accelerate's flag.
    """
    as_launched(rank, world_size)
    plugin = ZeroPlugin(job.settings, sp_size=job.size, tp_size=job.tp)
    more = {"gradient_accumulation_steps": job.accumulation, "dynamo_backend": backend}
    accelerator = Accelerator(parallelism_config=plugin, **more)
    model = model_of(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)
    count = job.steps * job.accumulation * job.rows * world_size // (job.size * job.tp)
    loader = DataLoader(rows_of(job, count), batch_size=job.rows)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(_mean(loss.item()))
    model.eval()
    with torch.no_grad():
        seen = model(**batch)
        made = model.generate(batch["input_ids"][:, :5], max_new_tokens=4, do_sample=False, pad_token_id=0)
    return {"losses": losses, "evaluated": seen.loss.item(), "logits": seen.logits.numpy(), "made": made.tolist()}


def train_with_trainer(rank: int, world_size: int, job: SequenceJob, folder: str, **overrides: Any) -> dict[str, Any]:
    """Returns Trainer's logs of the training and the results of an evaluation."""
    as_launched(rank, world_size)
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": job.rows,
        "per_device_eval_batch_size": job.rows,
        "gradient_accumulation_steps": job.accumulation,
        "max_steps": job.steps,
        "logging_steps": 1,
        "learning_rate": job.learning_rate,
        "optim": "sgd",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        **overrides,
    }
    arguments = TrainingArguments(
        **settings, parallelism_config=ZeroPlugin(job.settings, sp_size=job.size, tp_size=job.tp)
    )
    rows = rows_of(job, 24)
    trainer = Trainer(
        model=model_of(job), args=arguments, train_dataset=rows, eval_dataset=rows[:6], compute_metrics=_accuracy
    )
    trainer.train()
    said = trainer.evaluate()
    logs = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    tokens = trainer.state.num_input_tokens_seen
    return {"logs": logs, "loss": said["eval_loss"], "accuracy": said["eval_accuracy"], "tokens": tokens}


def _accuracy(seen: Any) -> dict[str, float]:
    logits, labels = seen.predictions[:, :-1], seen.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((logits.argmax(-1) == labels)[counted].mean())}
