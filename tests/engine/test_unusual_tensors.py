"""Parameters and buffers of unusual classes and layouts train as in plain torch, or all ranks refuse them before training."""

from collections.abc import Callable

import pytest
import torch
from loops import engine_or_ddp, take_step
from shared_ranks import four_ranks, on_shared_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hf_zero import ZeroEngine
from hf_zero.config import ConfigError

pytestmark = pytest.mark.timeout(150)
WIDTH = 8
STAGES = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, "unit_bytes": 0}]
Make = Callable[[torch.Tensor], nn.Parameter]


class Doubled(torch.Tensor):
    """Counts twice in a linear layer."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            values, weight, *bias = args
            with torch._C.DisableTorchFunctionSubclass():
                return nn.functional.linear(values, 2 * weight.as_subclass(torch.Tensor), *bias)
        return super().__torch_function__(func, types, args, kwargs or {})


class Tagged(nn.Parameter):
    def __new__(cls, values: torch.Tensor):
        made = super().__new__(cls, values)
        made.tag = "kept"
        return made


class Watched(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Counting(nn.Module):
    """Writes to a buffer in each forward."""

    def __init__(self, *, persistent: bool):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2)
        self.count = nn.Buffer(torch.ones(2), persistent=persistent)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count.add_(1)
        return self.inner(values) * self.count


def net(make: Make | None = None) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 2))
    if make is not None:
        model[0].weight = make(model[0].weight.data)
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.as_subclass(torch.Tensor).clone()


def trained(
    make_model: Callable[[], nn.Module], settings: dict | None, seed: int, *, by_torch: bool = False
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and final state of a few steps under DDP (settings None), plain torch or the engine."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    entry, engine = (model, None) if by_torch else engine_or_ddp(model, optimizer, settings)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(3):
        out = entry(torch.randn(4, WIDTH, generator=generator))
        losses.append(take_step(whole_loss(out), optimizer))
    if engine is not None:
        engine.close()
    return losses, [whole(value) for value in (*model.parameters(), *model.buffers())]


def whole_loss(out: torch.Tensor) -> torch.Tensor:
    out = out.full_tensor() if isinstance(out, DTensor) else out
    return out.square().mean()


def assert_same(one: tuple[list[float], list[torch.Tensor]], other: tuple[list[float], list[torch.Tensor]]) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@on_shared_ranks
def test_a_scripts_own_parameters_and_buffers_train_as_under_ddp(rank, world_size):
    kinds: list[Callable[[], nn.Module]] = [
        lambda: net(Tagged),
        lambda: net(Watched),
        lambda: net(lambda values: nn.Parameter(values.as_subclass(Doubled))),
        lambda: Counting(persistent=True),
        lambda: Counting(persistent=False),
    ]
    for make in kinds:
        expected = trained(make, None, rank)
        for settings in STAGES:
            assert_same(trained(make, settings, rank), expected)


# ---- a script's own DTensors ----


def split_by_plan() -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def split_by_hand() -> nn.Module:
    """All parameters are DTensors, and the inputs, too."""
    mesh = init_device_mesh("cpu", (2,))

    def split(_name: str, module: nn.Module, mesh: object) -> None:
        for name, parameter in module._parameters.items():
            module._parameters[name] = nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)]))

    def enter(_module: nn.Module, inputs: tuple, mesh: object) -> tuple:
        return tuple(DTensor.from_local(values, mesh, [Replicate()]) for values in inputs)

    return distribute_module(net(), mesh, split, input_fn=enter)


@on_shared_ranks
def test_dtensors_of_a_script_train_as_in_plain_torch(rank, world_size):
    for make in (split_by_plan, split_by_hand):
        expected = trained(make, None, 0, by_torch=True)
        for settings in STAGES:
            assert_same(trained(make, settings, 0), expected)


def two_copies(rank: int, world_size: int) -> list[list[float]]:
    """Losses of two copies of a model, each split over two ranks: stages 0 to 3, and two copies of a whole model under DDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "part"))
    copy = mesh["copy"].get_local_rank()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    found = [trained(lambda: parallelize_module(net(), mesh["part"], plan), each, copy)[0] for each in STAGES]
    return [*found, trained(net, None, copy)[0]]


def test_copies_of_a_model_that_a_script_splits_train_as_whole_copies_under_ddp():
    for *stages, expected in four_ranks.run(two_copies):
        for losses in stages:
            assert losses == pytest.approx(expected, rel=1e-5)


# ---- refused on all ranks, as by DDP ----


class WithBuffer(nn.Module):
    def __init__(self, buffer: torch.Tensor):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2)
        self.register_buffer("held", buffer)


def with_parameter(values: torch.Tensor, *, trained: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 2))
    model.register_parameter("odd", nn.Parameter(values, requires_grad=trained))
    return model


def replicated(values: torch.Tensor) -> DTensor:
    return distribute_tensor(values, init_device_mesh("cpu", (2,)), [Replicate()])


@on_shared_ranks
def test_tensors_without_flat_memory_are_refused_on_all_ranks(rank, world_size):
    cases: list[tuple[nn.Module, type[Exception], str]] = [
        (with_parameter(torch.eye(4).to_sparse()), ValueError, "the parameter 'odd' is of layout torch.sparse_coo"),
        (with_parameter(torch.eye(4).to_sparse(), trained=False), ValueError, "'odd' is of layout torch.sparse_coo"),
        (with_parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), ValueError, "'odd' is nested"),
        (nn.Sequential(nn.Linear(WIDTH, 2), nn.LazyLinear(2)), ValueError, "'1.weight' belongs to a lazy module"),
        (WithBuffer(torch.eye(4).to_sparse()), ValueError, "the buffer 'held' is a Tensor of layout torch.sparse_coo"),
        (WithBuffer(replicated(torch.ones(2))), ValueError, "the buffer 'held' is a DTensor"),
        (
            net(lambda values: nn.Parameter(replicated(values))),
            ConfigError,
            "'0.weight' is a DTensor with equal values",
        ),
    ]
    for model, kind, message in cases:
        for settings in STAGES:
            # An optimizer of torch cannot hold lazy parameters.
            held = [p for name, p in model.named_parameters() if not name.startswith("1.")]
            with pytest.raises(kind, match=message):
                ZeroEngine(model, [torch.optim.SGD(held, lr=0.1)], settings)


@on_shared_ranks
def test_tensors_in_an_optimizer_that_are_no_parameters_are_refused_on_all_ranks(rank, world_size):
    for settings in STAGES:
        model = WithBuffer(torch.ones(2, requires_grad=True))
        optimizer = torch.optim.SGD([*model.parameters(), model.held], lr=0.1)
        with pytest.raises(ValueError, match=r"SGD holds a Tensor of shape \(2,\) that is not an nn\.Parameter"):
            ZeroEngine(model, [optimizer], settings)


@on_shared_ranks
def test_gradients_that_wrap_other_tensors_are_refused_on_all_ranks(rank, world_size):
    """A frozen weight of a class whose results are of this class, too."""
    from torch.testing._internal.two_tensor import TwoTensor

    for settings in STAGES[:3]:
        model = net(lambda values: nn.Parameter(TwoTensor(values, values.clone()), requires_grad=False))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        engine = ZeroEngine(model, [optimizer], settings)
        with pytest.raises(RuntimeError, match=r"the gradient of '.*' is a TwoTensor, which wraps other tensors"):
            model(torch.ones(4, WIDTH)).square().mean().backward()
        engine.close()
