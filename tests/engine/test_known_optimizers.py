"""The table of known optimizers, held to the classes that are installed by runs of whole, cut and separate parameters."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks
from torch import nn
from trainer_job import as_launched, make_trainer

from hf_zero.config import ConfigError
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import announce
from hf_zero.optimizer.known import KNOWN, known_scope, refuse_unsuited
from hf_zero.optimizer.scope import find_scope
from hf_zero.optimizer.trial import UpdateScope

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
ELEMENT, PARAMETER, MODEL = UpdateScope.ELEMENT, UpdateScope.PARAMETER, UpdateScope.MODEL
SHAPES = [(5, 7), (12,), (9, 4), (136, 144)]
MATRICES = [shape for shape in SHAPES if len(shape) == 2]
PROJECTED = {"rank": 2, "update_proj_gap": 5, "scale": 1.0, "proj_type": "std"}
RUNS: dict[str, dict[str, Any]] = {
    "torch.optim.asgd.ASGD": {"t0": 3},
    "torch.optim.Muon": {"shapes": MATRICES},
    "muon.SingleDeviceMuon": {"shapes": MATRICES},
    # Only groups with a rank are projected.
    "galore_torch.adamw.AdamW": {"shapes": MATRICES, "of_group": PROJECTED},
    "pytorch_optimizer.optimizer.galore.GaLore": {
        "shapes": MATRICES,
        "of_group": {**PROJECTED, "projection_type": PROJECTED["proj_type"]},
    },
    "pytorch_optimizer.optimizer.snsm.AdamWSN": {"of_group": {"sn": True, "subset_size": 4}},
    # Roots of large matrices cost seconds.
    "pytorch_optimizer.optimizer.shampoo.Shampoo": {"shapes": SHAPES[:3]},
    "torch_optimizer.shampoo.Shampoo": {"shapes": SHAPES[:3]},
    "timm.optim.lars.Lars": {"weight_decay": 0.1},
    "torch_optimizer.lars.LARS": {"weight_decay": 0.1},
    "torch_optimizer.sgdp.SGDP": {"lr": 0.05},
    # Near the target, gradients are noise at any angle.
    "timm.optim.sgdp.SGDP": {"lr": 0.05},
    "pytorch_optimizer.optimizer.adamp.SGDP": {"lr": 0.05},
    "galore_torch.adafactor.Adafactor": {"relative_step": False},
    "apollo_torch.adafactor.Adafactor": {"relative_step": False},
    "transformers.optimization.Adafactor": {"relative_step": False},
    "torch_optimizer.adafactor.Adafactor": {"relative_step": False},
    "pytorch_optimizer.optimizer.adafactor.AdaFactor": {"relative_step": False},
    "lion_pytorch.cautious_lion.Lion": {"cautious_factor": 1.0},
    "timm.optim.lamb.Lamb": {"max_grad_norm": None},
    # These find a step size from a rate of 1.
    **{
        name: {"lr": 1.0}
        for name, (scope, _) in KNOWN.items()
        if scope is MODEL and ("apt" in name or "prodigy" in name)
    },
    **{
        f"bitsandbytes.optim.{name}{bits}": {"momentum": 0.9}
        for name in ("sgd.SGD", "lars.LARS")
        for bits in ("", "8bit", "32bit")
    },
}
"""Arguments beside a learning rate; `of_group` stays in the group, and `shapes` are other ones."""
ELEMENT_WISE_HERE = {
    # 32-bit ones of bitsandbytes keep whole parameters for what a script says of single ones.
    *(
        name
        for name, (scope, _) in KNOWN.items()
        if name.startswith("bitsandbytes") and "8bit" not in name and "lamb" not in name
    ),
}
NOT_RUN = {
    # They change when a projection has settled: later than a test can wait.
    "pytorch_optimizer.optimizer.swats.SWATS",
    "torch_optimizer.swats.SWATS",
    # Begins at step 1,000 of its own count, and costs minutes by then.
    "pytorch_optimizer.optimizer.shampoo.ScalableShampoo",
    # They need an accelerator, a compiler, parts of a model, or groups of their own.
    *(name for name in KNOWN if name.startswith(("torchao", "lomo"))),
    "galore_torch.adamw8bit.AdamW8bit",
    "apollo_torch.adamw8bit.AdamW8bit",
    "apollo_torch.q_apollo.AdamW",
    "muon.SingleDeviceMuonWithAuxAdam",
    # On the CPU their own step fails, with Triton or without.
    "optimi.stableadamw.StableAdamW",
    "bitsandbytes.optim.ademamix.AdEMAMix32bit",
    "bitsandbytes.optim.ademamix.PagedAdEMAMix32bit",
}


def build(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    module, _, kind = name.rpartition(".")
    made = getattr(pytest.importorskip(module, exc_type=ImportError), kind)
    arguments = {"lr": 1e-2, **RUNS.get(name, {})}
    arguments.pop("shapes", None)
    return made([{"params": list(parameters), **arguments.pop("of_group", {})}], **arguments)


def pieces(whole: torch.Tensor) -> list[torch.Tensor]:
    return list(whole.reshape(-1).tensor_split([3, whole.numel() * 2 // 3]))


class Run:
    """An optimizer on parameters that a quadratic draws to a target, with noise and spikes; or on parts of the same."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], starts: Sequence[torch.Tensor]):
        self.starts = [start.clone() for start in starts]
        self.parameters = [nn.Parameter(start.clone()) for start in starts]
        self.optimizer = make(self.parameters)
        train = getattr(self.optimizer, "train", None)
        if callable(train):
            train()

    def step(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()
        return [(p.detach() - start).reshape(-1) for p, start in zip(self.parameters, self.starts)]


def equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor], eps: float) -> bool:
    bound = 64 * eps
    return all(bool(((a - b).abs() <= bound * (1 + a.abs().amax())).all()) for a, b in zip(some, others, strict=True))


def scope_in_a_run(
    make: Callable[..., torch.optim.Optimizer], shapes: list, steps: int, dtype: torch.dtype
) -> UpdateScope:
    """What whole, cut and separate parameters show of an optimizer that is built as a script builds it."""
    generator, eps = torch.Generator().manual_seed(3), torch.finfo(dtype).eps
    draw = partial(torch.randn, generator=generator, dtype=dtype)
    starts, targets = ([draw(shape) * scale for shape, scale in zip(shapes, (1, 0.1, 3, 0.3))] for _ in range(2))
    whole = Run(make, starts)
    apart = [Run(make, [start]) for start in starts]
    try:
        cut: Run | None = Run(make, [piece for start in starts for piece in pieces(start)])
    except Exception:
        cut = None
    found = ELEMENT if cut else PARAMETER
    for step in range(steps):
        spike = 500.0 if step % 37 == 20 else 1.0
        noise = 0.0 if step < steps // 3 else 1.0
        gradients = [
            (p.detach() - target + noise * draw(p.shape)) * spike * scale
            for p, target, scale in zip(whole.parameters, targets, (1, 30, 0.01, 1))
        ]
        moves = whole.step(gradients)
        assert all(bool(move.isfinite().all()) for move in moves)
        if not equal(moves, [run.step([gradient])[0] for run, gradient in zip(apart, gradients)], eps):
            return MODEL
        if found is ELEMENT and cut is not None:
            try:
                moved = iter(cut.step([piece for gradient in gradients for piece in pieces(gradient)]))
            except Exception:
                found = PARAMETER
                continue
            if not equal(moves, [torch.cat([next(moved) for _ in range(3)]) for _ in starts], eps):
                found = PARAMETER
    return found


def check(name: str, steps: int) -> None:
    shapes = RUNS.get(name, {}).get("shapes", SHAPES)
    optimizer = build(name, [nn.Parameter(torch.ones(shape)) for shape in shapes])
    known = known_scope(optimizer)
    assert known is not None, f"{name} is not found"
    # The state of bitsandbytes and others is float32: in float64 they would show their rounding only.
    dtype = torch.float32 if name.startswith("bitsandbytes") else torch.float64
    found = scope_in_a_run(partial(build, name), shapes, steps, dtype)
    assert found is known.finding.scope or (found is ELEMENT and name in ELEMENT_WISE_HERE), f"{name}: {found}"


HERE = [name for name in KNOWN if name.startswith(("torch.optim", "transformers"))]


@pytest.mark.parametrize("name", HERE)
def test_a_class_of_torch_or_transformers_looks_as_far_as_the_table_says(name):
    check(name, steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KNOWN if name not in NOT_RUN])
def test_a_known_class_looks_as_far_as_the_table_says_in_a_long_run(name):
    check(name, steps=150)


@pytest.mark.parametrize(
    ("name", "arguments", "scope"),
    [
        ("lion_pytorch.cautious_lion.Lion", {"cautious_factor": 0.5}, PARAMETER),
        ("timm.optim.lion.Lion", {"caution": True}, PARAMETER),
        ("timm.optim.lamb.Lamb", {}, MODEL),
        ("pytorch_optimizer.optimizer.lion.Lion", {"use_gc": True}, PARAMETER),
        ("pytorch_optimizer.optimizer.ademamix.AdEMAMix", {"cautious": True}, PARAMETER),
        ("pytorch_optimizer.optimizer.adopt.ADOPT", {"stable_adamw": True}, PARAMETER),
        ("pytorch_optimizer.optimizer.adan.Adan", {"max_grad_norm": 1.0}, MODEL),
        ("pytorch_optimizer.optimizer.lamb.Lamb", {"pre_norm": True}, MODEL),
        ("galore_torch.adamw.AdamW", PROJECTED, PARAMETER),
    ],
)
def test_settings_widen_what_a_known_class_looks_at(name, arguments, scope):
    module, _, kind = name.rpartition(".")
    made = getattr(pytest.importorskip(module, exc_type=ImportError), kind)
    in_group = {key: arguments[key] for key in arguments if name.startswith("galore")}

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        own = {} if in_group else arguments
        return made([{"params": list(parameters), **in_group}], lr=1e-2, **own)

    shapes = [(5, 7), (9, 4)]
    found = known_scope(make([nn.Parameter(torch.ones(shape)) for shape in shapes]))
    assert found is not None and found.finding.scope is scope and "known, with `" in found.finding.reason
    assert scope_in_a_run(make, shapes, 40, torch.float64) is scope


class Sgd(torch.optim.Optimizer):
    """An optimizer of a script, whose gradients `change` sees first."""

    def __init__(self, params, change: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor], lr: float = 1e-2):
        super().__init__(params, {"lr": lr})
        self.change = change

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    p.sub_(self.change(p, p.grad, count), alpha=group["lr"])


def clipped_at_spikes(_p, grad, _count):
    return grad * (2000.0 / grad.norm().clamp(min=2000.0))


def trusted_after_a_warm_up(p, grad, count):
    return grad * (p.norm() / grad.norm() if count > 40 else 1.0)


def centred_each_thousandth_step(_p, grad, count):
    return grad - grad.mean() if count % 1000 == 0 else grad


def centred_convolutions(_p, grad, _count):
    return grad - grad.mean((1, 2), keepdim=True) if grad.dim() == 3 else grad


def factored_from_128_on(_p, grad, _count):
    return grad - grad.mean(0) if grad.dim() == 2 and min(grad.shape) >= 128 else grad


def of_another_size_from_4096_on(_p, grad, _count):
    return grad * 0.5 if grad.numel() > 4096 else grad


def scaled_by_a_little(_p, grad, _count):
    return grad * (1 + 1e-8 * grad.mean().sign())


def projected_at_right_angles(p, grad, _count):
    cosine = (p * grad).sum() / (p.norm() * grad.norm() + 1e-12)
    return grad + p if cosine.abs() < 1e-3 else grad


def centred_in_bfloat16(_p, grad, _count):
    return grad - grad.mean() if grad.dtype == torch.bfloat16 else grad


def at_random(_p, grad, _count):
    return grad * torch.rand_like(grad)


def element_by_element(p, grad, count):
    return (grad.clamp(-10, 10) if count > 3 else grad.sign()) * (1 + p.tanh())


@pytest.mark.parametrize(
    ("change", "shape", "dtype", "scope", "reason"),
    [
        (clipped_at_spikes, (3, 2), torch.float32, PARAMETER, "between elements at step 34"),
        (trusted_after_a_warm_up, (3, 2), torch.float32, PARAMETER, "between elements at step 41"),
        (centred_each_thousandth_step, (3, 2), torch.float32, PARAMETER, "between elements at step 1000"),
        (centred_convolutions, (3, 2, 4), torch.float32, PARAMETER, "between elements at step 1"),
        (factored_from_128_on, (3, 2), torch.float32, PARAMETER, "between elements"),
        (of_another_size_from_4096_on, (3,), torch.float32, PARAMETER, "between elements"),
        (scaled_by_a_little, (3, 2), torch.float32, PARAMETER, "between elements at step 1"),
        (projected_at_right_angles, (3, 2), torch.float32, PARAMETER, "between elements"),
        (centred_in_bfloat16, (3, 2), torch.bfloat16, PARAMETER, "in bfloat16"),
        (at_random, (3, 2), torch.float32, PARAMETER, "between elements at step 1"),
        (element_by_element, (3, 2), torch.float32, ELEMENT, "no dependence"),
    ],
)
def test_a_trial_finds_dependence_that_begins_late_or_at_a_limit(change, shape, dtype, scope, reason):
    parameter, before = nn.Parameter(torch.ones(shape, dtype=dtype)), torch.get_rng_state()
    found = find_scope(Sgd([parameter], change))
    assert found.scope is scope and reason in found.reason, found
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(parameter, torch.ones(shape, dtype=dtype))


class Averaging(torch.optim.SGD):
    """Averages gradients over ranks itself in every tenth step."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if self.steps % 10 == 0:
                dist.all_reduce(p.grad)
        return super().step(closure)


@on_ranks(2)
def test_an_optimizer_that_calls_collectives_in_its_step_is_refused_above_stage_0(rank, world_size):
    model = nn.Linear(4, 3)
    for stage in (2, 0):
        optimizer = Averaging(model.parameters())
        expected = pytest.raises(ValueError, match=r"Averaging needs .*its step calls the collective allreduce")
        with expected if stage else nullcontext():
            engine = ZeroEngine(model, [optimizer], stage)
    for _ in range(11):
        model(torch.full((2, 4), rank + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.steps == 11
    with engine.gathered():
        assert len(set(engine.world.exchange(model.weight.sum().item()))) == 1


class InOrder(torch.optim.Optimizer):
    """Looks at other parameters from its fifth step on, and only at spikes."""

    def __init__(self, params, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})
        self.count = torch.zeros(())
        self.seen: list[int] = []

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.count += 1
        self.seen.append(int(self.count))
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.sub_(p.grad * (100.0 / norm.clamp(min=100.0) if self.count > 4 else 1.0), alpha=1e-2)


def test_a_trial_finds_late_dependence_on_other_parameters_and_leaves_attributes_alone():
    optimizer = InOrder([nn.Parameter(torch.ones(3, 2))])
    found = find_scope(optimizer)
    assert found.scope is MODEL and "on other parameters at step" in found.reason
    assert optimizer.count == 0 and not optimizer.seen


class InQueues(torch.optim.Optimizer):
    """Keeps factors of a parameter in an object that no checkpoint holds."""

    def __init__(self, params, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    factors = self.state[p].setdefault("factors", deque(torch.zeros(size) for size in p.shape))
                    factors[0] += p.grad.square().view(len(p), -1).sum(1).to(factors[0])
                    p.sub_(
                        (p.grad.view(len(p), -1) / (1 + factors[0].to(p).unsqueeze(1))).view_as(p), alpha=group["lr"]
                    )


def test_the_plan_says_at_the_start_that_state_in_other_objects_cannot_be_saved(capsys):
    model = nn.Linear(4, 3, bias=False)
    announce(ZeroEngine(model, [InQueues(model.parameters())], 2), "nobody")
    plan = " ".join(capsys.readouterr().err.replace("┃", " ").replace("│", " ").split())
    assert (
        "none can be saved: InQueues keeps 'factors', which is no tensor or number, and no list, tuple or dict" in plan
    )
    assert "InQueues: whole parameters, each on one rank (a trial" in plan


@on_ranks(2)
def test_a_trainer_that_would_save_such_state_is_refused_before_the_first_step(rank, world_size, tmp_path):
    as_launched(rank, world_size)
    trainer = make_trainer("flag 2", "gpt2", tmp_path, save_strategy="steps", max_steps=1)
    trainer.optimizer = InQueues(trainer.model.parameters())
    with pytest.raises(ConfigError, match=r"InQueues keeps 'factors'.*Set `save_strategy='no'`"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_subclasses_are_known_as_long_as_they_change_no_part_of_a_step():
    class Renamed(torch.optim.AdamW):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.label = "mine"

        def describe(self) -> str:
            return self.label

    class Changed(torch.optim.AdamW):
        def _init_group(self, *args, **kwargs):
            return super()._init_group(*args, **kwargs)

    parameters = [nn.Parameter(torch.ones(3, 2))]
    assert known_scope(Renamed(parameters)) is not None
    assert known_scope(Changed(parameters)) is None


def test_an_element_wise_class_of_a_release_that_nobody_read_is_tried_too(monkeypatch):
    lion = pytest.importorskip("lion_pytorch").Lion
    optimizer = lion([nn.Parameter(torch.ones(3, 2))])
    assert find_scope(optimizer).reason == "known"
    monkeypatch.setattr("importlib.metadata.version", lambda _: "99.0")
    found = find_scope(optimizer)
    assert found.scope is ELEMENT and "a trial" in found.reason


@pytest.mark.parametrize(
    "name", ["muon.Muon", "lomo_optim.lomo.Lomo", "transformers.trainer_pt_utils.LayerWiseDummyOptimizer"]
)
def test_a_class_that_steps_elsewhere_or_over_ranks_is_refused_by_name(name):
    module, _, kind = name.rpartition(".")
    made = type(kind, (torch.optim.SGD,), {"__module__": module})
    with pytest.raises(ValueError, match=rf"the optimizer {kind} \w+ .*, so it cannot be stepped over shards"):
        refuse_unsuited(made([nn.Parameter(torch.ones(3, 2))]))
