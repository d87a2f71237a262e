"""Courses of steps, and of what comes between backward and step, whose steps are taken early or in their time."""

import random
from contextlib import nullcontext
from functools import partial

import torch
from hypothesis import strategies as st
from torch import nn

from hf_zero.early.timing import Trust
from hf_zero.engine.engine import ZeroEngine

WIDTH = 24
IN_TIME = {"optimizer": "cpu"}
EARLY = {"optimizer": "cpu", "speculate_bytes": "64MiB"}
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    # Its step writes into the gradients.
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, foreach=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5, centered=True),
}
BETWEEN = (
    "nothing",
    "measure",
    "clip",
    "clamp",
    "lr",
    "edit a gradient",
    "edit a weight",
    "drop one",
    "look",
    "reload",
)
"""What a script may do between backward and step."""
STEPS = st.lists(
    st.tuples(
        st.sampled_from(BETWEEN),
        st.sampled_from(["step", "step", "step", "skip"]),
        st.sampled_from(["one", "one", "two", "two under no_sync"]),
    ),
    min_size=1,
    max_size=8,
)


class Always(Trust):
    """Trust that no failure shakes, so that every step is begun early. Runs with just `EARLY`'s bytes for copies have it."""

    holds = True


def small_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*layers, nn.LayerNorm(WIDTH))


def built(offload: dict, make_optimizer, stage: int = 2, model: nn.Module | None = None, **more):
    model = model or small_model()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = make_optimizer([{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}])
    engine = ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "5KiB", "offload": offload, **more})
    if offload.get("speculate_bytes") == EARLY["speculate_bytes"]:
        engine._parts.holder.timing.steps.trust = Always()
    return model, optimizer, engine


def come_between(what: str, model: nn.Module, optimizer: torch.optim.Optimizer, engine: ZeroEngine) -> list:
    rows = [p for group in optimizer.param_groups for p in group["params"]]
    graded = [p for p in rows if p.grad is not None]
    if what == "measure":
        return [engine.clip_grad_norm_(float("inf")).item()]
    if what == "clip":
        return [engine.clip_grad_norm_(0.01).item()]
    if what == "clamp":
        engine.clip_grad_value_(1e-3)
    if what == "lr":
        optimizer.param_groups[0]["lr"] *= 0.5
    if what == "edit a gradient" and graded:
        graded[-1].grad.mul_(0.5)
    if what == "edit a weight":
        with engine.gathered(model[0], writeback=True), torch.no_grad():
            model[0][0].weight.mul_(0.5)
    if what == "drop one":
        model[2][0].weight.grad = None
    if what == "look":
        seen = [engine.full_grad(p) for p in model.parameters()]
        seen += [value for p in model.parameters() for value in engine.full_state(p).values()]
        return [value.clone() if torch.is_tensor(value) else value for value in seen]
    if what == "reload":
        optimizer.load_state_dict(optimizer.state_dict())
    return []


def course(rank: int, offload: dict, name: str, stage: int, plan: list, **more) -> tuple[list, ZeroEngine]:
    """Everything that can be seen of a run."""
    model, optimizer, engine = built(offload, OPTIMIZERS[name], stage, **more)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for between, end, backwards in plan:
        for turn in range(1 if backwards == "one" else 2):
            waits = backwards == "two under no_sync" and turn == 0
            with engine.no_sync() if waits else nullcontext():
                batch = torch.randn(4, WIDTH, generator=generator)
                loss = model(batch.to(model[0][0].weight.dtype)).square().sum()
                loss.backward()
            seen.append(loss.item())
        seen += come_between(between, model, optimizer, engine)
        if end == "step":
            optimizer.step()
        optimizer.zero_grad()
    with engine.gathered(model):
        seen += [p.detach().clone() for p in model.parameters()]
    seen += [row.tensor.clone() for row in engine.state.rows()]
    seen += [value for scalars in engine.state.scalars().values() for value in scalars.values()]
    return seen, engine


def same(ours: list, theirs: list) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(ours, theirs)
    )


def random_courses(rank: int, world_size: int, count: int, early: dict = EARLY) -> list[tuple[str, bool, int, int]]:
    draw = random.Random(world_size)
    found = []
    for turn in range(count):
        name, stage = sorted(OPTIMIZERS)[turn % len(OPTIMIZERS)], draw.randrange(4)
        ends, backwards = ["step", "step", "step", "skip"], ["one", "one", "two", "two under no_sync"]
        plan = [(draw.choice(BETWEEN), draw.choice(ends), draw.choice(backwards)) for _ in range(6)]
        # Half of a run as most runs are: clipping seldom bites.
        plan += [(draw.choice(["nothing", "measure", "clip"]), "step", "one") for _ in range(6)]
        more = {"param_dtype": "bfloat16"} if turn % 3 == 2 else {}
        expected, _ = course(rank, IN_TIME, name, stage, plan, **more)
        ours, engine = course(rank, early, name, stage, plan, **more)
        report = engine.memory_report().early
        found.append((f"{name}, stage {stage}, {plan}", same(ours, expected), report.kept, report.forgotten))
        engine.close()
    return found


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, WIDTH)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
