"""A script's operations on a model, under DDP and at stage 3, with a record of all results."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from loops import engine_or_ddp
from torch import nn
from training import fused_adamw, gpt2_batch

from hf_zero.engine.engine import ZeroEngine

SHARDED = {"stage": 3, "bucket_bytes": "20KiB"}
KEPT = {**SHARDED, "reshard_after_forward": False}
NOT_AHEAD = {**SHARDED, "prefetch_units": 0}
FAR_AHEAD = {**SHARDED, "prefetch_units": 3}
WIDTH = 64
"""Width of the layers below. Dropped values of a layer must fill whole pages; otherwise they could still be read."""


class Run:
    """One model under DDP (`settings` None) or the engine, operations of a script on it, and a record of the results."""

    def __init__(
        self,
        rank: int,
        make: Callable[[], nn.Module],
        settings: dict | None,
        *,
        make_batch=gpt2_batch,
        make_optimizer=fused_adamw,
        find_unused: bool = False,
    ):
        torch.manual_seed(0)
        self.model = make().train()
        self.optimizer = make_optimizer(self.model)
        self.entry, self.engine = engine_or_ddp(self.model, self.optimizer, settings, find_unused=find_unused)
        self.no_sync = (self.engine or self.entry).no_sync
        self.make_batch = make_batch
        self.data = torch.Generator().manual_seed(100 + rank)
        self.seen: list = []
        torch.manual_seed(1000 + rank)

    def batch(self) -> dict[str, torch.Tensor]:
        return self.make_batch(self.data, 2)

    def step(self, micro_batches: int = 1) -> None:
        for micro in range(micro_batches):
            with nullcontext() if micro == micro_batches - 1 else self.no_sync():
                loss = self.entry(**self.batch()).loss / micro_batches
                loss.backward()
            self.seen.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> torch.Tensor:
        """Returns logits of one batch, without DDP's wrapper, like evaluation loops."""
        self.model.eval()
        with torch.no_grad():
            logits = self.model(**self.batch()).logits
        self.model.train()
        return logits

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    differing = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not differing, f"these differ: {differing}"


def assert_same(ours: Run, theirs: Run, what: object = "") -> None:
    """Asserts equality bit for bit: all recorded results, and the whole state at the end."""
    assert len(ours.seen) == len(theirs.seen)
    for index, (one, other) in enumerate(zip(ours.seen, theirs.seen)):
        same = torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other
        assert same, f"{what}: number {index} of {len(theirs.seen)} seen: {one} and {other}"
    assert_equal(ours.state(), theirs.state())


def same_as_ddp(rank: int, world_size: int, script: Callable[[Run], None], variants: list[dict], **kwargs) -> None:
    """Runs `script` under DDP and with each of the engine's settings, in one process group, and asserts equal results."""
    runs = [Run(rank, settings=settings, **kwargs) for settings in (None, *variants)]
    for settings, run in zip(("DDP", *variants), runs):
        torch.manual_seed(1000 + rank)
        script(run)
        if settings != "DDP":
            assert_same(run, runs[0], settings)


def no_unit_is_whole(engine: ZeroEngine) -> bool:
    return all(unit.is_sharded and not unit.holds for unit in engine.sharded.schedule.units)


class Block(nn.Module):
    """A layer which records its calls."""

    def __init__(self, size: int):
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.on_run = None

    def forward(self, hidden):
        if self.on_run is not None:
            self.on_run()
        return torch.tanh(self.inner(hidden)) + hidden
