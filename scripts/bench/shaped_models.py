"""Models of published shapes without memory: parameters on torch's meta device, and an accelerator that holds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

DEVICE = torch.device("meta")
_MASK = torch.ones((), dtype=torch.bool, device=DEVICE)

SHAPES: dict[str, tuple[type[PreTrainedModel], Callable[[], PretrainedConfig]]] = {
    "llama-7b": (LlamaForCausalLM, lambda: LlamaConfig(use_cache=False)),
    "llama-3-8b": (
        LlamaForCausalLM,
        lambda: LlamaConfig(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8, use_cache=False),
    ),
    "gpt2-xl": (GPT2LMHeadModel, lambda: GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False)),
    "bert-large": (
        BertForMaskedLM,
        lambda: BertConfig(
            vocab_size=30522,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
        ),
    ),
}


def make_model(shape: str, dtype: torch.dtype, layers: int | None = None) -> PreTrainedModel:
    """A model of `SHAPES` on the meta device.

    Args:
        layers: in place of the published number.
    """
    kind, make_config = SHAPES[shape]
    config = make_config()
    if layers is not None:
        config.num_hidden_layers = layers
    with DEVICE:
        model = kind(config).to(dtype)
    # transformers finds no loss by some of these classes' names and warns before it falls back to this one.
    model.loss_type = "ForCausalLM"
    return model.train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """In two groups, as Trainer makes them: decay for matrices, none for the rest."""
    parameters = list(model.parameters())
    matrices, others = ([p for p in parameters if (p.dim() > 1) is wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}])


def run_backward(model: PreTrainedModel) -> None:
    """A forward and a backward over two tokens."""
    ids = torch.zeros((1, 2), dtype=torch.long, device=DEVICE)
    # With a mask, which has no values to look at either, nobody looks for several texts in one row.
    model(input_ids=ids, labels=ids, attention_mask=_MASK.expand(1, 1, 2, 2)).loss.backward()


@contextmanager
def world_without_memory(world_size: int, ranks_a_node: int) -> Iterator[None]:
    """This process is rank 0 of `world_size`, whose collectives send nothing; an engine trains what is on the meta device.

    The meta device passes for an accelerator whose work is done when it has been asked for.
    """
    if not hasattr(torch, DEVICE.type):
        torch._register_device_module(DEVICE.type, _device_module())
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    nothing = _Nothing()
    patches = [
        patch("hf_zero.engine.build.assemble.check_parameters"),
        patch("hf_zero.engine.build.assemble.start_buffers"),
        # A view without memory is its own alias.
        patch("hf_zero.buckets.memory.alias", lambda view: view.detach()),
        patch("hf_zero.comm.collectives.reduce_scatter_flat", nothing.start),
        patch("hf_zero.comm.collectives.all_gather_flat", nothing.start),
        patch("hf_zero.comm.collectives.dist.all_reduce", nothing.start),
        patch("hf_zero.comm.collectives.dist.broadcast", nothing.start),
        patch.dict("os.environ", LOCAL_WORLD_SIZE=str(min(ranks_a_node, world_size))),
    ]
    try:
        for each in patches:
            each.start()
        yield
    finally:
        for each in reversed(patches):
            each.stop()
        dist.destroy_process_group()


class _Nothing:
    """A collective that has ended, and its end."""

    def start(self, *_args: object, **_settings: object) -> _Nothing:
        return self

    def wait(self, *_args: object) -> bool:
        return True


class _Moment:
    """An event or a stream of the device, where everything is over."""

    def __init__(self, *_args: object, **_settings: object):
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: _Moment) -> float:
        return 0.0

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args: None


def _device_module() -> ModuleType:
    module = ModuleType(f"torch.{DEVICE.type}")
    module.Stream = module.Event = _Moment
    module.current_stream = lambda device=None: _Moment()
    module.memory_allocated = module.memory_reserved = module.max_memory_allocated = lambda device=None: 0
    module.mem_get_info = lambda device=None: (0, 0)
    return module
