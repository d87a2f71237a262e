"""Dtypes of parameters, gradients, masters and moments: the table, bfloat16 without masters, gradients kept in bfloat16."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from cells import short_of, slow
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from ranks import run_ranks
from shared_ranks import on_ranks, run_on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import (
    Job,
    Outcome,
    adamw_in_two_groups,
    backward_on_device,
    built_in_bf16,
    gpt2,
    of_one_seed,
    save_engine,
    steps,
    train,
)

from hf_zero import GradScaler
from hf_zero.arithmetic import stochastic
from hf_zero.config import ConfigError
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import state_plan
from hf_zero.integrations.state_io import load_engine
from hf_zero.optimizer.rounded_master import STEP

pytestmark = pytest.mark.timeout(180)
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


@on_ranks(2)
def test_whole_gradients_may_travel_in_another_dtype(rank, world_size):
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
    [error] = [((found[0] - found[1]).abs().max() / found[0].abs().max()).item()]
    assert 0 < error < 2**-6


@pytest.mark.parametrize("share", short_of([5, 3, 1], [5]))
def test_the_table_of_dtypes_is_what_a_step_holds(share):
    found = run_on_ranks(all_combinations, share=share)
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


# ---- bfloat16 without masters ----

BY_CHANCE = {"param_dtype": "bfloat16", "rounding": "stochastic", "grad_accumulation": "local"}
NEAREST = {"param_dtype": "bfloat16", "grad_accumulation": "local"}
LAYOUTS = [{"stage": 0}, {"stage": 1}, {"stage": 2, "bucket_bytes": "7KiB"}, {"stage": 3, "bucket_bytes": "20KiB"}]


def on_layouts(rank: int, world_size: int, layouts: list[dict]) -> tuple[list[float], list[float]]:
    """The losses, by chance and from masters, of the same batch on every rank."""
    job = Job(make_batch=of_one_seed)
    runs: list[Outcome] = []
    for more in layouts:
        runs.append(train(rank, world_size, replace(job, settings={**BY_CHANCE, **more})))
        assert runs[-1].equals(runs[0]), f"{more}: {runs[-1].loss_error(runs[0])}"
    return runs[0].losses, train(rank, world_size, replace(job, settings={**NEAREST, "stage": 2})).losses


@pytest.mark.parametrize("layouts", [LAYOUTS[2:], slow(LAYOUTS)], ids=["some", "all"])
def test_bits_depend_on_the_parameter_and_the_step_alone(layouts):
    limited = {"time_limit_s": 120, "keyword_arguments": {"layouts": layouts}}
    by_world = {world_size: run_ranks(on_layouts, world_size=world_size, **limited) for world_size in (1, 2)}
    (losses, exact), *others = [outcome for outcomes in by_world.values() for outcome in outcomes]
    for other, _ in others:
        assert other == losses
    # One run in bfloat16 beside another: as near as its digits allow, and learning.
    assert losses == pytest.approx(exact, rel=0.02)
    assert losses[-1] < losses[0]


def prepared(settings: dict) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = adamw_in_two_groups(model)
    return model, optimizer, ZeroEngine(model, [optimizer], settings)


@on_ranks(2)
def test_edits_at_stage_3_go_into_the_next_step(rank, world_size):
    model, optimizer, engine = prepared({**BY_CHANCE, "stage": 3})
    with engine.gathered(model.transformer.wpe, writeback=True), torch.no_grad():
        model.transformer.wpe.weight.fill_(0.25)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    steps(model, optimizer, range(1))
    with engine.gathered(model.transformer.wpe):
        assert torch.equal(model.transformer.wpe.weight, torch.full_like(model.transformer.wpe.weight, 0.25))


@on_ranks(2)
def test_a_run_goes_on_bit_for_bit_at_another_stage(rank, world_size, tmp_path):
    folder = str(tmp_path)
    model, optimizer, engine = prepared({**BY_CHANCE, "stage": 2, "bucket_bytes": "20KiB"})
    steps(model, optimizer, range(2))
    assert {row.kind for row in engine.state.rows()} == {"exp_avg", "exp_avg_sq"}
    assert all(state[STEP] == 2 for state in engine.state.scalars().values())
    save_engine(engine, folder)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = steps(model, optimizer, range(2, 4))
    for settings in ({**BY_CHANCE, "stage": 3}, {**BY_CHANCE, "stage": 1}):
        model, optimizer, engine = prepared(settings)
        model.load_state_dict(weights)
        load_engine(engine, f"{folder}/zero")
        assert steps(model, optimizer, range(2, 4)) == expected
    # Neither kind of run is lost to the other.
    model, optimizer, engine = prepared({**NEAREST, "stage": 2})
    model.load_state_dict(weights)
    load_engine(engine, f"{folder}/zero")
    assert steps(model, optimizer, range(2, 4)) == pytest.approx(expected, rel=0.02)
    save_engine(engine, folder)
    model, optimizer, engine = prepared({**BY_CHANCE, "stage": 2})
    load_engine(engine, f"{folder}/zero")
    assert all(state[STEP] == 2 for state in engine.state.scalars().values())


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))

    def forward(self) -> torch.Tensor:
        return self.weight.float().sum()


def drifted(settings: dict | None, steps: int = 100, lr: float = 1e-4) -> torch.Tensor:
    """Weights of 1 after `steps` updates of -lr, each far smaller than half of the last digit of 1 (2^-8)."""
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if settings is not None:
        ZeroEngine(model, [optimizer], settings)
    for _ in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().double()


def test_it_learns_where_the_nearest_stands_still_and_is_right_on_average():
    assert torch.equal(drifted(None), torch.ones(4096, dtype=torch.float64))
    weights = drifted({"stage": 2, "rounding": "stochastic"})
    # Each weight's variance is at most steps x lr x 2^-8; the mean of 4096 stays within five of its standard deviations.
    bound = 5 * (100 * 1e-4 * 2**-8 / 4096) ** 0.5
    assert abs(weights.mean().item() - 0.99) < bound
    assert weights.unique().numel() > 1


def test_memory_is_ten_bytes_a_parameter():
    model, optimizer, engine = prepared({**BY_CHANCE, "stage": 2, "bucket_bytes": "1GiB"})
    steps(model, optimizer, range(1))
    rows = {row.kind: row.bytes for row in engine.memory_report().rows}
    numel = sum(p.numel() for p in model.parameters())
    padded = sum(bucket.layout.numel for bucket in engine.buckets)
    assert rows["fp32 master"] == state_plan(engine).masters == 0
    assert rows["parameters"] == 2 * padded and rows["optimizer state"] == 8 * numel
    assert all(bucket.master.untyped_storage().nbytes() == 4 for bucket in engine.buckets)


def test_an_edit_goes_into_the_next_step():
    model, optimizer, engine = prepared({**BY_CHANCE, "stage": 2})
    with engine.gathered(writeback=True):
        model.transformer.wte.weight.data.fill_(0.25)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    steps(model, optimizer, range(1))
    assert torch.equal(model.transformer.wte.weight, torch.full_like(model.transformer.wte.weight, 0.25))


def test_what_it_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"`rounding: stochastic` needs bfloat16 parameters.*torch\.float32"):
        prepared({"stage": 2, "rounding": "stochastic"})
    with pytest.raises(ConfigError, match=r"keeps no master for `offload\.optimizer: cpu` to offload"):
        prepared({"stage": 2, "rounding": "stochastic", "offload": {"optimizer": "cpu"}})


# ---- gradients that wait for kernels in bfloat16 ----

MAX_NORM = 1.0


def state_after(stage: int, *, accumulation: int = 1, clips: bool = True, looks: bool = False, **settings) -> list:
    """Losses, norms, masters and moments of a few steps."""
    model, optimizer, engine = built_in_bf16(stage, **settings)
    found = []
    for step in range(3):
        found += [backward_on_device(model, 10 * step + micro) for micro in range(accumulation)]
        if clips:
            found.append(engine.clip_grad_norm_(MAX_NORM))
        if looks:
            found += [engine.full_grad(parameter).dtype for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + state_of(engine)


def state_of(engine: ZeroEngine) -> list[torch.Tensor]:
    return [torch.as_tensor(row.tensor.detach()) for row in engine.state.rows()]


WIDE = {"reduce_dtype": "float32", "bucket_bytes": "40KiB"}
"""The same buckets, with gradients that become float32 when they have been computed."""


def are_equal(ones: list, others: list) -> bool:
    return all(
        torch.equal(one, other) if torch.is_tensor(one) else one == other
        for one, other in zip(ones, others, strict=True)
    )


@pytest.mark.extra("kernels")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.short_cells("1-1", "1-3", "2-0", "2-2")
def test_one_gpu_steps_on_bfloat16_gradients_to_the_bits_of_float32_ones(stage, accumulation):
    # On the host torch adds squares of 16-bit elements in another order, and a norm has another last digit.
    kept = state_after(stage, accumulation=accumulation, clips=False)
    widened = state_after(stage, accumulation=accumulation, clips=False, **WIDE)
    assert are_equal(kept, widened)


@pytest.mark.extra("kernels")
def test_a_look_at_a_clipped_gradient_changes_no_bit_and_is_float32():
    looked, plain = state_after(2, looks=True), state_after(2)
    assert {each for each in looked if isinstance(each, torch.dtype)} == {torch.float32}
    assert are_equal([each for each in looked if torch.is_tensor(each)], plain)


@pytest.mark.extra("kernels")
@pytest.mark.parametrize("moments", ["32bit", "8bit"])
def test_a_setting_that_no_kernel_has_a_form_for_gets_float32_gradients(moments):
    def steps(**settings) -> list:
        model, optimizer, engine = built_in_bf16(2, moments=moments, **settings)
        optimizer.param_groups[0]["maximize"] = True
        for step in range(2):
            backward_on_device(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return state_of(engine)

    assert are_equal(steps(), steps(**WIDE))


@pytest.mark.extra("kernels")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_gpu_with_a_master_holds_16_bytes_a_parameter(stage):
    model, optimizer, engine = built_in_bf16(stage, bucket_bytes="1MiB")
    numel = sum(parameter.numel() for parameter in model.parameters())
    backward_on_device(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward_on_device(model, 1)
    held = {row.kind: row.bytes / numel for row in engine.memory_report().rows}
    expected = {"parameters": 2, "fp32 master": 4, "optimizer state": 8, "gradients": 2, "gradient buffers": 0}
    # Padding is 1.3 % of so small a model.
    assert {kind: held[kind] for kind in expected} == pytest.approx(expected, rel=0.02)
    plan = state_plan(engine)
    assert (plan.gradients + plan.gradient_buffers) / numel == pytest.approx(2, rel=0.02)


class Operations(TorchDispatchMode):
    """Names of what is done on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.extra("kernels")
def test_one_gpu_neither_multiplies_gradients_nor_casts_them():
    model, optimizer, engine = built_in_bf16(2)
    operations, slots = Operations(), [slot for bucket in engine.buckets for slot in bucket.slots]
    for name in ("put", "put_whole", "start", "finish", "finish_all"):
        method = getattr(engine._step.store, name)

        def noted(*args, _method=method):
            with operations:
                return _method(*args)

        setattr(engine._step.store, name, noted)
    # One by one in the first two passes. From then on a bucket at a time, except for buckets whose gradients would wait on top of
    # all buffers.
    for seed in range(3):
        operations.names.clear()
        fillings = engine._step.gradients._fillings
        one_by_one = [len(each.bucket.slots) for each in fillings if each.last is None]
        copies, joins = sum(one_by_one), len(fillings) - len(one_by_one)
        assert (joins > 0) is (seed == 2) and (seed < 2) is (copies == len(slots))
        backward_on_device(model, seed)
        optimizer.zero_grad()
        assert (operations.names.count("copy_"), operations.names.count("cat")) == (copies, joins)
    assert not {"mul", "mul_", "_foreach_mul", "_to_copy", "add_"} & set(operations.names)


def test_philox_gives_its_published_numbers():
    # The known answer of the Random123 library for counter and key 0.
    assert [int(word) for word in stochastic.philox(0, torch.tensor([0]))] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]


@given(seed=st.integers(0, 2**63 - 1), numel=st.integers(0, 5000), offset=st.integers(0, 2**40))
@limits(deadline=None, max_examples=50)
def test_stochastic_rounding_goes_to_one_of_the_two_beside(seed, numel, offset):
    source = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    out, again = torch.zeros(2, numel, dtype=torch.bfloat16).unbind()
    stochastic.round_stochastically(source, out, seed=seed, offset=offset)
    stochastic.round_stochastically(source, again, seed=seed, offset=offset)
    assert torch.equal(out, again)
    below = (source.view(torch.int32) & -(1 << 16)).view(torch.float32)
    above = (below.view(torch.int32) + (1 << 16)).view(torch.float32)
    assert bool(((out.float() == below) | (out.float() == above)).all())


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_stochastic_rounding_is_right_on_average(share):
    numel = 1 << 17
    source = torch.full((numel,), 1.0 + share * 2.0**-7)
    out = torch.zeros(numel, dtype=torch.bfloat16)
    stochastic.round_stochastically(source, out, seed=5)
    up = (out > 1).double().mean().item()
    # Five standard deviations of a share of 131,072 throws, and the share's own 16 bits.
    assert abs(up - share) <= 5 * math.sqrt(share * (1 - share) / numel) + 2.0**-16


def test_a_shard_gets_the_bits_of_its_place_in_the_whole():
    source = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    whole, shard = torch.zeros(5000, dtype=torch.bfloat16), torch.zeros(5000 - 2048, dtype=torch.bfloat16)
    stochastic.round_stochastically(source, whole, seed=9, offset=64)
    stochastic.round_stochastically(source[2048:], shard, seed=9, offset=64 + 2048 // 8)
    assert torch.equal(whole[2048:], shard)
    assert stochastic.counters_for(5000) == 640
    other = torch.zeros_like(whole)
    stochastic.round_stochastically(source, other, seed=9, offset=64 + 640)
    assert not torch.equal(whole, other)


def test_stochastic_rounding_keeps_what_bfloat16_holds():
    kept = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, -3.0, 2.0**-133])
    source = torch.cat([kept, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)])
    out = torch.zeros(10, dtype=torch.bfloat16)
    for seed in range(50):
        stochastic.round_stochastically(source, out, seed=seed)
        assert torch.equal(out[:5].float(), kept[:5]) and torch.equal(out[6:8].float(), kept[6:])
        assert bool(out[[5, 8, 9]].isnan().all())
    with pytest.raises(ValueError, match="seed is -1"):
        stochastic.round_stochastically(source, out, seed=-1)
