"""Weights that are written in an optimizer's groups outside of its step reach every rank, or are refused."""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(180)

SMALL_BUCKETS = {"bucket_bytes": "20KiB"}


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Steps a sequence z beside the average that is evaluated; `train()` and `eval()` exchange weights, as in the paper."""

    def __init__(self, parameters, lr: float = 0.1, beta: float = 0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "train_mode": False, "count": 0})

    def _move(self, group: dict, weight: float) -> None:
        for p in group["params"]:
            if "z" in self.state[p]:
                p.lerp_(self.state[p]["z"], weight)

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["train_mode"]:
                self._move(group, 1 - 1 / group["beta"])
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                self._move(group, 1 - group["beta"])
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            group["count"] += 1
            share = 1 / group["count"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def schedule_free(rank: int, world_size: int, variants: list[dict | None]) -> list[tuple[list[float], dict]]:
    """Losses in training and in evaluation, and the evaluated weights, under DDP (None) and under settings."""
    found = []
    for settings in variants:
        torch.manual_seed(0)
        model = gpt2()
        optimizer = ScheduleFreeSGD(model.parameters())
        if settings is None:
            entry = DistributedDataParallel(model)
        else:
            entry, engine = model, ZeroEngine(model, [optimizer], {**SMALL_BUCKETS, **settings})
        generator = torch.Generator().manual_seed(rank)
        seen = []
        for _ in range(3):
            optimizer.train()
            for _ in range(2):
                loss = entry(**gpt2_batch(generator, 2)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            optimizer.eval()
            with torch.no_grad():
                # Not through DDP's forward: it broadcasts nothing that evaluation needs.
                seen.append(model(**gpt2_batch(torch.Generator().manual_seed(7), 2)).loss.item())
        found.append((seen, {name: value.float().numpy().copy() for name, value in model.state_dict().items()}))
        if settings is not None:
            engine.close()
            assert "train" not in optimizer.__dict__
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_schedule_free_optimizers_evaluate_and_save_the_same_weights_on_every_rank(world_size):
    exact = [{"stage": stage, **more} for stage in (0, 1, 2, 3) for more in ({}, {"offload": {"optimizer": "cpu"}})]
    # Stage 0 sums gradients in bfloat16, the others in float32.
    in_bf16 = [{"stage": stage, "param_dtype": "bfloat16"} for stage in (1, 2, 3)]
    variants = [None, *exact, *in_bf16]
    of_ranks = run_ranks(
        schedule_free, world_size=world_size, time_limit_s=150, keyword_arguments={"variants": variants}
    )
    for rank, found in enumerate(of_ranks):
        (reference, weights), rounded = found[0], found[-len(in_bf16)]
        for settings, (seen, got) in zip(variants[1:], found[1:]):
            of_rank_0 = of_ranks[0][variants.index(settings)][1]
            assert all(np.array_equal(got[name], of_rank_0[name]) for name in got), f"ranks differ: {settings}"
            wanted, wanted_weights = rounded if settings in in_bf16 else (reference, weights)
            if world_size < 3:
                assert seen == wanted, f"rank {rank}, {settings}"
                assert all(np.array_equal(got[name], wanted_weights[name]) for name in got), f"rank {rank}, {settings}"
            else:
                bound = 2e-3 if settings in in_bf16 else 1e-5
                assert max(abs(a - b) for a, b in zip(seen, wanted)) < bound, f"rank {rank}, {settings}"


def clamp_rows(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.01, 0.01)


def writes_between_steps(rank: int, world_size: int, settings: dict) -> dict[str, str]:
    """What is said after a write in the optimizer's groups, by what comes next; and checks of what is no fault."""
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = ZeroEngine(model, [optimizer], {**SMALL_BUCKETS, **settings})
    batch = gpt2_batch(torch.Generator().manual_seed(rank), 2)

    def step(between=lambda: None) -> None:
        model(**batch).loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()

    step()
    said = {}
    clamp_rows(optimizer)
    for name, do in {"a forward": lambda: model(**batch), "a state dict": model.state_dict}.items():
        if settings["stage"] == 3 and name == "a state dict":
            continue
        with pytest.raises(RuntimeError) as caught:
            do()
        said[name] = str(caught.value)
    engine.synchronise()
    assert all(value.abs().max() <= 0.011 for value in model.state_dict().values())
    # The step itself sends what it finds, and what it makes of it.
    step(between=lambda: clamp_rows(optimizer))
    model(**batch)
    whole = model.state_dict()
    clamp_all = {name: value.clone().clamp_(-0.005, 0.005) for name, value in whole.items()}
    model.load_state_dict(clamp_all)
    step()
    for value in model.state_dict().values():
        of_rank_0 = value.clone()
        torch.distributed.broadcast(of_rank_0, src=0)
        assert torch.equal(value, of_rank_0)
        assert value.abs().max() <= 0.0065
    return said


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}, {"stage": 3, "param_dtype": "bfloat16"}], ids=str)
@pytest.mark.short_cells("{'stage': 1}", "{'stage': 3, 'param_dtype': 'bfloat16'}")
def test_a_write_that_other_ranks_have_not_seen_is_refused_until_it_is_sent(settings):
    for said in run_ranks(
        writes_between_steps, world_size=2, time_limit_s=100, keyword_arguments={"settings": settings}
    ):
        assert said
        for name, message in said.items():
            assert name in message
            assert "written to since the last optimizer.step()" in message
            assert "engine_of(model).synchronise()" in message


def test_an_optimizer_that_writes_in_eval_is_refused_where_its_state_is_away(tmp_path):
    model, offload = nn.Linear(8, 8), {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(ValueError, match=r"ScheduleFreeSGD writes to the parameters in its train\(\)"):
        ZeroEngine(model, [ScheduleFreeSGD(model.parameters())], {"stage": 2, "offload": offload})
