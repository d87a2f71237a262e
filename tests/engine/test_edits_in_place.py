"""Scripts that edit weights in place, inside a forward or behind a step: trained as under DDP, or refused."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from cells import slow
from shared_ranks import on_ranks, on_shared_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_zero.buckets import memory
from hf_zero.device import Reservation, ResizedReservation
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(120)

WIDTH, LIMIT, STEPS = 16, 0.2, 4
STAGE_3 = {"stage": 3, "unit_bytes": 0}
HOST = {"optimizer": "cpu"}


def clamp(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-LIMIT, LIMIT)


def clamp_alias(weight: nn.Parameter) -> None:
    weight.detach().clamp_(-LIMIT, LIMIT)


def clamp_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-LIMIT, LIMIT)


def decay_data(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


def exchange_data(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(-LIMIT, LIMIT)


Edit = Callable[[nn.Parameter], None]


class Clamping(nn.Linear):
    """Edits its own weight in each forward."""

    def __init__(self, edit: Edit):
        super().__init__(WIDTH, WIDTH)
        self.edit = edit

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.edit(self.weight)
        return super().forward(hidden)


def clamping(edit: Edit) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Clamping(edit), nn.Tanh(), Clamping(edit), nn.Linear(WIDTH, 2))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def train(rank: int, model: nn.Module, settings: dict | None, after_step: Edit | None = None) -> list[float]:
    """Losses of a few steps; settings None trains with DDP. `after_step` edits each parameter behind each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine = None if settings is None else ZeroEngine(model, [optimizer], {"bucket_bytes": "1KiB", **settings})
    entry = DistributedDataParallel(model) if engine is None else model
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        batch = torch.randn(4, WIDTH, generator=generator).to(next(model.parameters()).dtype)
        loss = entry(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        for parameter in model.parameters() if after_step is not None else ():
            after_step(parameter)
    if engine is not None:
        engine.close()
    return [*losses, *(float(parameter.detach().sum()) for parameter in model.parameters())]


def resized(numel: int, dtype: torch.dtype, device: torch.device, kept: slice) -> Reservation:
    return ResizedReservation(numel, dtype, kept, device)


def as_on_an_accelerator():
    """Parameters in memory that is given back as a whole, and shards apart from it."""
    return mock.patch.object(memory, "reserve", resized)


WHOLE = [{"stage": stage} for stage in (0, 1, 2)] + [{"stage": 2, "offload": HOST}]
SHARDED = [STAGE_3, STAGE_3 | {"reshard_after_forward": False}, STAGE_3 | {"offload": {"params": "cpu"}}]


@pytest.mark.parametrize(
    ("edit", "settings"), [(clamp, SHARDED), slow(clamp, WHOLE), slow(clamp_alias, WHOLE + SHARDED)]
)
@on_shared_ranks
def test_weights_that_a_forward_edits_are_ddps(rank, world_size, edit, settings):
    expected = train(rank, clamping(edit), None)
    for each in settings:
        assert train(rank, clamping(edit), each) == expected, each
        if each["stage"] == 3:
            with as_on_an_accelerator():
                assert train(rank, clamping(edit), each) == expected, f"apart, {each}"


NEAR = {"comm": {"secondary_shard": "node", "node_size": 2}}


@pytest.mark.parametrize(
    ("world_size", "edit", "settings", "message"),
    [
        (2, clamp_data, STAGE_3, r"'0\.weight' through `\.data`.*under `torch\.no_grad\(\)`"),
        (2, exchange_data, STAGE_3, r"'0\.weight' other memory.*`p\.copy_\(\.\.\.\)`"),
        (2, clamp, STAGE_3 | {"gather_dtype": "bfloat16"}, r"'0\.weight'.*rounded \(`gather_dtype`"),
        (2, clamp, STAGE_3 | {"comm": {"weights": "int8"}}, r"'0\.weight'.*`comm\.weights`"),
        slow(4, clamp, STAGE_3 | NEAR, r"'0\.weight'.*`comm\.secondary_shard`"),
    ],
    ids=["data", "exchanged data", "gathered in bf16", "gathered in int8", "kept for the backward"],
)
@on_ranks()
def test_edits_of_a_forward_that_shards_cannot_take_in_are_refused(rank, world_size, edit, settings, message):
    # A forward that has ended in an error leaves gathers of the next layers behind.
    with as_on_an_accelerator(), pytest.raises(RuntimeError, match=message):
        train(rank, clamping(edit), settings)


@on_shared_ranks
def test_weights_clamped_behind_each_step_are_ddps(rank, world_size):
    expected = train(rank, plain(), None, after_step=clamp)
    for settings in WHOLE:
        assert train(rank, plain(), settings, after_step=clamp) == expected, settings
        has_master = "offload" in settings
        if not has_master:
            assert train(rank, plain(), settings, after_step=clamp_data) == expected, settings


@pytest.mark.parametrize(
    "settings",
    [{"stage": 2, "offload": HOST}, slow({"stage": 1, "param_dtype": "bfloat16"})],
    ids=["in host memory", "in float32"],
)
@on_ranks(2)
def test_an_edit_that_a_master_would_undo_is_refused(rank, world_size, settings):
    with pytest.raises(RuntimeError, match=r"through `\.data` or numpy.*in place of `p\.data\.clamp_"):
        train(rank, plain(), settings, after_step=decay_data)


class Renormed(nn.Module):
    def __init__(self, kind: type[nn.Module], *, frozen: bool):
        super().__init__()
        self.embed = kind(6, WIDTH, max_norm=0.5)
        self.embed.weight.requires_grad_(not frozen)
        self.head = nn.Linear(WIDTH, 2)


@on_shared_ranks
def test_embeddings_that_each_rank_would_scale_by_its_own_tokens_are_refused(rank, world_size):
    for kind in (nn.Embedding, nn.EmbeddingBag):
        for stage, frozen in ((1, False), (2, False), (3, False), (3, True)):
            model = Renormed(kind, frozen=frozen)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            with pytest.raises(ValueError, match=r"'embed' is an embedding with `max_norm=0\.5`.*`max_norm=None`"):
                ZeroEngine(model, [optimizer], {"stage": stage})
    for stage, frozen in ((0, False), (2, True)):
        model = Renormed(nn.Embedding, frozen=frozen)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        ZeroEngine(model, [optimizer], {"stage": stage}).close()
