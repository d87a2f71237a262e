"""The compared engines, each with the same calls, and the training jobs for all of them.

engine = ENGINES["ddp"](WORKLOADS["30m"].make_model, adamw_arguments(fused=True))
loss = engine.step(input_ids)
engine.finish()
engine.close()
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import MIB
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput

SEED = 1234
DEFAULT_LEARNING_RATE = 5e-4
MAX_NORM = 1.0

# ---- jobs: a model, a fixed seed, random batches that differ by rank and by step ----

Batch = dict[str, torch.Tensor]


class InChunksLMHeadModel(GPT2LMHeadModel):
    """A GPT-2 whose loss torch (2.13) computes in chunks from the weight of the head, without the whole logits."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> CausalLMOutput:
        hidden = self.transformer(input_ids=input_ids, **more).last_hidden_state[:, :-1].flatten(0, 1)
        options = torch.nn.LinearCrossEntropyOptions()
        loss = functional.linear_cross_entropy(hidden, self.lm_head.weight, labels[:, 1:].flatten(), options=options)
        return CausalLMOutput(loss=loss)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A GPT-2 and its batches. Weights are fp32 and dropout is 0, so losses can be compared bit for bit."""

    n_embd: int
    n_layer: int
    n_head: int
    vocab_size: int = 8192
    n_positions: int = 1024
    batch_size: int = 4
    sequence_length: int = 128
    recomputes: bool = False  # activation checkpointing
    loss_in_chunks: bool = False  # see `InChunksLMHeadModel`

    def make_model(self) -> torch.nn.Module:
        """Build the model; two calls return the same weights."""
        torch.manual_seed(SEED)
        sizes = {name: getattr(self, name) for name in ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions")}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        kind = InChunksLMHeadModel if self.loss_in_chunks else GPT2LMHeadModel
        model = kind(GPT2Config(**sizes, **off, bos_token_id=None, eos_token_id=None)).train()
        # transformers finds no loss for the name of this class, and would warn before using this one.
        model.loss_type = "ForCausalLM"
        if self.recomputes:
            from hf_zero.planner.meta_models import checkpoint

            checkpoint(model)
        return model

    def make_batch(self, rank: int, step: int) -> Batch:
        """Token ids, int64 (batch_size, sequence_length), and labels: the same for every engine at a rank and step."""
        generator = torch.Generator().manual_seed(SEED + 1_000_003 * rank + step)
        ids = torch.randint(self.vocab_size, (self.batch_size, self.sequence_length), generator=generator)
        return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True, kw_only=True)
class Classifier(Workload):
    """A BERT and sentences of two classes; by default, many small operations with almost no arithmetic."""

    n_layer: int = 12
    n_embd: int = 32
    n_head: int = 4
    vocab_size: int = 512
    n_positions: int = 64
    sequence_length: int = 16

    def make_model(self) -> torch.nn.Module:
        torch.manual_seed(SEED)
        config = BertConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.n_embd,
            num_hidden_layers=self.n_layer,
            num_attention_heads=self.n_head,
            intermediate_size=4 * self.n_embd,
            max_position_embeddings=self.n_positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForSequenceClassification(config).train()

    def make_batch(self, rank: int, step: int) -> Batch:
        batch = super().make_batch(rank, step)
        return batch | {"labels": batch["labels"][:, 0] % 2}


WORKLOADS = {
    # Starts at once, to try the harness.
    "tiny": Workload(n_embd=64, n_layer=2, n_head=4, vocab_size=512, n_positions=64, batch_size=2, sequence_length=32),
    "4m": Workload(n_embd=192, n_layer=6, n_head=6),
    "12m": Workload(n_embd=320, n_layer=8, n_head=5),
    # 29,938,688 parameters: an all-reduce of the fp32 gradients sends 119.8 MB per step from each of two ranks.
    "30m": Workload(n_embd=512, n_layer=8, n_head=8),
    # The same with almost nothing to compute, so the time of a step is its traffic.
    "30m-short": Workload(n_embd=512, n_layer=8, n_head=8, batch_size=1, sequence_length=16),
    # GPT-2's own vocabulary: 30,339,456 parameters, 19,298,688 of them in the head.
    "30m-words": Workload(n_embd=384, n_layer=6, n_head=6, vocab_size=50257),
    "30m-words-chunks": Workload(n_embd=384, n_layer=6, n_head=6, vocab_size=50257, loss_in_chunks=True),
    "60m": Workload(n_embd=640, n_layer=11, n_head=10),
    # GPT-2 and GPT-2 medium as published: 124,439,808 and 354,823,168 parameters.
    "124m": Workload(n_embd=768, n_layer=12, n_head=12, vocab_size=50257),
    "350m": Workload(n_embd=1024, n_layer=24, n_head=16, vocab_size=50257),
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
    """AdamW's arguments. Trainer uses `fused`."""
    return {"lr": DEFAULT_LEARNING_RATE, "fused": fused}


# ---- engines ----

MakeModel = Callable[[], torch.nn.Module]
OptimizerArguments = dict[str, object]


class Engine:
    """A model and its optimizer in a plain training loop. Whoever makes the engine has already sharded the model.

    FSDP2 uses this class unchanged: it reduces each micro-batch and keeps no whole gradients.

    Attributes:
        max_norm: the limit to which each step clips the gradient norm over all ranks; None for no clipping.
    """

    max_norm: float | None = None

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model = model
        self.optimizer = optimizer

    def step(self, *micro_batches: Batch) -> float:
        """Train on one batch, or accumulate over several, and return the mean loss on this rank."""
        mean = 0.0
        for number, batch in enumerate(micro_batches, start=1):
            with nullcontext() if number == len(micro_batches) else self.accumulating():
                loss = self.model(**batch).loss / len(micro_batches)
                self.backward(loss)
                mean += loss.item()
        if self.max_norm is not None:
            self.clip(self.max_norm)
        self.update()
        return mean

    def accumulating(self) -> AbstractContextManager[None]:
        """A context for micro-batches before the last one of a step."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        """Step and zero the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def finish(self) -> None:
        """Wait for the last step's unfinished work, which torch's own engines do not have."""

    def waited_ms(self) -> float | None:
        """Time spent waiting for the other ranks since the start; None if the engine does not count it."""
        return None

    def close(self) -> None:
        """Free the model and the optimizer. Call this before the process group is destroyed."""
        del self.model, self.optimizer


class DataParallel(Engine):
    """torch's DistributedDataParallel."""

    def accumulating(self) -> AbstractContextManager[None]:
        return self.model.no_sync()


class HfZero(Engine):
    """This package's engine. Its parameter all-gathers continue after a step, and it counts its own waits."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, settings: dict) -> None:
        # Import here, so that torch's own engines can be measured without this package.
        from hf_zero.engine.engine import ZeroEngine

        super().__init__(model, optimizer)
        self.zero = ZeroEngine(model, [optimizer], settings)

    def accumulating(self) -> AbstractContextManager[None]:
        return self.zero.no_sync()

    def clip(self, max_norm: float) -> None:
        self.zero.clip_grad_norm_(max_norm)

    def finish(self) -> None:
        self.zero.finish_parameters()

    def waited_ms(self) -> float:
        return 1e3 * sum(row.wait_seconds for row in self.zero.comm_report().rows)

    def close(self) -> None:
        self.zero.close()
        del self.zero
        super().close()


class DeepSpeed(Engine):
    """DeepSpeed's own loop: the engine runs backward and steps."""

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> None:
        self.model.step()

    def close(self) -> None:
        self.model.destroy()
        super().close()


class Accelerated(Engine):
    """The result of `Accelerator.prepare`, in accelerate's training loop, possibly with this package's engine."""

    def __init__(self, accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(*accelerator.prepare(model, optimizer))
        self.accelerator = accelerator

    def accumulating(self) -> AbstractContextManager[None]:
        return self.accelerator.no_sync(self.model)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def clip(self, max_norm: float) -> None:
        self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)

    def finish(self) -> None:
        for engine in getattr(self.accelerator, "zero_engines", ()):
            engine.finish_parameters()

    def close(self) -> None:
        self.accelerator.free_memory()
        super().close()
        del self.accelerator


def make_torch(make_model: MakeModel, optimizer_arguments: OptimizerArguments) -> Engine:
    """One rank in a plain loop."""
    model = make_model()
    return Engine(model, torch.optim.AdamW(model.parameters(), **optimizer_arguments))


def make_ddp(
    make_model: MakeModel, optimizer_arguments: OptimizerArguments, bucket_bytes: int | None = None, **more: Any
) -> Engine:
    """DDP, which replicates everything: the baseline of the other engines. `more`: DistributedDataParallel's options."""
    sizes = {} if bucket_bytes is None else {"bucket_cap_mb": bucket_bytes / MIB}
    model = DistributedDataParallel(make_model(), **sizes, **more)
    return DataParallel(model, torch.optim.AdamW(model.parameters(), **optimizer_arguments))


def make_zero_optimizer(make_model: MakeModel, optimizer_arguments: OptimizerArguments) -> Engine:
    """DDP with torch's ZeroRedundancyOptimizer: optimizer state sharded by whole parameters, then broadcast."""
    # Import here: the import takes half a second, and most users of this module make different engines.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, **optimizer_arguments)
    return DataParallel(model, optimizer)


def shard_fully(model: torch.nn.Module, reshard_after_forward: bool = True, **more: Any) -> torch.nn.Module:
    """FSDP2 as in its documentation: every block is a unit, all other parameters belong to the root. `more`: further options."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, **more)
    # torch's default keeps the root's parameters from forward to backward, which needs them first.
    return fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard_after_forward else False, **more)


def make_fsdp2(
    make_model: MakeModel, optimizer_arguments: OptimizerArguments, reshard_after_forward: bool = True, **more: Any
) -> Engine:
    model = shard_fully(make_model(), reshard_after_forward, **more)
    return Engine(model, torch.optim.AdamW(model.parameters(), **optimizer_arguments))


def make_torchao(make_model: MakeModel, optimizer_arguments: OptimizerArguments, *, name: str, shards: bool) -> Engine:
    """An optimizer of torchao with low-bit state, over DDP's or FSDP2's parameters."""
    from torchao import optim

    model = shard_fully(make_model()) if shards else DistributedDataParallel(make_model())
    arguments = {key: value for key, value in optimizer_arguments.items() if key != "fused"}
    kind = Engine if shards else DataParallel
    return kind(model, getattr(optim, name)(model.parameters(), **arguments))


def make_hf_zero(
    make_model: MakeModel, optimizer_arguments: OptimizerArguments, bucket_bytes: int | None = None, **settings: object
) -> Engine:
    """This package's engine with these settings; all other settings have their defaults."""
    model = make_model()
    sizes = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    return HfZero(model, torch.optim.AdamW(model.parameters(), **optimizer_arguments), settings | sizes)


def make_deepspeed(make_model: MakeModel, optimizer_arguments: OptimizerArguments, *, stage: int) -> Engine:
    """DeepSpeed's ZeRO at this stage; 0 is DeepSpeed's own data parallelism."""
    say_where_ranks_are(dist.get_rank(), dist.get_world_size())
    import deepspeed

    # DeepSpeed compiles this operation at its first use, and its messages would bypass the socket. Only this module has the
    # function; `torch` inside of the package is the real torch.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    zero: dict[str, object] = {"stage": stage}
    if stage:
        numel = 25_000_000 // 4
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
        zero |= {"reduce_bucket_size": numel, "allgather_bucket_size": numel}
    model = make_model()
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **optimizer_arguments),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            # DeepSpeed clips at 1.0 by default. The other engines do not clip.
            "gradient_clipping": 0.0,
        },
    )
    return DeepSpeed(engine, optimizer)


def make_accelerated(
    make_model: MakeModel, optimizer_arguments: OptimizerArguments, *, stage: int | None = None, fsdp2: bool = False
) -> Engine:
    """A model as prepared by accelerate: with DDP, with FSDP2 as on an accelerator, or with this package's engine at a stage."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    say_where_ranks_are(dist.get_rank(), dist.get_world_size())
    settings = {}
    if stage is not None:
        from hf_zero import ZeroPlugin

        settings = {"parallelism_config": ZeroPlugin(stage)}
    accelerator = Accelerator(cpu=True, **settings)
    if fsdp2:
        state = AcceleratorState()
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap"
        )
    model = make_model()
    return Accelerated(accelerator, model, torch.optim.AdamW(model.parameters(), **optimizer_arguments))


def say_where_ranks_are(rank: int, world_size: int) -> None:
    """Sets the variables of a launcher. The port is unused, since the process group exists already."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size))
    os.environ.update(ACCELERATE_USE_CPU="true")


def make_trainer(
    rank: int,
    world_size: int,
    *,
    model: str,
    stage: int | str | None,
    folder: str,
    callbacks: tuple = (),
    saves: bool = False,
) -> Any:
    """A Trainer with DDP (`stage` None) or the engine, as under `accelerate launch`: one step, and optionally one save."""
    from transformers import Trainer, TrainingArguments

    say_where_ranks_are(rank, world_size)
    workload = WORKLOADS[model]
    rows = workload.make_batch(0, 0)["input_ids"][:, :16].repeat(8, 1)
    data = [{"input_ids": row, "labels": row} for row in rows]
    off = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    saving = {"save_strategy": "steps" if saves else "no", "save_steps": 1}
    arguments = TrainingArguments(folder, per_device_train_batch_size=1, max_steps=1, **off, **saving)
    own = []
    if stage is not None:
        from hf_zero import ZeroCallback

        own = [ZeroCallback(stage)]
    return Trainer(workload.make_model(), arguments, train_dataset=data, callbacks=[*callbacks, *own])


# ---- the engines to compare ----


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How to make an engine, and its description in tables.

    Attributes:
        settings: the settings, and the source of this advice.
        is_exact: whether its losses have to equal DDP's. False if the engine sends or keeps fewer bits.
        package: a required package.
        imported: modules to import before the measurement, as a script would have done.
    """

    title: str
    make: Callable[..., Engine]
    settings: str
    is_exact: bool = True
    package: str = "torch"
    imported: tuple[str, ...] = ()

    def __call__(self, make_model: MakeModel, optimizer_arguments: OptimizerArguments, **sizes: Any) -> Engine:
        return self.make(make_model, optimizer_arguments, **sizes)

    @property
    def is_ours(self) -> bool:
        return self.title.startswith("hf_zero")

    @property
    def hindrance(self) -> str | None:
        """Returns why this engine cannot be measured here; None if nothing prevents it."""
        return None if importlib.util.find_spec(self.package) else f"{self.package} is not installed"

    def import_modules(self) -> None:
        for module in self.imported:
            importlib.import_module(module)


def _ours(title: str, settings: str, is_exact: bool = True, **given: object) -> Peer:
    make, imported = partial(make_hf_zero, **given), ("hf_zero.engine.engine",)
    return Peer(title=f"hf_zero {title}", make=make, settings=settings, is_exact=is_exact, imported=imported)


def _accelerated(title: str, settings: str, *imported: str, **given: object) -> Peer:
    more = {"package": "accelerate", "imported": ("accelerate", *imported)}
    return Peer(title=f"{title}, accelerate", make=partial(make_accelerated, **given), settings=settings, **more)


def _deepspeed(stage: int) -> Peer:
    settings = (
        "deepspeed.initialize with torch's AdamW (zero_allow_untested_optimizer), overlap_comm and contiguous_gradients as its "
        "documentation advises, buckets of 25 MB, no clipping; its collectives in shared memory are off, so that bytes are "
        "counted"
    )
    make, package = partial(make_deepspeed, stage=stage), "deepspeed"
    return Peer(title=f"DeepSpeed {stage}", make=make, settings=settings, package=package, imported=(package,))


def _torchao(title: str, name: str, shards: bool) -> Peer:
    make = partial(make_torchao, name=name, shards=shards)
    settings = f"torchao.optim.{name} in place of AdamW, which it compiles in the first step"
    more = {"is_exact": False, "package": "torchao", "imported": ("torchao.optim",)}
    return Peer(title=f"{title} + torchao {name}", make=make, settings=settings, **more)


BASELINE = "ddp"
_DEFAULTS, _INT8_SETTINGS = "the defaults", "comm.gradients: int8, comm.weights: int8"
_INT8, _OFFLOAD = {"comm": {"gradients": "int8", "weights": "int8"}}, {"offload": {"optimizer": "cpu"}}
_OUR_PLUGIN = "hf_zero.integrations.plugin"
_STAGES = {f"hf_zero{stage}": _ours(f"stage {stage}", _DEFAULTS, stage=stage) for stage in range(4)}

USUAL_ENGINES: dict[str, Peer] = {
    BASELINE: Peer(title="DDP", make=make_ddp, settings="defaults (buckets of 25 MiB); accumulates under no_sync"),
    "zero_optimizer": Peer(
        title="DDP + ZeroRedundancyOptimizer",
        make=make_zero_optimizer,
        settings="optimizer_class=AdamW over all parameters, as its tutorial shows",
    ),
    "fsdp2": Peer(
        title="FSDP2",
        make=make_fsdp2,
        settings="fully_shard on every block and on the root, as its tutorial shows; reshard_after_forward=True",
    ),
    **_STAGES,
}

ENGINES: dict[str, Peer] = USUAL_ENGINES | {
    "fsdp2_kept": Peer(
        title="FSDP2, kept gathered",
        make=partial(make_fsdp2, reshard_after_forward=False),
        settings="the same with reshard_after_forward=False",
    ),
    "ddp_accelerate": _accelerated("DDP", "Accelerator(cpu=True)"),
    "fsdp2_accelerate": _accelerated(
        "FSDP2",
        "FullyShardedDataParallelPlugin(fsdp_version=2), wrapped by the model's own blocks; accelerate takes that plugin on "
        "accelerators only, so on a CPU its state is told to be FSDP's",
        fsdp2=True,
    ),
    "hf_zero2_accelerate": _accelerated("hf_zero stage 2", "ZeroPlugin(2)", _OUR_PLUGIN, stage=2),
    "hf_zero3_accelerate": _accelerated("hf_zero stage 3", "ZeroPlugin(3)", _OUR_PLUGIN, stage=3),
    **{f"deepspeed{stage}": _deepspeed(stage) for stage in range(4)},
    "torchao_8bit": _torchao("DDP", "AdamW8bit", shards=False),
    "torchao_4bit": _torchao("DDP", "AdamW4bit", shards=False),
    "fsdp2_torchao_8bit": _torchao("FSDP2", "AdamW8bit", shards=True),
    "hf_zero2_8bit": _ours("stage 2, 8-bit moments", "moments: 8bit", is_exact=False, stage=2, moments="8bit"),
    "hf_zero2_offload": _ours("stage 2, CPU-offload", "offload.optimizer: cpu", stage=2, **_OFFLOAD),
    "hf_zero3_offload": _ours("stage 3, CPU-offload", "offload.optimizer: cpu", stage=3, **_OFFLOAD),
    "hf_zero2_int8": _ours("stage 2, int8 wire", _INT8_SETTINGS, is_exact=False, stage=2, **_INT8),
    "hf_zero3_int8": _ours("stage 3, int8 wire", _INT8_SETTINGS, is_exact=False, stage=3, **_INT8),
    "hf_zero3_kept": _ours(
        "stage 3, kept gathered", "reshard_after_forward: false", stage=3, reshard_after_forward=False
    ),
    "hf_zero3_no_prefetch": _ours("stage 3, no prefetch", "prefetch_units: 0", stage=3, prefetch_units=0),
}
"""All known names. Variants of an engine are measured only if they are named."""

ALL_PEERS = [name for name in ENGINES if name != "hf_zero3_no_prefetch"]
"""The engines compared by `all.sh`."""


def chosen_engines(names: list[str]) -> list[str]:
    """Resolves names of engines; the baseline is always first. `all` selects every peer.

    Raises:
        SystemExit: a name is unknown.
    """
    if names == ["all"]:
        names = ALL_PEERS
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        print(f"unknown engines {', '.join(unknown)}; there are {', '.join(ENGINES)}", file=sys.stderr)
        raise SystemExit(2)
    return list(dict.fromkeys([BASELINE, *names]))
