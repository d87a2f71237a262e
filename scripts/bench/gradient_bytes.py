"""Live gradient bytes of large models beside the plan's figure, and the collectives of a step, without the memory for either.

    python scripts/bench/gradient_bytes.py                              # four models, 8 and 64 ranks, stages 0 to 3
    python scripts/bench/gradient_bytes.py --models llama-7b --ranks 8 --dtypes bfloat16
    python scripts/bench/gradient_bytes.py --models llama-7b --bucket-bytes 25MiB      # buckets of another size

The models are on torch's meta device, the process group is torch's fake one, and the engine is the real one: forward and
backward run, gradients arrive in autograd's order, and every tensor that the engine makes for them counts from its birth until
the last reference to its memory goes: whole buffers, destinations of reductions, and what a collective takes beside them.

Exits with status 1 if a rank ever holds more than its plan says and the 4 MiB that filling a bucket of small gradients takes
for a moment, which no plan counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from shaped_models import SHAPES, adamw, make_model, run_backward, world_without_memory
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero.comm.transport import Label
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.accelerator.announce import state_plan

RANKS_A_NODE = 8
FILLING_BYTES = 4 * 2**20
"""Beside a bucket of small gradients of at most that size, while it is filled (`FlatViews.fill`)."""
_STORE_METHODS = ("put", "put_late", "hold", "start", "start_again", "finish_all", "end_pass")


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that are made while this mode is on, as long as anything refers to it.

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
        """The same method, with this mode on."""

        @wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self:
                return method(*args, **kwargs)

        return counted


def _tensors(values: object) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if type(value) in (torch.Tensor, torch.nn.Parameter)]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One model at one stage, on one rank.

    Attributes:
        live_bytes: the most that gradients took during two backwards; `lasting_bytes` of it wait for the step.
        planned_bytes, planned_lasting_bytes: what the plan says of both.
        bucket_sizes: bytes of each bucket as it travels, in the order of reduction.
        collectives: kind → sizes in bytes of those of the second step.
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
    """Trains a model of no memory for two steps, in this process, which is in no process group."""
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
        for _ in range(2):
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
    """Has the transport note the bytes of the whole buffer of each collective of buckets, by kind."""
    for name in ("start_reduce_scatter", "start_all_gather", "start_all_reduce"):
        start = getattr(engine.transport, name)

        def noted(flat: torch.Tensor, *args: Any, _start: Callable = start, **kwargs: Any) -> Any:
            label = next(value for value in args if isinstance(value, Label))
            sizes[label.kind].append(flat.nbytes)
            return _start(flat, *args, **kwargs)

        setattr(engine.transport, name, noted)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--bucket-bytes", default="auto", help="the setting of this name")
    parser.add_argument("--json", type=Path, help="where the figures go, too")
    return parser.parse_args(arguments)


def measure_all(options: argparse.Namespace) -> list[Measured]:
    found = []
    for shape, ranks, dtype, stage in product(options.models, options.ranks, options.dtypes, options.stages):
        found.append(measure(shape, dtype, ranks, stage, options.bucket_bytes))
        # Engines hold themselves in circles.
        gc.collect()
        print(f"{shape}, {dtype}, {ranks} ranks, stage {stage}", file=sys.stderr, flush=True)
    return found


def table_of(found: list[Measured]) -> Table:
    table = Table(title="Gradient bytes of a rank, in MB, and collectives of a step", title_justify="left")
    for heading in ("model", "dtype"):
        table.add_column(heading)
    for heading in ("ranks", "stage", "of the model", "live, at most", "planned", "wait for the step", "planned"):
        table.add_column(heading, justify="right")
    table.add_column("buckets", justify="right")
    table.add_column("collectives a step: calls, smallest to largest MB")
    for each in found:
        table.add_row(
            each.shape,
            each.dtype,
            str(each.ranks),
            str(each.stage),
            *(
                f"{nbytes / 1e6:.0f}"
                for nbytes in (
                    each.gradient_bytes,
                    each.live_bytes,
                    each.planned_bytes,
                    each.lasting_bytes,
                    each.planned_lasting_bytes,
                )
            ),
            str(len(each.bucket_sizes)),
            "; ".join(
                f"{kind}: {len(sizes)}, {min(sizes) / 1e6:.1f} to {max(sizes) / 1e6:.1f}"
                for kind, sizes in each.collectives.items()
            ),
        )
    return table


def over_plan(found: list[Measured]) -> list[Measured]:
    """Those that held more than their plan says, but for `FILLING_BYTES` during backward, or more between backward and step."""
    return [
        each
        for each in found
        if each.live_bytes > each.planned_bytes + FILLING_BYTES or each.lasting_bytes > each.planned_lasting_bytes
    ]


def main() -> int:
    options = parse_options()
    found = measure_all(options)
    Console(width=220).print(table_of(found))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    wrong = over_plan(found)
    for each in wrong:
        print(f"more than planned: {each.shape}, {each.dtype}, {each.ranks} ranks, stage {each.stage}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
