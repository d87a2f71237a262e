"""The table of dtypes says what is there: each entry is looked at while a step runs."""

import itertools

import pytest
import torch
from cells import short_of
from ranks import run_ranks
from shared_ranks import on_ranks
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


class Routed(nn.Module):
    """Keeps a gate in float32, and a projection where the others are float16, as models of transformers say it."""

    _keep_in_fp32_modules_strict = ("gate.weight",)
    _keep_in_fp32_modules = ("wo",)

    def __init__(self):
        super().__init__()
        self.entry, self.wo = nn.Linear(24, 16), nn.Linear(16, 8)
        self.mlp = nn.ModuleDict({"gate": nn.Linear(16, 4, bias=False), "experts": nn.Linear(16, 64)})
        self.norm = nn.BatchNorm1d(16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.entry(inputs.to(self.entry.weight.dtype)))
        gate, experts = self.mlp["gate"], self.mlp["experts"]
        weights = torch.softmax(gate(hidden.to(gate.weight.dtype)), -1).to(experts.weight.dtype)
        mixed = (experts(hidden).view(-1, 4, 16) * weights.unsqueeze(-1)).sum(1)
        return self.wo(mixed.to(self.wo.weight.dtype)).float()


KEPT = {
    BF16: {"model.mlp.gate.weight", "model.norm.weight", "model.norm.bias"},
    FP16: {"model.mlp.gate.weight", "model.norm.weight", "model.norm.bias", "model.wo.weight", "model.wo.bias"},
}


def routed(rank: int, settings: dict, dtype: str, *, is_cast: bool) -> tuple[dict[str, torch.Tensor], set[str]]:
    """A wrapped model and its losses behind three steps, and the names of what is float32 in a forward.

    Args:
        is_cast: the script has cast the model, so that the engine has nothing to cast.
    """
    torch.manual_seed(0)
    model = nn.ModuleDict({"model": Routed()})
    for name, parameter in model.named_parameters():
        if name not in KEPT[dtype]:
            # Digits that a cast does not take.
            rounded = parameter.detach().to(getattr(torch, dtype))
            parameter.data = rounded if is_cast else rounded.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = {} if is_cast else {"param_dtype": dtype}
    engine = ZeroEngine(model, [optimizer], {**settings, **wanted, "bucket_bytes": "1KiB"}, entry=model["model"])
    scaler = GradScaler("cpu", init_scale=8.0, enabled=dtype == FP16)
    losses, wide = [], set()
    handle = model["model"].wo.register_forward_hook(
        lambda *_: wide.update(name for name, p in model.named_parameters() if p.dtype == torch.float32)
    )
    for step in range(3):
        loss = (
            model["model"](torch.randn(6, 24, generator=torch.Generator().manual_seed(10 * step + rank))).square().sum()
        )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    handle.remove()
    engine.close()
    return {**model.state_dict(), "losses": torch.tensor(losses)}, wide


ROUTED = [
    *((dtype, {"stage": stage}) for dtype in (BF16, FP16) for stage in (0, 1, 2, 3)),
    (BF16, {"stage": 2, "offload": {"optimizer": "cpu"}}),
    (BF16, {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}}),
]


@on_ranks(2)
def test_param_dtype_leaves_what_a_model_keeps_in_float32(rank, world_size):
    for dtype, settings in ROUTED:
        expected, wide = routed(rank, settings, dtype, is_cast=True)
        found, seen = routed(rank, settings, dtype, is_cast=False)
        assert seen == wide == KEPT[dtype], (dtype, settings)
        for name, value in expected.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), (dtype, settings, name)
    _, seen = routed(rank, {"stage": 2, "rounding": "stochastic"}, BF16, is_cast=False)
    assert seen == KEPT[BF16]
