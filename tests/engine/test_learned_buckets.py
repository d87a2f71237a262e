"""Buckets whose gradients one hook takes together, and passes that go another way than those before."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_shared_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_zero.buckets.sharded_gradient import ShardedGradient
from hf_zero.engine.engine import ZeroEngine
from hf_zero.layout.gradient_buffers import GRAD_BUFFERS
from hf_zero.step.learned_buckets import Filling

pytestmark = pytest.mark.timeout(120)
WIDTH = 8


class WithoutGradient(torch.autograd.Function):
    """Adds `weight` times nothing: autograd passes the weight with an undefined gradient."""

    @staticmethod
    def forward(ctx, hidden, weight):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Failing(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("failed")


class Layers(nn.Module):
    """`count` layers in the order of `order`; `undefined` has one of them pass without gradients.

    With `fails_at`, the backward fails after the last so many layers.
    """

    def __init__(self, count: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.order: tuple[int, ...] = tuple(range(count))
        self.undefined: int | None = None
        self.fails_at: int | None = None
        self.weight_again: int | None = None
        self.recomputes = self.is_reentrant = False
        self.shown: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.weight_again is not None:
            weight = self.layers[self.weight_again].weight
            hidden = checkpoint(lambda hidden: nn.functional.linear(hidden, weight), hidden, use_reentrant=True)
        for number in self.order:
            layer = self.layers[number]
            if number == self.undefined:
                for weight in layer.parameters():
                    hidden = WithoutGradient.apply(hidden, weight)
            elif self.recomputes:
                hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=self.is_reentrant))
            else:
                hidden = torch.tanh(layer(hidden))
            if number == 1:
                self.shown = hidden
            if self.fails_at == len(self.layers) - 1 - number:
                hidden = Failing.apply(hidden)
        return hidden.square().mean()


class Run:
    """A model in training, by the engine or, as the reference, alone with gradients that are averaged by hand."""

    def __init__(self, model: Layers, stage: int | None, **more: object):
        seed = dist.get_rank() if dist.is_initialized() else 0
        self.model, self.inputs = model, torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)
        settings = {"stage": stage, "bucket_bytes": 600} | ({"unit_bytes": 0} if stage == 3 else {}) | more
        self.engine = None if stage is None else ZeroEngine(model, [self.optimizer], settings)
        # Parameters that DDP would step with zeros although autograd has brought no gradient.
        self.zeroed: list[nn.Parameter] = []

    def forward(self) -> torch.Tensor:
        return self.model(torch.randn(4, WIDTH, generator=self.inputs, requires_grad=self.model.is_reentrant))

    def accumulating(self):
        return nullcontext() if self.engine is None else self.engine.no_sync()

    def step(self, *, set_to_none: bool = True) -> None:
        if self.engine is None and dist.is_initialized():
            self._average()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def fail(self, at: int | None, loss: torch.Tensor | None = None) -> None:
        """A backward that fails after so many layers, and whose error the script catches."""
        with changed(self.model, fails_at=at):
            loss = self.forward() if loss is None else loss
        with nullcontext() if at is None else pytest.raises(ArithmeticError, match="failed"):
            loss.backward()

    def _average(self) -> None:
        for parameter in self.model.parameters():
            is_used = torch.tensor([parameter.grad is not None or any(parameter is each for each in self.zeroed)])
            dist.all_reduce(is_used, op=dist.ReduceOp.MAX)
            if is_used and parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = gradient / dist.get_world_size()
                dist.all_reduce(parameter.grad)
        self.zeroed = []

    @property
    def reductions(self) -> int:
        """How many reductions of gradients have been started."""
        begun = {} if self.engine is None else self.engine.transport.watch.begun
        return sum(count for kind, count in begun.items() if "gradients" in kind)

    @property
    def fillings(self) -> list[Filling]:
        return self.engine._step.gradients._fillings


@contextmanager
def changed(model: Layers, **values: object) -> Iterator[None]:
    before = {name: getattr(model, name) for name in values}
    vars(model).update(values)
    yield
    vars(model).update(before)


def usual(run: Run) -> None:
    run.forward().backward()
    run.step()


def on_rank_0_a_layer_less(run: Run) -> None:
    with changed(run.model, order=(0, 2, 3) if dist.get_rank() == 0 else (0, 1, 2, 3)):
        usual(run)


def on_all_ranks_a_layer_less(run: Run) -> None:
    with changed(run.model, order=(0, 2, 3)):
        usual(run)


def undefined_on_rank_0(run: Run) -> None:
    with changed(run.model, undefined=2 if dist.get_rank() == 0 else None):
        usual(run)


def undefined_on_all_ranks(run: Run) -> None:
    run.zeroed = list(run.model.layers[2].parameters())
    with changed(run.model, undefined=2):
        usual(run)


def in_another_order(run: Run) -> None:
    with changed(run.model, order=(3, 1, 0, 2)):
        usual(run)


def a_layer_twice(run: Run) -> None:
    with changed(run.model, order=(0, 1, 2, 3, 1)):
        usual(run)


def a_layer_twice_on_rank_1_with_late_gradients(run: Run) -> None:
    order = (0, 1, 2, 3, 1) if dist.get_rank() else (0, 1, 2, 3)
    with changed(run.model, order=order, recomputes=True, is_reentrant=True):
        usual(run)


def a_layer_twice_in_a_row_on_rank_0_before_its_bucket_starts(run: Run) -> None:
    order = (0, 0, 1, 1, 3, 3) if dist.get_rank() == 0 else (2, 1, 0)
    with changed(run.model, order=order, recomputes=True, is_reentrant=True):
        usual(run)


def a_weight_alone_once_more_with_a_late_gradient(run: Run) -> None:
    with changed(run.model, weight_again=3, recomputes=True, is_reentrant=True):
        usual(run)


def recomputed_by_all_and_then_only_the_first_layer_on_rank_1(run: Run) -> None:
    with changed(run.model, recomputes=True, is_reentrant=True):
        usual(run)
        with changed(run.model, order=(0,) if dist.get_rank() else run.model.order):
            usual(run)


def recomputed(run: Run) -> None:
    with changed(run.model, recomputes=True):
        usual(run)


def accumulated_without_communication(run: Run) -> None:
    before = run.reductions
    with run.accumulating():
        run.forward().backward()
        run.forward().backward()
    assert run.engine is None or not run.engine.config.accumulates_locally or run.reductions == before
    run.forward().backward()
    run.step()


def accumulated_and_a_layer_less_in_the_last_pass(run: Run) -> None:
    with run.accumulating():
        run.forward().backward()
    with changed(run.model, order=(0, 2, 3)):
        run.forward().backward()
    run.step()


def added_to_a_reduced_gradient(run: Run) -> None:
    run.forward().backward()
    run.forward().backward()
    run.step()


def zeroed_in_place_and_a_layer_less(run: Run) -> None:
    run.forward().backward()
    run.step(set_to_none=False)
    run.zeroed = list(run.model.parameters())
    with changed(run.model, order=(0, 2, 3)):
        run.forward().backward()
    run.step()


def frozen_for_a_step(run: Run) -> None:
    run.model.layers[1].requires_grad_(False)
    usual(run)
    run.model.layers[1].requires_grad_(True)


def a_bias_frozen_for_a_step(run: Run) -> None:
    run.model.layers[2].bias.requires_grad_(False)
    usual(run)
    run.model.layers[2].bias.requires_grad_(True)


def for_some_inputs(run: Run) -> None:
    weights = [layer.weight for layer in run.model.layers]
    run.forward().backward(inputs=weights)
    run.step()


def not_through_the_output(run: Run) -> None:
    run.forward()
    run.model.shown.square().mean().backward()
    run.step()


def and_a_penalty_in_its_own_backward(run: Run) -> None:
    run.forward().backward()
    # None is the last of its bucket to come: no hook that runs Python is on any of them.
    weights = [run.model.layers[number].weight for number in (3, 2)]
    last = [] if run.engine is None else [each.last.parameter for each in run.fillings if each.last is not None]
    assert not any(weight is each for weight in weights for each in last)
    sum(weight.square().sum() for weight in weights).backward()
    run.step()


def failed_before_any_gradient(run: Run) -> None:
    run.forward().backward()
    other = run.forward()
    run.fail(0)
    other.backward()
    run.fail(0)
    run.step()


def failed_on_rank_0_while_gradients_accumulate(run: Run) -> None:
    with run.accumulating():
        run.fail(2 if dist.get_rank() == 0 else None)
    usual(run)


# At how many stages they train. The first two read parameters outside of a layer. The third reduces each micro-batch from stage 2
# on.
STAGES_OF = {
    and_a_penalty_in_its_own_backward: 3,
    a_weight_alone_once_more_with_a_late_gradient: 3,
    failed_on_rank_0_while_gradients_accumulate: 2,
}
# With so many layers, the reductions of a backward need more buffers than there are.
LAYERS_OF = {recomputed_by_all_and_then_only_the_first_layer_on_rank_1: 7}
WAYS = [
    *(on_rank_0_a_layer_less, on_all_ranks_a_layer_less, undefined_on_rank_0, undefined_on_all_ranks),
    *(in_another_order, a_layer_twice, a_layer_twice_on_rank_1_with_late_gradients, recomputed),
    *(accumulated_without_communication, accumulated_and_a_layer_less_in_the_last_pass, added_to_a_reduced_gradient),
    *(zeroed_in_place_and_a_layer_less, frozen_for_a_step, a_bias_frozen_for_a_step, for_some_inputs),
    *(not_through_the_output, and_a_penalty_in_its_own_backward, failed_before_any_gradient),
    *(failed_on_rank_0_while_gradients_accumulate, a_layer_twice_in_a_row_on_rank_0_before_its_bucket_starts),
    *(a_weight_alone_once_more_with_a_late_gradient, recomputed_by_all_and_then_only_the_first_layer_on_rank_1),
]


def values(run: Run) -> list[torch.Tensor]:
    if run.engine is None:
        return [parameter.detach().clone() for parameter in run.model.parameters()]
    with run.engine.gathered(run.model):
        return [parameter.detach().clone() for parameter in run.model.parameters()]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@on_shared_ranks
def test_a_pass_that_goes_another_way_trains_as_without_learning(rank, world_size, way: Callable[[Run], None]):
    torch.manual_seed(0)
    model = Layers(LAYERS_OF.get(way, 4))
    for stage in range(STAGES_OF.get(way, 4)):
        reference, run = Run(copy.deepcopy(model), None), Run(copy.deepcopy(model), stage)
        for number, each in enumerate([usual, usual, usual, way, way, usual]):
            each(reference)
            each(run)
            for name, expected, found in zip(dict(model.named_parameters()), values(reference), values(run)):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=f"{stage} {number} {name}")
            if number == 1:
                # The last one's gradients would come on top of all other buffers at stage 0.
                assert all(filling.last is not None for filling in (run.fillings[:-1] if stage == 0 else run.fillings))
        run.engine.close()


@on_shared_ranks
def test_a_learned_bucket_runs_one_hook_in_python_and_is_watched_again_after_a_surprise(rank, world_size):
    torch.manual_seed(0)
    run = Run(Layers(), 2)
    learned = []
    for each in [usual] * 4 + [on_all_ranks_a_layer_less] + [usual] * 5 + [on_all_ranks_a_layer_less] + [usual] * 9:
        each(run)
        learned.append([filling.last is not None for filling in run.fillings])
        hooks = [list(p._post_accumulate_grad_hooks.values()) for p in run.model.parameters()]
        assert all(len(own) == 1 for own in hooks)
        in_python = sum(type(own[0]).__name__ == "function" for own in hooks)
        parameters = [len(filling.bucket.slots) for filling in run.fillings]
        assert in_python == sum(1 if is_learned else n for is_learned, n in zip(learned[-1], parameters))
    assert not any(learned[0]) and all(learned[1]) and all(learned[3])
    skipped = [index for index, is_learned in enumerate(learned[4]) if not is_learned]
    # Watched for twice as many passes after each surprise.
    assert len(skipped) == 1
    [index] = skipped
    assert [each[index] for each in learned[4:10]] == [False, False, False, False, True, True]
    assert [each[index] for each in learned[10:]] == [False] * 8 + [True] * 2


@on_shared_ranks
def test_a_parameter_with_a_hook_of_the_scripts_own_keeps_its_bucket_watched(rank, world_size):
    torch.manual_seed(0)
    for learns_first in (False, True):
        run, seen = Run(Layers(), 2), []
        for _ in range(3 * learns_first):
            usual(run)
        # One of the two is not the last of its bucket to come.
        for parameter in run.model.layers[1].parameters():
            parameter.register_post_accumulate_grad_hook(lambda each, seen=seen: seen.append(type(each.grad)))
        for _ in range(4):
            usual(run)
            # A learned bucket's gradients are taken after the script's hook has seen them.
            assert learns_first or set(seen) == {ShardedGradient}
        fillings = [each for each in run.fillings if parameter in each.slot_of]
        assert [each.last for each in fillings] == [None] and len(seen) == 8


@on_shared_ranks
def test_a_learned_bucket_sets_the_stand_ins_of_parameters_that_were_taken_back(rank, world_size):
    torch.manual_seed(0)
    run = Run(Layers(), 2)
    for _ in range(4):
        usual(run)
    for parameter in run.model.parameters():
        parameter.data = parameter.detach().clone()
    run.engine.readopt()
    run.forward().backward()
    assert all(filling.last is not None and filling.bucket in run.engine.buckets for filling in run.fillings)
    slots = [slot for filling in run.fillings for slot in filling.bucket.slots]
    assert all(slot.parameter.grad is slot.sharded_gradient for slot in slots)


@on_shared_ranks
def test_gradients_that_wait_for_their_learned_bucket_count_as_a_buffer_of_the_pool(rank, world_size):
    torch.manual_seed(0)
    run = Run(Layers(), 2)
    for _ in range(3):
        usual(run)
    pool = run.engine._step.store._pool
    watched, pool.most_bytes = pool.most_bytes, 0
    usual(run)
    assert all(filling.last is not None for filling in run.fillings)
    # Gradients that are taken one by one are freed one by one, so there they need no buffer's worth of memory.
    one_buffer = watched // GRAD_BUFFERS
    assert pool.most_bytes == watched - one_buffer > 0


@pytest.mark.parametrize("width", [4, 64])
def test_gradients_wait_for_their_bucket_if_the_buffers_still_to_come_need_as_much_memory(width):
    model = nn.Sequential(nn.Linear(width, 16, bias=False), *(nn.Linear(16, 16, bias=False) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ZeroEngine(model, [optimizer], {"stage": 0, "bucket_bytes": 3 * 16 * 16 * 4})
    for _ in range(3):
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Two of three matrices wait while autograd has the third.
    is_enough = width * 16 >= 2 * 16 * 16
    assert [len(each.bucket.slots) for each in engine._step.gradients._fillings] == [3, 1]
    assert [each.last is not None for each in engine._step.gradients._fillings] == [is_enough, True]


# ---- A backward that fails, and whose exception the script catches. Each: (run, after how many layers it fails) ----


def then_a_forward(run: Run, at: int | None) -> None:
    run.fail(at)
    run.fail(at)
    usual(run)


def then_a_backward_alone(run: Run, at: int | None) -> None:
    other = run.forward()
    run.fail(at)
    other.backward()
    run.step()


def then_zeroed(run: Run, at: int | None) -> None:
    run.fail(at)
    run.optimizer.zero_grad()
    usual(run)


def then_zeroed_by_the_model(run: Run, at: int | None) -> None:
    run.fail(at)
    run.model.zero_grad()
    usual(run)


def then_zeroed_in_place(run: Run, at: int | None) -> None:
    run.fail(at)
    run.optimizer.zero_grad(set_to_none=False)
    run.step()


def then_stepped_at_once(run: Run, at: int | None) -> None:
    run.fail(at)
    run.step()


def then_clipped(run: Run, at: int | None) -> None:
    run.fail(at)
    if run.engine is None:
        # torch's own function fails without any gradient.
        for gradient in (p.grad for p in run.model.parameters() if p.grad is not None):
            gradient.clamp_(-1e-3, 1e-3)
    else:
        run.engine.clip_grad_norm_(1e6)
        run.engine.clip_grad_value_(1e-3)
    run.step()


def after_another_backward(run: Run, at: int | None) -> None:
    run.forward().backward()
    then_a_forward(run, at)


def while_gradients_accumulate(run: Run, at: int | None) -> None:
    with run.accumulating():
        run.forward().backward()
        run.fail(at)
    usual(run)


def after_gradients_accumulated(run: Run, at: int | None) -> None:
    with run.accumulating():
        run.forward().backward()
    then_stepped_at_once(run, at)


FAILURES = [
    *(then_a_forward, then_a_backward_alone, then_zeroed, then_zeroed_by_the_model, then_zeroed_in_place),
    *(then_stepped_at_once, then_clipped, after_another_backward, while_gradients_accumulate),
    after_gradients_accumulated,
]
OFFLOADED = {"optimizer": "cpu"}
PLACES = [(stage, {}) for stage in range(4)]
PLACES += [(1, {"offload": OFFLOADED}), (2, {"offload": OFFLOADED}), (3, {"offload": OFFLOADED | {"params": "cpu"}})]


@pytest.mark.parametrize("way", FAILURES, ids=lambda way: way.__name__)
def test_one_rank_goes_on_after_a_caught_failure_of_a_backward_as_plain_torch(way: Callable[[Run, int | None], None]):
    for number, (stage, more) in enumerate(PLACES):
        torch.manual_seed(0)
        model = Layers()
        reference, run = Run(copy.deepcopy(model), None), Run(copy.deepcopy(model), stage, **more)
        # Watched buckets first, and learned ones later. It fails before, between and after the gradients.
        for step, at in enumerate([number % 4, None, None, None, (number + 1) % 4, 3]):
            for each in (reference, run):
                usual(each) if at is None else way(each, at)
            for expected, found in zip(values(reference), values(run)):
                assert torch.equal(found, expected), (stage, more, step)


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_goes_on_after_it_zeroes_gradients_that_there_was_no_memory_to_reduce(stage):
    torch.manual_seed(0)
    model = Layers()
    reference, run = Run(copy.deepcopy(model), None), Run(copy.deepcopy(model), stage)
    # Watched buckets first, and learned ones later; in place last, since some gradients stay None then.
    for clear in ("model", "optimizer", "in place"):
        for each in (reference, run):
            usual(each)
            with changed(run.engine._step.store, _start_reduction=out_of_memory) if each is run else nullcontext():
                with pytest.raises(torch.OutOfMemoryError) if each is run else nullcontext():
                    each.forward().backward()
        with pytest.raises(RuntimeError, match="last backward ended with an error"):
            run.forward()
        for each in (reference, run):
            (each.model if clear == "model" else each.optimizer).zero_grad(set_to_none=clear != "in place")
            if each is reference:
                # The batch of the forward that raised.
                each.forward()
            usual(each)
        for expected, found in zip(values(reference), values(run)):
            assert torch.equal(found, expected), clear


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no memory")


@on_shared_ranks
def test_all_of_several_ranks_raise_before_a_step_that_follows_a_failed_backward(rank, world_size):
    torch.manual_seed(0)
    model = Layers()
    ways = itertools.cycle(FAILURES[:-2])
    for stage, who in itertools.product(range(4), ([0], [1], [0, 1])):
        for way in itertools.islice(ways, 2):
            run = Run(copy.deepcopy(model), stage)
            usual(run)
            at = 2 if rank in who else None
            named = "ranks 0, 1" if len(who) == 2 else f"rank {who[0]}"
            for each in (way, way):
                with pytest.raises(RuntimeError, match=f"last backward ended with an error on {named} after"):
                    each(run, at)


@on_shared_ranks
def test_ranks_go_on_after_a_caught_failure_of_a_backward_in_no_sync_as_under_ddp(rank, world_size):
    torch.manual_seed(0)
    model = Layers()
    for stage in (2, 3):
        reference, run = Run(copy.deepcopy(model), None), Run(copy.deepcopy(model), stage)
        for step, who in enumerate(([0], [0, 1], [1])):
            for each in (reference, run):
                with each.accumulating():
                    each.forward().backward()
                    each.fail((step + 1) % 4 if rank in who else None)
                    if step % 2:
                        each.forward().backward()
                usual(each)
            for expected, found in zip(values(reference), values(run)):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=f"stage {stage}, step {step}")
        # The sum over the ranks does not show that one rank has zeroed its gradients.
        with pytest.raises(RuntimeError, match="last backward ended with an error on rank 0 after"):
            with run.accumulating():
                run.fail(2 if rank == 0 else None)
                if rank == 0:
                    run.optimizer.zero_grad()
            usual(run)
