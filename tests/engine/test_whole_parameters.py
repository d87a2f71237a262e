"""Optimizers that look at whole parameters, rows that scripts write outside of a step, and vocabularies that grow in training."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cells import short_of, short_rows, slow
from loops import engine_or_ddp, take_step
from plain_lion import Lion
from shared_ranks import on_ranks, run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import VOCABULARY, Job, Outcome, fused_adamw, gpt2, gpt2_batch, save_engine, train
from transformers.optimization import Adafactor

from hf_zero.checkpoint.faults import CheckpointError
from hf_zero.checkpoint.verify import checkpoint_faults
from hf_zero.config import ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.state_rows import put_state_back
from hf_zero.integrations.announce import announce
from hf_zero.integrations.plain_optimizers import open_plain
from hf_zero.integrations.state_io import ZERO_FOLDER, load_engine, load_state
from hf_zero.optimizer.scope import find_scope, keeps_intact, refuse_wrapper
from hf_zero.optimizer.trial import UpdateScope

pytestmark = pytest.mark.timeout(180)
STAGES = [{"stage": stage, "bucket_bytes": "20KiB"} for stage in (0, 1, 2, 3)]


class Lamb(torch.optim.Optimizer):
    """You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020; as users write it."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - group["betas"][0])
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - group["betas"][1])
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]) + group["weight_decay"] * p
                trust = torch.where(p.norm() > 0, p.norm() / update.norm(), 1.0)
                p.sub_(update * trust * group["lr"])


class TrustsWhereItDecays(torch.optim.Optimizer):
    """Steps as long as the parameter's norm says in groups that decay, plain ones in the others: timm's LARS and LAMB."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad + group["weight_decay"] * p
                trust = p.norm() / update.norm() if group["weight_decay"] else 1.0
                p.sub_(update * trust * group["lr"])


class Prodigious(torch.optim.Optimizer):
    """A step size from all gradients together, as in Prodigy and D-Adaptation."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = torch.stack([p.grad.abs().sum() for p in held]).sum()
        for p in held:
            p.sub_(p.grad / size)


class SignOfTheMean(torch.optim.Optimizer):
    """Keeps no state, takes no norm, and still looks at the whole parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.mean().sign())


class InBlocks(torch.optim.Optimizer):
    """Keeps the momentum of large parameters in 8-bit blocks of 256 elements; torchao does so where they fill whole blocks."""

    def __init__(self, params, lr=1e-2, least=4096, whole_blocks=False, signs=False):
        super().__init__(params, {"lr": lr})
        self.least, self.whole_blocks, self.signs = least, whole_blocks, signs

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].get("momentum", torch.zeros_like(p))
                update = momentum.lerp(p.grad, 0.1) if self.signs else momentum
                momentum = momentum.lerp(p.grad, 0.01 if self.signs else 0.1)
                if p.numel() >= self.least and not (self.whole_blocks and p.numel() % 256):
                    blocks = nn.functional.pad(momentum.reshape(-1), (0, -p.numel() % 256)).view(-1, 256)
                    scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
                    momentum = (blocks / scale).round().mul(scale).view(-1)[: p.numel()].view(p.shape)
                self.state[p]["momentum"] = momentum
                p.sub_((update.sign() if self.signs else momentum) * group["lr"])


class Asking(torch.optim.Optimizer):
    """Finds what it has been told of a parameter by the Parameter, by its id, and by its place among the group's names."""

    def __init__(self, named, lr=1e-2):
        named = list(named)
        super().__init__(named, {"lr": lr})
        self.factor_of = {id(p): 0.5 for name, p in named if "mlp" in name}
        self.mask_of = {p: torch.linspace(0, 1, p.numel()).view(p.shape) for name, p in named if "c_attn" in name}
        self.still = {p for name, p in named if "ln_1" in name}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None and p not in self.still:
                    update = p.grad * self.factor_of.get(id(p), 1.0) * (2.0 if "wte" in name else 1.0)
                    p.sub_(update * self.mask_of.get(p, 1.0) * group["lr"])


class NamedAdamW(torch.optim.AdamW):
    """Element by element, by names: parts of parameters have the names of the whole."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None and "wte" in name:
                    p.grad.mul_(0.5)
        return super().step()


def named_groups(make, model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    return make([{"params": named[::2], "lr": 2e-2}, {"params": named[1::2]}])


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and all else, as Muon's authors advise."""
    matrices = [p for name, p in model.named_parameters() if ".h." in name and p.dim() == 2]
    of_muon = set(matrices)
    others = [p for p in model.parameters() if p not in of_muon]
    groups = [{"params": matrices[:5], "lr": 0.01}, {"params": matrices[5:], "lr": 0.02}]
    return [torch.optim.Muon(groups), torch.optim.AdamW(others, lr=1e-3)]


def matrices_last(model: nn.Module) -> torch.optim.Optimizer:
    plain, decayed = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (False, True))
    return TrustsWhereItDecays([{"params": plain}, {"params": decayed, "weight_decay": 0.1}])


def of_all(make, model: nn.Module) -> torch.optim.Optimizer:
    return make(model.parameters())


OPTIMIZERS = {
    "muon and adamw": muon_and_adamw,
    "adafactor of torch": partial(of_all, partial(torch.optim.Adafactor, lr=1e-2)),
    "adafactor of torch, foreach": partial(of_all, partial(torch.optim.Adafactor, lr=1e-2, foreach=True)),
    "adafactor of transformers": partial(
        of_all, partial(Adafactor, lr=1e-3, relative_step=False, scale_parameter=False, beta1=0.9)
    ),
    "adafactor of transformers, scaled": partial(of_all, partial(Adafactor, lr=1e-2, relative_step=False)),
    "lamb": partial(of_all, Lamb),
    "in blocks": partial(of_all, InBlocks),
    "in whole blocks": partial(of_all, partial(InBlocks, whole_blocks=True, least=1)),
    "asking": lambda model: Asking(model.named_parameters()),
    "asking for names": partial(named_groups, NamedAdamW),
    "lars of matrices, which come last": matrices_last,
}


def in_pairs(rank: int, world_size: int, names: list[str], variants: list[dict], **change) -> list[tuple]:
    """(optimizer, settings, DDP's outcome, the engine's)."""
    found = []
    for name in names:
        job = Job(make_model=gpt2, make_optimizer=OPTIMIZERS[name], **{"steps": 4, **change})
        plain = train(rank, world_size, job)
        found += [
            (name, variant, plain, train(rank, world_size, replace(job, settings=variant))) for variant in variants
        ]
    return found


def assert_equal(found: list[tuple[str, dict, Outcome, Outcome]]) -> None:
    for name, settings, plain, sharded in found:
        assert sharded.equals(plain), f"{name}, {settings}: losses differ by {sharded.loss_error(plain)}"


EVERYWHERE = ["muon and adamw", "adafactor of torch"]
ASKING = ["in blocks", "asking", "asking for names"]
OTHERS = [name for name in OPTIMIZERS if name not in (*EVERYWHERE, *ASKING)]


@pytest.mark.short_cells("asking")
@pytest.mark.parametrize(
    ("names", "variants"),
    [
        (EVERYWHERE[:1], STAGES[1:]),
        (EVERYWHERE[1:] + OTHERS, STAGES[3:]),
        (ASKING, [STAGES[1], STAGES[3], {**STAGES[2], "offload": {"optimizer": "cpu"}}]),
        slow(EVERYWHERE, STAGES),
        slow(OTHERS, STAGES[2:]),
    ],
    ids=["muon", "others at stage 3", "asking", "everywhere", "others"],
)
def test_trajectories_are_ddps_bit_for_bit_at_two_ranks(names, variants):
    for found in run_on_ranks(in_pairs, names=names, variants=variants):
        assert_equal(found)


def test_their_state_may_lie_in_files(tmp_path):
    files = {**STAGES[2], "offload": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    for found in run_on_ranks(in_pairs, names=["muon and adamw", "adafactor of torch"], variants=[files], steps=3):
        assert_equal(found)


HOST = {"offload": {"optimizer": "cpu"}}


@pytest.mark.parametrize(
    ("world_size", "stages"), [(1, [3]), slow(1, [1, 2]), slow(3, [1, 2, 3])], ids=["1", "1-others", "3"]
)
@on_ranks()
def test_other_worlds_host_memory_and_bf16_follow(rank, world_size, stages):
    errors = {}
    for name in ("muon and adamw", "adafactor of torch"):
        job = Job(make_model=gpt2, make_optimizer=OPTIMIZERS[name], steps=3, accumulation=2, max_norm=0.5)
        for more in ({"param_dtype": "bfloat16"}, {}):
            local = {"grad_accumulation": "local", **more}
            here = train(rank, world_size, replace(job, settings={**STAGES[1], **local}))
            for stage in stages:
                moved = train(rank, world_size, replace(job, settings={**STAGES[stage], **HOST, **local}))
                assert moved.equals(here), f"{name}, stage {stage}, {more}: {moved.loss_error(here)}"
        errors[name] = here.loss_error(train(rank, world_size, job)) if world_size > 1 else 0.0
    # Three ranks' gradients are added in another order than DDP's, and Muon multiplies matrices in bf16.
    assert errors.pop("muon and adamw") < 1e-3
    assert max(errors.values()) < 1e-5


def whole_states(model: nn.Module, engine: ZeroEngine) -> dict[str, dict]:
    return {name: engine.full_state(parameter) for name, parameter in model.named_parameters()}


def engine_for(make, stage: int, folder: str | None = None, **more) -> tuple[nn.Module, list, ZeroEngine]:
    torch.manual_seed(0)
    model = gpt2()
    if folder is not None:
        model.load_state_dict(torch.load(f"{folder}/model.pt", weights_only=True))
    made = make(model)
    optimizers = made if isinstance(made, list) else [made]
    return model, optimizers, ZeroEngine(model, optimizers, {**STAGES[stage], **more})


def steps(rank: int, model: nn.Module, optimizers: list, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        loss = model(**gpt2_batch(torch.Generator().manual_seed(10 * seed + rank), 2)).loss
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def saves(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    after = {}
    for name in ("muon and adamw", "adafactor of torch", "adafactor of transformers"):
        model, optimizers, engine = engine_for(OPTIMIZERS[name], stage=2)
        steps(rank, model, optimizers, range(2))
        save_engine(engine, f"{folder}/{name}")
        states, weights = whole_states(model, engine), model.state_dict()
        if rank == 0:
            torch.save(states, f"{folder}/{name}/states.pt")
            torch.save(weights, f"{folder}/{name}/model.pt")
        after[name] = steps(rank, model, optimizers, range(2, 4))
    return after


def loads(rank: int, world_size: int, folder: str, stage: int, more: dict) -> dict[str, list[float]]:
    after = {}
    for name in ("muon and adamw", "adafactor of torch", "adafactor of transformers"):
        model, optimizers, engine = engine_for(OPTIMIZERS[name], stage, f"{folder}/{name}", **more)
        load_engine(engine, f"{folder}/{name}/zero")
        saved, now = torch.load(f"{folder}/{name}/states.pt", weights_only=True), whole_states(model, engine)
        factors = [k for state in saved.values() for k in state if k in ("row_var", "exp_avg_sq_row")]
        assert bool(factors) == ("adafactor" in name)
        for parameter, state in saved.items():
            assert state.keys() == now[parameter].keys(), parameter
            for kind, value in state.items():
                other = now[parameter][kind]
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), f"{kind} of {parameter}"
                assert not torch.is_tensor(value) or value.shape == other.shape, f"{kind} of {parameter}"
        after[name] = steps(rank, model, optimizers, range(2, 4))
    return after


WHERE = [(2, 3, HOST), (3, 3, {}), (1, 0, {})]


@pytest.mark.slow
@pytest.mark.parametrize("places", short_of([WHERE[:2], WHERE], [WHERE[:2]]), ids=["some", "every"])
def test_their_state_goes_on_at_other_world_sizes_stages_and_tiers(places, tmp_path):
    arguments = {"folder": str(tmp_path)}
    expected = run_on_ranks(saves, **arguments)
    for world_size, stage, more in places:
        after = run_on_ranks(loads, world_size=world_size, **arguments, stage=stage, more=more)
        assert world_size != 2 or after == expected
    assert checkpoint_faults(tmp_path / "adafactor of torch", ZERO_FOLDER) == []


def test_a_file_of_plain_trainer_goes_on_with_its_factors(tmp_path):
    torch.manual_seed(0)
    model = gpt2()
    [optimizer] = [OPTIMIZERS["adafactor of torch"](model)]
    before = steps(0, model, [optimizer], range(2))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    expected = steps(0, model, [optimizer], range(2, 4))
    model, [optimizer], engine = engine_for(OPTIMIZERS["adafactor of torch"], 2, str(tmp_path))
    load_state(engine, tmp_path / "optimizer.pt", open_plain)
    assert before and steps(0, model, [optimizer], range(2, 4)) == expected


@pytest.mark.parametrize(
    ("wrote", "reads", "says"),
    [
        (torch.optim.SGD, torch.optim.AdamW, "does not have the setting 'betas', which this run's AdamW has"),
        (torch.optim.SGD, torch.optim.Adagrad, "has the setting 'momentum', which this run's Adagrad does not have"),
        (torch.optim.Adagrad, torch.optim.Adam, "does not have the setting 'betas', which this run's Adam has"),
        (torch.optim.Adam, torch.optim.NAdam, "does not have the setting 'momentum_decay', which this run's NAdam has"),
    ],
)
def test_a_file_of_plain_trainer_with_another_kind_of_optimizer_is_refused(wrote, reads, says, tmp_path):
    model = nn.Linear(2, 2)
    torch.save(wrote(model.parameters(), lr=0.1).state_dict(), tmp_path / "optimizer.pt")
    engine = ZeroEngine(model, [reads(model.parameters())], 2)
    with pytest.raises(CheckpointError, match=rf"optimizer\.pt was saved with an optimizer that {says}\. Resume with"):
        load_state(engine, tmp_path / "optimizer.pt", open_plain)


@pytest.mark.parametrize(
    ("make", "reach"),
    [
        (torch.optim.Muon, UpdateScope.PARAMETER),
        (torch.optim.Adafactor, UpdateScope.PARAMETER),
        (Adafactor, UpdateScope.PARAMETER),
        (Lamb, UpdateScope.PARAMETER),
        (SignOfTheMean, UpdateScope.PARAMETER),
        (InBlocks, UpdateScope.PARAMETER),
        (partial(InBlocks, whole_blocks=True), UpdateScope.PARAMETER),
        (partial(InBlocks, signs=True), UpdateScope.PARAMETER),
        (partial(InBlocks, least=10**6), UpdateScope.ELEMENT),
        (partial(Lion, lr=1e-3), UpdateScope.ELEMENT),
        (Prodigious, UpdateScope.MODEL),
        (partial(torch.optim.AdamW, capturable=True), UpdateScope.ELEMENT),
        (partial(torch.optim.SGD, lr=0.1), UpdateScope.ELEMENT),
        (torch.optim.LBFGS, UpdateScope.UNKNOWN),
    ],
)
def test_how_far_an_optimizer_looks_is_seen_by_a_trial_that_leaves_it_alone(make, reach):
    optimizer = make([nn.Parameter(torch.ones(3, 2))])
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the trial called the script's hook"))
    assert find_scope(optimizer).scope is reach
    assert not optimizer.state and torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(3, 2))


def test_an_optimizer_looks_as_far_as_in_the_group_where_it_looks_furthest():
    plain, decayed = ({"params": [nn.Parameter(torch.ones(3, 2))], "weight_decay": decay} for decay in (0.0, 0.1))
    assert find_scope(TrustsWhereItDecays([plain])).scope is UpdateScope.ELEMENT
    assert find_scope(TrustsWhereItDecays([plain, decayed])).scope is UpdateScope.PARAMETER


def intact(optimizer: torch.optim.Optimizer, config: ZeroConfig, *, shards: int) -> bool:
    return keeps_intact(optimizer, find_scope(optimizer), config, shards=shards)


def test_an_optimizer_that_is_made_of_others_is_given_whole_parameters():
    class OfTwo(torch.optim.Optimizer):
        def __init__(self, matrices, others):
            self.parts = torch.optim.Muon(matrices), torch.optim.AdamW(others)
            super().__init__([group for part in self.parts for group in part.param_groups], {})

        def step(self, closure=None):
            for part in self.parts:
                part.step()

    optimizer = OfTwo([nn.Parameter(torch.ones(3, 2))], [nn.Parameter(torch.ones(3))])
    assert find_scope(optimizer).scope is UpdateScope.UNKNOWN and intact(optimizer, ZeroConfig(), shards=2)


def test_an_optimizer_derived_from_adamw_is_tried_and_not_believed():
    class Normed(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.grad.div_(p.grad.norm())
            super().step()

    assert find_scope(Normed([nn.Parameter(torch.ones(3, 2))])).scope is UpdateScope.PARAMETER


def test_what_no_layout_suits_is_refused_by_name():
    parameters = [nn.Parameter(torch.ones(3, 2))]
    with pytest.raises(ValueError, match=r"LBFGS calls backward in the middle of its step.*Use AdamW"):
        refuse_wrapper(torch.optim.LBFGS(parameters))
    with pytest.raises(ValueError, match=r"Prodigious needs other parameters to update a parameter.*`stage: 0`"):
        intact(Prodigious(parameters), ZeroConfig(), shards=2)
    assert intact(Prodigious(parameters), ZeroConfig(), shards=1)
    with pytest.raises(ValueError, match=r"without `offload\.optimizer: nvme`, `rounding: stochastic`"):
        intact(Prodigious(parameters), ZeroConfig(rounding="stochastic"), shards=1)
    assert intact(torch.optim.Muon(parameters), ZeroConfig(), shards=2)
    assert not intact(torch.optim.AdamW(parameters), ZeroConfig(), shards=2)


def test_rows_are_whole_matrices_and_the_plan_states_the_padding(capsys):
    _, _, engine = engine_for(muon_and_adamw, 2, param_dtype="bfloat16")
    layouts = {bucket.key.optimizer: bucket.layout for bucket in engine.buckets}
    assert layouts[0].intact and not layouts[1].intact
    for optimizer in engine.optimizers:
        for row in optimizer.rows:
            whole = row.slot.parameter.shape
            assert row.tensor.shape == (whole if optimizer is engine.optimizers[0] else (whole.numel(),))
    announce(engine, "nobody")
    plan = " ".join(capsys.readouterr().err.split())
    assert "padding (parameters are not cut)" in plan
    assert "Muon: whole parameters, each on one rank (known); AdamW: element-wise (known)" in plan


# ---- rows that are written outside of a step ----

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
        entry, engine = engine_or_ddp(model, optimizer, None if settings is None else {**SMALL_BUCKETS, **settings})
        generator = torch.Generator().manual_seed(rank)
        seen = []
        for _ in range(3):
            optimizer.train()
            seen += [take_step(entry(**gpt2_batch(generator, 2)).loss, optimizer) for _ in range(2)]
            optimizer.eval()
            with torch.no_grad():
                # Not through DDP's forward: it broadcasts nothing that evaluation needs.
                seen.append(model(**gpt2_batch(torch.Generator().manual_seed(7), 2)).loss.item())
        found.append((seen, {name: value.float().numpy().copy() for name, value in model.state_dict().items()}))
        if engine is not None:
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
    of_ranks = run_on_ranks(schedule_free, world_size=world_size, variants=variants)
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


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 2}, {"stage": 3, "param_dtype": "bfloat16"}], ids=str)
@pytest.mark.short_cells("{'stage': 1}", "{'stage': 3, 'param_dtype': 'bfloat16'}")
@on_ranks(2)
def test_a_write_that_other_ranks_have_not_seen_is_refused_until_it_is_sent(rank, world_size, settings):
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
    engine.synchronize()
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
    assert said
    for name, message in said.items():
        assert name in message
        assert "were edited after the last optimizer.step()" in message
        assert "engine_of(model).synchronize()" in message


def test_an_optimizer_that_writes_in_eval_is_refused_where_its_state_is_away(tmp_path):
    model, offload = nn.Linear(8, 8), {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(ValueError, match=r"ScheduleFreeSGD writes to the parameters in its train\(\)"):
        ZeroEngine(model, [ScheduleFreeSGD(model.parameters())], {"stage": 2, "offload": offload})


# ---- vocabularies that grow and shrink ----


def trained_across_a_resize(rank: int, world_size: int, settings: dict | None, vocabulary: int) -> dict:
    torch.manual_seed(0)
    model = gpt2()
    optimizer = fused_adamw(model)
    entry, engine = engine_or_ddp(model, optimizer, settings)
    losses = []
    for step in range(6):
        if step == 3:
            torch.manual_seed(7)
            if engine is not None:
                engine.resize_embeddings(vocabulary, mean_resizing=False)
            else:
                before = dict(model.named_parameters())
                states = {name: dict(optimizer.state.pop(p)) for name, p in before.items()}
                shapes = {name: p.shape for name, p in before.items()}
                # DDP's hooks and the last graph would expect gradients of the old shapes.
                entry = loss = None
                model.resize_token_embeddings(vocabulary, mean_resizing=False)
                put_state_back([optimizer], states, shapes, before, dict(model.named_parameters()))
                entry = DistributedDataParallel(model)
        batch = gpt2_batch(torch.Generator().manual_seed(10 * step + rank), 2)
        batch = {name: ids % min(vocabulary, VOCABULARY) for name, ids in batch.items()}
        loss = entry(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "tensors": {name: value.numpy().copy() for name, value in model.state_dict().items()}}


LARGER, SMALLER = VOCABULARY + 30, VOCABULARY - 11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "vocabulary"), short_rows(itertools.product((1, 2, 3), (LARGER, SMALLER)), [(1, LARGER), (3, SMALLER)])
)
@pytest.mark.short_cells("3-200")
def test_training_goes_on_as_under_ddp(stage, vocabulary):
    arguments = {"settings": None, "vocabulary": vocabulary}
    expected = run_on_ranks(trained_across_a_resize, **arguments)
    arguments["settings"] = {"stage": stage, "bucket_bytes": "20KiB"}
    found = run_on_ranks(trained_across_a_resize, **arguments)
    for here, there in zip(found, expected):
        assert here["losses"] == there["losses"]
        assert here["tensors"]["transformer.wte.weight"].shape[0] == vocabulary
        for name, value in there["tensors"].items():
            assert np.array_equal(here["tensors"][name], value), name
