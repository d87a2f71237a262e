"""Live gradient bytes of large models next to the plan's figure, and the collectives of a step, without allocating either.

    python scripts/bench/gradient_bytes.py                              # four models, 8 and 64 ranks, stages 0 to 3
    python scripts/bench/gradient_bytes.py --models llama-7b --ranks 8 --dtypes bfloat16
    python scripts/bench/gradient_bytes.py --models llama-7b --bucket-bytes 25MiB      # buckets of another size

The models are on torch's meta device, the process group is torch's fake one, and the engine is the real one: forward and
backward run, and gradients arrive in autograd's order. Every tensor made by the engine for gradients counts until the last
reference to its memory is gone: whole buffers, destinations of reductions, and additional memory of collectives.

Gradients that wait in `p.grad` for the rest of their bucket count as well, except the largest: autograd always holds one.

Exits with status 1 if a rank ever holds more than its plan says.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from itertools import product
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from harness import print_table, read_options, write_record
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero.comm.waits import Label
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import state_plan

DEVICE = torch.device("meta")
_MASK = torch.ones((), dtype=torch.bool, device=DEVICE)

_LLAMA_3 = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8, "use_cache": False}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_GPT2_XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "use_cache": False}
SHAPES: dict[str, tuple[type[transformers.PreTrainedModel], Callable[..., Any], dict[str, Any]]] = {
    "llama-7b": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {"use_cache": False}),
    "llama-3-8b": (transformers.LlamaForCausalLM, transformers.LlamaConfig, _LLAMA_3),
    "gpt2-xl": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        {"n_embd": 1600, "n_layer": 48, "n_head": 25, "use_cache": False},
    ),
    "bert-large": (transformers.BertForMaskedLM, transformers.BertConfig, {"vocab_size": 30522, **_LARGE}),
}


def make_model(shape: str, dtype: torch.dtype, layers: int | None = None) -> transformers.PreTrainedModel:
    """Makes a model of `SHAPES` on the meta device.

    Args:
        layers: replaces the published number of layers.
    """
    kind, make_config, sizes = SHAPES[shape]
    config = make_config(**sizes)
    if layers is not None:
        config.num_hidden_layers = layers
    with DEVICE:
        model = kind(config).to(dtype)
    # transformers finds no loss for some of these class names, and would warn before using this one.
    model.loss_type = "ForCausalLM"
    return model.train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Makes two groups, as Trainer does: with decay for matrices, without decay for all others."""
    parameters = list(model.parameters())
    matrices, others = ([p for p in parameters if (p.dim() > 1) is wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}])


def run_backward(model: transformers.PreTrainedModel) -> None:
    """Runs a forward and a backward over two tokens."""
    ids = torch.zeros((1, 2), dtype=torch.long, device=DEVICE)
    # With a mask, transformers does not search for several texts in one sample, which needs values.
    model(input_ids=ids, labels=ids, attention_mask=_MASK.expand(1, 1, 2, 2)).loss.backward()


@contextmanager
def world_without_memory(world_size: int, ranks_a_node: int) -> Iterator[None]:
    """Makes this process rank 0 of `world_size`. Collectives send nothing, and an engine trains parameters on the meta device.

    The meta device counts as an accelerator whose work is done as soon as it is queued.
    """
    if not hasattr(torch, DEVICE.type):
        torch._register_device_module(DEVICE.type, _device_module())
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    nothing, collectives = _Nothing(), "hf_zero.comm.collective"
    try:
        with ExitStack() as stack:
            for each in (
                patch("hf_zero.engine.assemble.check_parameters"),
                patch("hf_zero.engine.assemble.move_buffers"),
                patch("hf_zero.engine.assemble.broadcast_buffers"),
                # A view without memory is its own alias.
                patch("hf_zero.buckets.memory.alias", lambda view: view.detach()),
                patch(f"{collectives}.reduce_scatter_flat", nothing.start),
                patch(f"{collectives}.all_gather_flat", nothing.start),
                # Prepared gathers call the process group itself.
                patch(f"{collectives}._GROUPS_START", new=False),
                patch(f"{collectives}.dist.all_reduce", nothing.start),
                patch(f"{collectives}.dist.broadcast", nothing.start),
                patch.dict("os.environ", LOCAL_WORLD_SIZE=str(min(ranks_a_node, world_size))),
            ):
                stack.enter_context(each)
            yield
    finally:
        dist.destroy_process_group()


class _Nothing:
    """A finished collective, and its handle."""

    def start(self, *_args: object, **_settings: object) -> _Nothing:
        return self

    def wait(self, *_args: object) -> bool:
        return True


class _Moment:
    """An event or a stream of the device, always finished."""

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


RANKS_A_NODE = 8
STEPS = 3
"""From the third step on, the gradients of a bucket wait in `p.grad` until the last one arrives."""
_STORE_METHODS = ("put", "put_whole", "put_late", "hold", "start", "start_again", "finish_all", "end_pass")


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors made while this mode is on, as long as there are references to the memory.

    Attributes:
        now, most: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._living: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self._living:
                self._add(storage)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        self._living.add(address)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._remove, address, nbytes)

    def _remove(self, address: int, nbytes: int) -> None:
        self._living.discard(address)
        self.now -= nbytes

    def over(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a method to run with this mode on."""

        @wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self:
                made = method(*args, **kwargs)
            if method.__name__ == "put_whole":
                waiting = sorted(gradient.nbytes for gradient in args[1])
                self.most = max(self.most, self.now + sum(waiting[:-1]))
            return made

        return counted


def _tensors(values: object) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if type(value) in (torch.Tensor, torch.nn.Parameter)]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one model at one stage, on one rank.

    Attributes:
        live_bytes: peak of the gradients during some backwards; `lasting_bytes` of it remain until the step.
        planned_bytes, planned_lasting_bytes: the plan's figures for both.
        bucket_sizes: bytes of each bucket as sent, in the order of reduction.
        collectives: kind → sizes in bytes of the last step's collectives.
    """

    shape: str
    dtype: str
    ranks: int
    stage: int
    live_bytes: int
    lasting_bytes: int
    planned_bytes: int
    planned_lasting_bytes: int
    gradient_bytes: int
    bucket_sizes: list[int]
    collectives: dict[str, list[int]]


def measure(
    shape: str, dtype: str, ranks: int, stage: int, bucket_bytes: str | int = "auto", layers: int | None = None
) -> Measured:
    """Trains a model without memory for some steps, in this process, which is in no process group."""
    with world_without_memory(ranks, RANKS_A_NODE):
        model = make_model(shape, getattr(torch, dtype), layers)
        optimizer = adamw(model)
        settings = {"stage": stage, "bucket_bytes": bucket_bytes, "kernels": "always", "nonfinite": "ignore"}
        engine = ZeroEngine(model, [optimizer], settings)
        live, sizes = LiveBytes(), defaultdict(list)
        for name in _STORE_METHODS:
            setattr(engine._step.store, name, live.over(getattr(engine._step.store, name)))
        _note_sizes(engine, sizes)
        lasting_bytes = 0
        for _ in range(STEPS):
            sizes.clear()
            run_backward(model)
            lasting_bytes = max(lasting_bytes, live.now)
            optimizer.step()
            optimizer.zero_grad()
            engine.finish_parameters()
        plan = state_plan(engine)
        return Measured(
            shape=shape,
            dtype=dtype,
            ranks=ranks,
            stage=stage,
            live_bytes=live.most,
            lasting_bytes=lasting_bytes,
            planned_bytes=plan.gradients + plan.gradient_buffers,
            planned_lasting_bytes=plan.gradients,
            gradient_bytes=sum(p.numel() for p in model.parameters()) * getattr(torch, dtype).itemsize,
            bucket_sizes=[bucket.layout.numel * bucket.precision.reduce.itemsize for bucket in engine.buckets],
            collectives=dict(sizes),
        )


def _note_sizes(engine: ZeroEngine, sizes: dict[str, list[int]]) -> None:
    """Makes the transport note the bytes of the whole buffer of each bucket collective, by kind."""
    for name in ("start_reduce_scatter", "start_all_gather", "start_all_reduce"):
        start = getattr(engine.transport, name)

        def noted(flat: torch.Tensor, *args: Any, _start: Callable = start, **kwargs: Any) -> Any:
            label = next(value for value in args if isinstance(value, Label))
            sizes[label.kind].append(flat.nbytes)
            return _start(flat, *args, **kwargs)

        setattr(engine.transport, name, noted)


def over_plan(found: list[Measured]) -> list[Measured]:
    """Returns the measurements above their plan, during backward or between backward and step."""
    return [
        each
        for each in found
        if each.live_bytes > each.planned_bytes or each.lasting_bytes > each.planned_lasting_bytes
    ]


def _collectives(each: Measured) -> str:
    kinds = each.collectives.items()
    return "; ".join(f"{k}: {len(sizes)}, {min(sizes) / 1e6:.1f} to {max(sizes) / 1e6:.1f}" for k, sizes in kinds)


def main() -> int:
    options = read_options(
        __doc__,
        models=(list(SHAPES), None, SHAPES),
        ranks=[8, 64],
        stages=[0, 1, 2, 3],
        dtypes=(["bfloat16", "float32"], None, ["bfloat16", "float32"]),
        bucket_bytes=("auto", "the setting of this name"),
    )
    found = []
    for shape, ranks, dtype, stage in product(options.models, options.ranks, options.dtypes, options.stages):
        found.append(measure(shape, dtype, ranks, stage, options.bucket_bytes))
        # Collect now, since engines contain reference cycles.
        gc.collect()
        print(f"{shape}, {dtype}, {ranks} ranks, stage {stage}", file=sys.stderr, flush=True)
    columns = [
        *(("model", lambda each: f"{each.shape}, {each.dtype}"), ("ranks", "ranks"), ("stage", "stage")),
        *(("of the model", "gradient_bytes", ".0f", 1e6), ("live, at most", "live_bytes", ".0f", 1e6)),
        *(("planned", "planned_bytes", ".0f", 1e6), ("wait for the step", "lasting_bytes", ".0f", 1e6)),
        *(("planned", "planned_lasting_bytes", ".0f", 1e6), ("buckets", lambda each: len(each.bucket_sizes))),
        ("collectives a step: calls, smallest to largest MB", _collectives),
    ]
    print_table("Gradient bytes of a rank, in MB, and collectives of a step", columns, found, width=220)
    if options.json is not None:
        write_record(options.json, [asdict(each) for each in found])
    wrong = over_plan(found)
    for each in wrong:
        print(f"more than planned: {each.shape}, {each.dtype}, {each.ranks} ranks, stage {each.stage}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
