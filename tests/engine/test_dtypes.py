"""The table of dtypes says what is there: each entry is looked at while a step runs."""

import itertools

import pytest
import torch
from cells import short_of
from ranks import run_ranks
from torch import nn

from hf_zero import GradScaler
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(120)

FP32, BF16, FP16 = "float32", "bfloat16", "float16"
TABLE = {
    # (param_dtype, rounding, reduce_dtype): parameter, gradient, reduce, step, master, moments
    ("auto", "nearest", "auto"): (FP32, FP32, FP32, FP32, "none", FP32),
    ("auto", "nearest", "bfloat16"): (FP32, FP32, BF16, FP32, "none", FP32),
    ("auto", "nearest", "float16"): (FP32, FP32, FP16, FP32, "none", FP32),
    ("bfloat16", "nearest", "auto"): (BF16, BF16, BF16, FP32, FP32, FP32),
    ("bfloat16", "nearest", "float32"): (BF16, BF16, FP32, FP32, FP32, FP32),
    ("bfloat16", "stochastic", "auto"): (BF16, BF16, BF16, FP32, "none", FP32),
    ("bfloat16", "stochastic", "float32"): (BF16, BF16, FP32, FP32, "none", FP32),
    ("float16", "nearest", "auto"): (FP16, FP16, FP16, FP32, FP32, FP32),
    ("float16", "nearest", "float32"): (FP16, FP16, FP32, FP32, FP32, FP32),
}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def looked_at(settings: dict, autocast: torch.dtype | None) -> tuple[tuple[str, ...], str, ZeroEngine]:
    """(the dtypes of one step, of the gradient between its two micro-batches, the engine)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], settings)
    weight, seen = model[0].weight, {}
    start = engine.transport.start_reduce_scatter

    def watched(flat, out, label):
        seen["reduce"] = name(flat.dtype)
        return start(flat, out, label)

    engine.transport.start_reduce_scatter = watched
    # Before the engine's own hook takes it.
    weight.register_hook(lambda gradient: seen.update(gradient=name(gradient.dtype)))
    scaler = GradScaler("cpu", init_scale=1.0, enabled=settings["param_dtype"] == FP16)
    batch = torch.ones(4, 24, dtype=weight.dtype)
    for is_last in (False, True):
        with engine.no_sync() if not is_last else torch.enable_grad():
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(batch).float().sum()
            scaler.scale(loss).backward()
        rows = [row for sharded in engine.optimizers for row in sharded.rows if row.tensor.grad is not None]
        if not is_last:
            waiting = name(rows[0].tensor.grad.dtype) if rows else name(weight.grad.dtype)
    step = {name(row.tensor.grad.dtype) for row in rows} | {name(row.tensor.dtype) for row in rows}
    scaler.step(optimizer)
    moments = {name(s[kind].dtype) for s in optimizer.state.values() for kind in ("exp_avg", "exp_avg_sq")}
    masters = {row.bytes for row in engine.memory_report().rows if row.kind == "fp32 master"}
    master = name(engine.buckets[0].master.dtype) if masters != {0} else "none"
    assert len(step) == len(moments) == 1
    found = (name(weight.dtype), seen["gradient"], seen["reduce"], step.pop(), master, moments.pop())
    return found, waiting, engine


def all_combinations(rank: int, world_size: int, share: int) -> int:
    """Looks at one of each `share` combinations; returns how many there are."""
    count = 0
    for (param_dtype, rounding, reduce_dtype), expected in TABLE.items():
        for stage, tier, autocast, accumulation in itertools.product(
            (1, 2, 3), ("none", "cpu"), (None, torch.bfloat16), ("local", "sharded")
        ):
            if (tier, rounding) == ("cpu", "stochastic") or (stage, accumulation) == (1, "sharded"):
                continue
            if autocast is not None and param_dtype != "auto":
                continue
            count += 1
            if count % share:
                continue
            settings = {
                "stage": stage,
                "param_dtype": param_dtype,
                "rounding": rounding,
                "reduce_dtype": reduce_dtype,
                "offload": {"optimizer": tier},
                "grad_accumulation": accumulation,
            }
            found, waiting, engine = looked_at(settings, autocast)
            # A tier of its own has masters of fp32 parameters too.
            wanted = (*expected[:4], FP32 if tier == "cpu" else expected[4], expected[5])
            [row] = engine.dtype_report().rows
            assert found == wanted, settings
            assert (row.parameter, row.gradient, row.reduce, row.step, row.master, row.moments) == wanted, settings
            assert row.accumulation == waiting, settings
            assert row.accumulation in engine.dtype_report().table()
    return count


def replicated(rank: int, world_size: int) -> list[float]:
    """Whole gradients that travel in bfloat16 and are added up in fp32: the parameter's largest distance from fp32's own."""
    found = []
    for reduce_dtype in ("auto", "bfloat16"):
        torch.manual_seed(0)
        model = nn.Linear(24, 40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = ZeroEngine(model, [optimizer], {"stage": 0, "reduce_dtype": reduce_dtype})
        for _ in range(2):
            for is_last in (False, True):
                with engine.no_sync() if not is_last else torch.enable_grad():
                    model(torch.randn(4, 24, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
                assert model.weight.grad.dtype == torch.float32
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight.detach().clone())
    return [((found[0] - found[1]).abs().max() / found[0].abs().max()).item()]


def test_whole_gradients_may_travel_in_another_dtype():
    for [error] in run_ranks(replicated, world_size=2, time_limit_s=60):
        assert 0 < error < 2**-6


@pytest.mark.parametrize("share", short_of([5, 3, 1], [5]))
def test_the_table_of_dtypes_is_what_a_step_holds(share):
    found = run_ranks(all_combinations, world_size=2, time_limit_s=110, keyword_arguments={"share": share})
    assert found == [110, 110]
