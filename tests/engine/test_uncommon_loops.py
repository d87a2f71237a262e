"""Models and loops that are not a chain of layers with a forward, a backward and a step: trained as under DDP, or refused."""

import functools
import itertools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from cells import slow
from loops import engine_or_ddp, take_step
from shared_ranks import on_ranks, on_shared_ranks, run_on_ranks, shared_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_zero
from hf_zero.allocation import Reservation, ResizedReservation
from hf_zero.buckets import gathered_memory
from hf_zero.buckets.sharded_gradient import ShardedGradientError
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(120)
WIDTH = 8
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.outer(torch.tanh(self.inner(hidden)))


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


Loss = Callable[[nn.Module, nn.Module, torch.Tensor], torch.Tensor]
"""(what the script calls, the model itself, batch) → loss."""


def trained(rank: int, stage: int | None, loss_of: Loss) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and last parameters at a stage; None trains with DDP."""
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    of_stage_3 = {"unit_bytes": 0} if stage == 3 else {}
    settings = None if stage is None else {"stage": stage, "bucket_bytes": "1KiB", **of_stage_3}
    entry, engine = engine_or_ddp(model, optimizer, settings)
    losses = []
    for batch in batches(rank, 3):
        with hf_zero.gathered(model):
            loss = loss_of(entry, model, batch)
        losses.append(take_step(loss, optimizer))
    if engine is not None:
        engine.close()
    return losses, [p.detach().clone() for p in model.parameters()]


def with_fast_weights(entry: nn.Module, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """MAML: the loss of parameters that one step on the batch has made, differentiated through that step."""
    parameters = dict(model.named_parameters())
    inner = torch.func.functional_call(model, parameters, (batch,)).square().mean()
    gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
    prefix = "" if entry is model else "module."
    fast = {prefix + name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients)}
    return torch.func.functional_call(entry, fast, (batch.flip(0) + 1,)).square().mean()


@on_shared_ranks
def test_parameters_that_are_made_for_one_call_train_as_under_ddp(rank, world_size):
    loss_of = with_fast_weights
    losses, parameters = trained(rank, None, loss_of)
    for stage in STAGES:
        found, values = trained(rank, stage, loss_of)
        assert found == losses, f"stage {stage}"
        assert all(map(torch.equal, values, parameters)), f"stage {stage}"


def of_stage(
    model: nn.Module, optimizer: torch.optim.Optimizer, stage: int | None
) -> tuple[nn.Module, ZeroEngine | None]:
    small = {"unit_bytes": 0, "bucket_bytes": "1KiB"} if stage == 3 else {}
    settings = None if stage is None else {"stage": stage, **small}
    return engine_or_ddp(model, optimizer, settings, find_unused=True, find_unused_parameters=True)


def frozen_in_turns(rank: int, stage: int | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and last parameters of a run that freezes different parameters in each step; None trains with DDP."""
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    entry, engine = of_stage(model, optimizer, stage)
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    turns = [list(model[0].parameters()), list(model[1:].parameters()), biases, [], [model[1].inner.weight]]
    losses = []
    for number, batch in enumerate(batches(rank, 2 * len(turns))):
        frozen = turns[number % len(turns)]
        for parameter in frozen:
            parameter.requires_grad_(False)
        losses.append(take_step(entry(batch).square().mean(), optimizer))
        for parameter in frozen:
            parameter.requires_grad_(True)
    if engine is not None:
        engine.close()
    return losses, [p.detach().clone() for p in model.parameters()]


def with_inputs(rank: int, stage: int | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and last parameters of a run whose backwards name their inputs; None averages gradients by hand."""
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = None if stage is None else of_stage(model, optimizer, stage)[1]
    weights = [model[0].inner.weight, model[1].outer.weight]
    ways = [
        lambda loss: loss.backward(inputs=list(model.parameters())),
        lambda loss: loss.backward(inputs=weights[rank]),
        lambda loss: loss.backward(inputs=[batch, weights[0]]),
        lambda loss: torch.autograd.backward([loss, 2 * loss], inputs=weights),
        lambda loss: (loss.backward(inputs=weights[1], retain_graph=True), loss.backward(inputs=weights[0])),
    ]
    seen = []
    for backward, batch in zip(ways, batches(rank, len(ways))):
        batch.requires_grad_()
        loss = model(batch).square().mean()
        seen += torch.autograd.grad(loss, weights, retain_graph=True)
        seen += torch.autograd.grad(batch.sum(), weights, materialize_grads=True)
        backward(loss)
        for parameter in model.parameters() if stage is None else ():
            is_used = torch.tensor(parameter.grad is not None, dtype=torch.uint8)
            torch.distributed.all_reduce(is_used, torch.distributed.ReduceOp.MAX)
            if is_used:
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = mine / 2
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.detach(), *([] if batch.grad is None else [batch.grad])]
    if engine is not None:
        engine.close()
    return [each.sum().item() for each in seen], [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("run", [frozen_in_turns, with_inputs])
@on_shared_ranks
def test_a_backward_that_reaches_only_some_parameters_has_plain_torchs_results(rank, world_size, run):
    seen, parameters = run(rank, None)
    for stage in STAGES:
        found, values = run(rank, stage)
        assert found == seen, f"stage {stage}"
        assert all(map(torch.equal, values, parameters)), f"stage {stage}"


@on_shared_ranks
def test_a_gradient_of_a_frozen_sharded_parameter_is_refused_as_by_torch(rank, world_size):
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, engine = of_stage(model, optimizer, 3)
    model[0].inner.weight.requires_grad_(False)
    loss = model(batches(rank, 1)[0]).sum()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(loss, [model[0].inner.weight, model[0].outer.weight])
    engine.close()


@on_ranks(2)
def test_a_step_in_the_middle_of_a_backward_is_refused(rank, world_size):
    # Reductions that the backward had started stay behind.
    for stage in STAGES:
        model = chain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ZeroEngine(model, [optimizer], {"stage": stage})
        last = next(iter(model.parameters()))
        last.register_post_accumulate_grad_hook(lambda _, stepped=optimizer: stepped.step())
        with pytest.raises(RuntimeError, match=r"inside a backward.*after loss\.backward\(\)"):
            model(batches(rank, 1)[0]).sum().backward()


class WithOwnParts(nn.Module):
    """Each rank has a trained and a frozen layer, a buffer and statistics of its own."""

    def __init__(self, rank: int):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 2)
        torch.manual_seed(rank)
        self.blocks[1].own = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].frozen = nn.Linear(WIDTH, 2).requires_grad_(False)
        self.blocks[1].register_buffer("scale", torch.full((), 1.0 + rank))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        block = self.blocks[1]
        hidden = self.norm(self.blocks(hidden) + block.own(hidden)) * block.scale
        return self.head(hidden) + block.frozen(hidden)


OWN = ["blocks.1.own.weight", "blocks.1.own.bias", "blocks.1.frozen.weight", "blocks.1.scale", "norm.running_mean"]


def with_own_parts(rank: int, settings: dict | None) -> dict[str, torch.Tensor]:
    """The model behind three steps of two micro-batches, of which the first is not reduced."""
    model = WithOwnParts(rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, OWN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    entry, engine = engine_or_ddp(
        model, optimizer, None if settings is None else {**settings, "check_replicas_every": 1}
    )
    losses = []
    for number, batch in enumerate(batches(rank, 6)):
        # What no_sync sets, and what scripts without it set.
        entry.require_backward_grad_sync = number % 2 == 1
        loss = entry(batch).square().mean()
        loss.backward()
        losses.append(loss.item())
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    if engine is None:
        # DDP sends rank 0's buffers before the first forward of an evaluation, the engine behind each step.
        entry.eval()(batch)
    else:
        assert not any(map(engine.trains, model.blocks[1].own.parameters()))
        engine.close()
    return {**model.state_dict(), "losses": torch.tensor(losses)}


def keeps_what_ddp_ignores(rank: int, world_size: int, variants: list[dict]) -> dict[str, torch.Tensor]:
    expected = with_own_parts(rank, None)
    for settings in variants:
        found = with_own_parts(rank, {"grad_accumulation": "local", **settings})
        for name, value in expected.items():
            assert torch.equal(found[name], value), (settings, name)
    return {name: expected[name] for name in OWN}


def test_what_ddp_is_told_to_ignore_stays_each_ranks_own():
    offload = {"stage": 3, "unit_bytes": 0, "offload": {"optimizer": "cpu", "params": "cpu"}}
    variants = [*({"stage": stage, "bucket_bytes": "1KiB"} for stage in STAGES), offload]
    first, second = shared_ranks.run(keeps_what_ddp_ignores, variants=variants)
    assert not any(torch.equal(value, second[name]) for name, value in first.items())


@on_shared_ranks
def test_edits_of_what_ddp_ignores_stay_each_ranks_own(rank, world_size):
    for stage in STAGES:
        model = WithOwnParts(rank)
        model._ddp_params_and_buffers_to_ignore = OWN
        engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], stage)
        with engine.gathered(writeback=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank)
        with engine.gathered():
            assert model.blocks[1].own.weight.eq(rank).all() and model.head.weight.eq(0).all()
        engine.close()


class Spectral(nn.Module):
    """Multiplies frequencies by complex weights, which it keeps as such or as pairs of real numbers."""

    def __init__(self, *, is_complex: bool):
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(WIDTH // 2 + 1, dtype=torch.complex64)
        self.weight = nn.Parameter(weight if is_complex else torch.view_as_real(weight))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return self.head(torch.fft.irfft(torch.fft.rfft(hidden) * weight, WIDTH))


@on_shared_ranks
def test_complex_parameters_are_refused_and_train_in_real_form_as_complex_ones_do_under_ddp(rank, world_size):
    model = Spectral(is_complex=True)
    with pytest.raises(
        ValueError, match=r"'weight' is trained in torch\.complex64.*torch\.view_as_complex\(self\.weight\)"
    ):
        ZeroEngine(model, [torch.optim.AdamW(model.parameters())], 1)
    found = []
    for stage in (None, *STAGES):
        model = Spectral(is_complex=stage is None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        entry, engine = engine_or_ddp(model, optimizer, stage)
        found.append([take_step(entry(batch).square().mean(), optimizer) for batch in batches(rank, 3)])
        if engine is not None:
            engine.close()
    assert all(losses == found[0] for losses in found)


class Scaled(torch.optim.SGD):
    """A step with arguments of its own."""

    def step(self, closure=None, scale: float = 1.0, *, offset: torch.Tensor | None = None):
        for group in self.param_groups:
            group["lr"] = 0.1 * scale + (0.0 if offset is None else offset.item())
        return super().step(closure)


def with_arguments(rank: int, settings: dict | None) -> list[torch.Tensor]:
    model = chain()
    optimizer = Scaled(model.parameters(), lr=0.1, momentum=0.9)
    entry, engine = engine_or_ddp(model, optimizer, None if settings is None else {**settings, "bucket_bytes": "1KiB"})
    for batch, (args, kwargs) in zip(
        batches(rank, 6), [((), {}), ((None, 0.5), {}), ((), {"scale": 2.0})] * 2, strict=True
    ):
        entry(batch).square().mean().backward()
        optimizer.step(*args, **kwargs, **({"offset": torch.tensor(0.01)} if kwargs else {}))
        optimizer.zero_grad()
    if engine is not None:
        engine.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@on_ranks(2)
def test_arguments_of_an_optimizers_own_step_are_passed_on(rank, world_size, tmp_path):
    folder = str(tmp_path)
    expected = with_arguments(rank, None)
    places = [{"optimizer": "nvme", "nvme_path": folder}, {"optimizer": "cpu"}]
    for settings in [*({"stage": stage} for stage in STAGES), *({"stage": 2, "offload": place} for place in places)]:
        assert all(map(torch.equal, with_arguments(rank, settings), expected)), settings


def with_closures(rank: int, make_optimizer: Callable[..., torch.optim.Optimizer], settings: dict | None) -> list:
    model = entry = chain()
    optimizer = make_optimizer(model.parameters())
    if settings is None:
        entry = DistributedDataParallel(model)
    else:
        engine = ZeroEngine(model, [optimizer], {**settings, "bucket_bytes": "1KiB"})
    found = []
    for number, batch in enumerate(batches(rank, 4)):

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = entry(batch).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure) if number % 2 else optimizer.step(closure=closure)
        found.append(loss.detach())
        if number == 2:
            # A failed closure changes nothing.
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
    if settings is not None:
        engine.close()
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


@on_ranks(2)
def test_closures_of_torchs_optimizers_train_as_under_ddp(rank, world_size, tmp_path):
    places = [{"optimizer": "nvme", "nvme_path": str(tmp_path)}, {"optimizer": "cpu"}]
    settings = [*({"stage": stage} for stage in STAGES), *({"stage": 2, "offload": place} for place in places)]
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    for make_optimizer in (sgd, functools.partial(torch.optim.AdamW, lr=1e-2)):
        expected = with_closures(rank, make_optimizer, None)
        for each in settings:
            assert all(map(torch.equal, with_closures(rank, make_optimizer, each), expected)), (make_optimizer, each)
    with pytest.raises(ValueError, match=r"Scaled\.step\(closure\) is not supported: .*backward first"):
        with_closures(rank, functools.partial(Scaled, lr=0.1), {"stage": 1})


@on_ranks(2)
def test_a_hook_before_the_step_that_is_registered_late_sees_the_gradients_of_a_closure_or_is_named(rank, world_size):
    model, seen = chain(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = ZeroEngine(model, [optimizer], {"stage": 2, "offload": {"optimizer": "cpu"}})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batches(rank, 1)[0]).square().mean()
        loss.backward()
        return loss

    def note(stepped: torch.optim.Optimizer, *_: object) -> None:
        seen.extend(row.grad is not None for group in stepped.param_groups for row in group["params"])

    optimizer.register_step_pre_hook(note)
    with pytest.raises(
        ValueError, match=r"after accelerator\.prepare, and its.*Register the hook before accelerator\.prepare"
    ):
        optimizer.step(closure)
    with torch.no_grad():
        model(batches(rank, 1)[0])
    optimizer.step(closure)
    assert seen and all(seen)
    engine.close()


class Undefined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Undefined.apply(torch.tanh(hidden), self.unused)


def small_and_undefined() -> nn.Module:
    """Its first gradient of a backward is undefined, and all others are small."""
    return nn.Sequential(nn.LayerNorm(WIDTH), Last())


@on_shared_ranks
def test_a_backward_whose_gradients_are_to_be_differentiated_is_refused(rank, world_size):
    for stage, make in itertools.product(STAGES, (chain, small_and_undefined)):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ZeroEngine(model, [optimizer], {"stage": stage})
        with pytest.raises(RuntimeError, match=r"create_graph=True.*torch\.autograd\.grad"):
            model(batches(rank, 1)[0]).sum().backward(create_graph=True)


@on_shared_ranks
def test_a_norm_of_the_rows_in_the_optimizers_groups_is_refused(rank, world_size):
    for stage in STAGES[1:]:
        model = chain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "1KiB"})
        for _ in range(2):
            model(batches(rank, 1)[0]).sum().backward()
            [group] = optimizer.param_groups
            with pytest.raises(ShardedGradientError, match=r"this rank's part.*engine\.clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            with pytest.raises(ShardedGradientError, match="this rank's part"):
                group["params"][0].grad.data.norm()
            torch.nn.utils.clip_grad_value_(group["params"], 1e-3)
            assert all(type(p.grad.sum()) is torch.Tensor for p in group["params"])
            assert engine.clip_grad_norm_(float("inf"), float("inf")) <= 1e-3
            optimizer.step()
            optimizer.zero_grad()


def autoencoder() -> nn.ModuleDict:
    model = nn.ModuleDict({"encoder": nn.Linear(4, 3), "decoder": nn.Linear(3, 4)})
    model["decoder"].weight = nn.Parameter(model["encoder"].weight.t())
    return model


def two_columns_of_one_matrix() -> nn.ModuleDict:
    whole = torch.randn(4, 6)
    model = nn.ModuleDict({"left": nn.Linear(3, 4), "right": nn.Linear(3, 4)})
    model["left"].weight, model["right"].weight = nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, 3:])
    return model


def a_run_between_elements_of_a_column() -> nn.ParameterList:
    whole = torch.randn(4, 6)
    return nn.ParameterList([whole[:, 0], whole[1, 1:4]])


def with_an_alias_in_a_buffer() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("first_row", model.weight.detach()[0])
    return model


@pytest.mark.parametrize(
    ("make", "names"),
    [(autoencoder, ("encoder.weight", "decoder.weight")), (with_an_alias_in_a_buffer, ("weight", "first_row"))],
)
def test_a_trained_parameter_in_the_memory_of_another_tensor_is_refused(make, names):
    model = make()
    with pytest.raises(ValueError, match="two tensors in the same memory") as error:
        ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 1)
    assert all(repr(name) in str(error.value) for name in names)


def test_parameters_that_lie_between_each_other_and_frozen_ones_in_one_memory_are_trained():
    for model in (two_columns_of_one_matrix(), a_run_between_elements_of_a_column()):
        engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 1)
        assert all(map(engine.trains, model.parameters()))
    frozen = autoencoder()
    for layer in frozen.values():
        layer.weight.requires_grad_(False)
    engine = ZeroEngine(frozen, [torch.optim.SGD(frozen.parameters(), lr=0.1)], 1)
    assert not any(engine.trains(layer.weight) for layer in frozen.values())


def test_a_second_engine_for_a_model_is_refused_until_the_first_is_closed():
    model = chain()
    first = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 2)
    with pytest.raises(ValueError, match=r"another ZeroEngine.*close\(\)"):
        ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 2)
    first.close()
    ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_module_of_torch_jit_is_refused_by_name():
    model = chain()
    model[1] = torch.jit.script(model[1])
    with pytest.raises(ValueError, match=r"'1' is a torch\.jit module.*plain"):
        ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 1)


CLAMPED, LIMIT, STEPS = 16, 0.2, 4
# ---- weights that scripts edit in place ----

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
        super().__init__(CLAMPED, CLAMPED)
        self.edit = edit

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.edit(self.weight)
        return super().forward(hidden)


def clamping(edit: Edit) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Clamping(edit), nn.Tanh(), Clamping(edit), nn.Linear(CLAMPED, 2))


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(CLAMPED, CLAMPED), nn.Tanh(), nn.Linear(CLAMPED, 2))


def train_edited(rank: int, model: nn.Module, settings: dict | None, after_step: Edit | None = None) -> list[float]:
    """Losses of a few steps; settings None trains with DDP. `after_step` edits each parameter behind each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    entry, engine = engine_or_ddp(model, optimizer, settings)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        batch = torch.randn(4, CLAMPED, generator=generator).to(next(model.parameters()).dtype)
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


def resized(
    numel: int, dtype: torch.dtype, device: torch.device, kept: slice, *, separate_own: bool = False
) -> Reservation:
    return ResizedReservation(numel, dtype, kept, device)


def as_on_an_accelerator():
    """Parameters in memory that is given back as a whole, and shards apart from it."""
    return mock.patch.object(gathered_memory, "reserve", resized)


WHOLE = [{"stage": stage} for stage in (0, 1, 2)] + [{"stage": 2, "offload": HOST}]
SHARDED = [STAGE_3, STAGE_3 | {"reshard_after_forward": False}, STAGE_3 | {"offload": {"params": "cpu"}}]


@pytest.mark.parametrize(
    ("edit", "settings"), [(clamp, SHARDED), slow(clamp, WHOLE), slow(clamp_alias, WHOLE + SHARDED)]
)
@on_shared_ranks
def test_weights_that_a_forward_edits_are_ddps(rank, world_size, edit, settings):
    expected = train_edited(rank, clamping(edit), None)
    for each in settings:
        assert train_edited(rank, clamping(edit), each) == expected, each
        if each["stage"] == 3:
            with as_on_an_accelerator():
                assert train_edited(rank, clamping(edit), each) == expected, f"apart, {each}"


NEAR = {"comm": {"secondary_shard": "node", "node_size": 2}}


@pytest.mark.parametrize(
    ("world_size", "edit", "settings", "message"),
    [
        (2, clamp_data, STAGE_3, r"'0\.weight' through `\.data`.*under `torch\.no_grad\(\)`"),
        (2, exchange_data, STAGE_3, r"new memory to '0\.weight'.*`p\.copy_\(\.\.\.\)`"),
        (2, clamp, STAGE_3 | {"gather_dtype": "bfloat16"}, r"'0\.weight'.*rounded \(`gather_dtype`"),
        pytest.param(
            2,
            clamp,
            STAGE_3 | {"comm": {"weights": "int8"}},
            r"'0\.weight'.*`comm\.weights`",
            marks=pytest.mark.extra("wire"),
        ),
        slow(4, clamp, STAGE_3 | NEAR, r"'0\.weight'.*`comm\.secondary_shard`"),
    ],
    ids=["data", "exchanged data", "gathered in bf16", "gathered in int8", "kept for the backward"],
)
@on_ranks()
def test_edits_of_a_forward_that_shards_cannot_take_in_are_refused(rank, world_size, edit, settings, message):
    # A forward that has ended in an error leaves gathers of the next layers behind.
    with as_on_an_accelerator(), pytest.raises(RuntimeError, match=message):
        train_edited(rank, clamping(edit), settings)


@on_shared_ranks
def test_weights_clamped_behind_each_step_are_ddps(rank, world_size):
    expected = train_edited(rank, plain(), None, after_step=clamp)
    for settings in WHOLE:
        assert train_edited(rank, plain(), settings, after_step=clamp) == expected, settings
        has_master = "offload" in settings
        if not has_master:
            assert train_edited(rank, plain(), settings, after_step=clamp_data) == expected, settings


@pytest.mark.parametrize(
    "settings",
    [{"stage": 2, "offload": HOST}, slow({"stage": 1, "param_dtype": "bfloat16"})],
    ids=["in host memory", "in float32"],
)
@on_ranks(2)
def test_an_edit_that_a_master_would_undo_is_refused(rank, world_size, settings):
    with pytest.raises(RuntimeError, match=r"through `\.data` or numpy.*in place of `p\.data\.clamp_"):
        train_edited(rank, plain(), settings, after_step=decay_data)


class Renormed(nn.Module):
    def __init__(self, kind: type[nn.Module], *, frozen: bool):
        super().__init__()
        self.embed = kind(6, CLAMPED, max_norm=0.5)
        self.embed.weight.requires_grad_(not frozen)
        self.head = nn.Linear(CLAMPED, 2)


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


# ---- graphs from before a step ----

STEPPED_BY = [
    *({"stage": stage} for stage in STAGES),
    {"stage": 3, "reshard_after_forward": False},
    {"stage": 2, "param_dtype": "bfloat16"},
    {"stage": 3, "param_dtype": "bfloat16"},
    {"stage": 2, "offload": {"optimizer": "cpu"}},
    {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
    {"stage": 2, "offload": {"optimizer": "nvme", "nvme_path": "?"}},
    {"stage": 1, "moments": "8bit"},
]


class Heads(nn.Module):
    """A frozen trunk, so that a step of one head changes nothing that the graph of the other one has saved."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)) for _ in range(2)
        )

    def forward(self, values: torch.Tensor, head: int) -> torch.Tensor:
        # In bfloat16, what is trained and what is frozen may have different dtypes.
        hidden = self.trunk(values.to(self.trunk.weight.dtype)).to(self.heads[head][0].weight.dtype)
        return self.heads[head](hidden).square().mean()


def over_a_step(
    optimizer: torch.optim.Optimizer, make_loss: Callable[[int], torch.Tensor], graph: str, raises: bool
) -> None:
    def step(loss: torch.Tensor, **how: bool) -> None:
        loss.backward(**how)
        optimizer.step()
        optimizer.zero_grad()

    first, second, of_others = make_loss(0), make_loss(0), make_loss(1)
    step(first, retain_graph=True)
    if graph == "of others":
        step(of_others)
    elif raises:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (first if graph == "kept" else second).backward()
        optimizer.zero_grad()
    # A forward drops what a backward that failed has left. Here are several backwards before a step.
    (make_loss(0) / 2).backward()
    step(make_loss(0) / 2)


def over_steps(rank: int, world_size: int, folder: str) -> None:
    values = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))

    def trained_by(settings: dict | None, graph: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Heads()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        engine = None if settings is None else ZeroEngine(model, [optimizer], settings)
        over_a_step(optimizer, lambda head: model(values, head), graph, raises=settings is not None)
        if engine is not None:
            engine.close()
        return [p.detach().clone() for p in model.parameters()]

    for graph in ("kept", "not used yet", "of others"):
        # All ranks have the same batch: one process trains the same model.
        expected = trained_by(None, graph)
        for settings in STEPPED_BY:
            if settings.get("offload", {}).get("nvme_path"):
                settings = {**settings, "offload": {**settings["offload"], "nvme_path": folder}}
            found = trained_by(settings, graph)
            if "param_dtype" not in settings and "moments" not in settings:
                assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, expected)), settings


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_through_a_graph_from_before_a_step_raises_as_under_ddp(world_size, tmp_path):
    run_on_ranks(over_steps, world_size=world_size, folder=str(tmp_path))


@pytest.mark.parametrize(
    ("model", "optimizers", "said"),
    [
        (nn.Linear, [], "got the class Linear. Pass an object"),
        (nn.Linear(2, 2), [torch.optim.SGD], "got the class SGD. Pass an object"),
        (nn.Linear(2, 2), nn.Linear(2, 2).parameters(), "got generator. It takes a model and its optimizers"),
    ],
)
def test_a_class_or_something_else_in_place_of_model_or_optimizer_is_named(model, optimizers, said):
    with pytest.raises(TypeError, match=said):
        ZeroEngine(model, optimizers, 2)


def test_an_engine_takes_one_optimizer_without_a_list():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    engine = ZeroEngine(model, optimizer, 2)
    assert [sharded.optimizer for sharded in engine.optimizers] == [optimizer]
    engine.close()
