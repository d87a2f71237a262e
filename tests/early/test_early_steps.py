"""Steps taken while backward goes on: the bits of steps taken in their time, whatever comes between backward and step."""

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from cells import examples, slow
from early_courses import EARLY, IN_TIME, OPTIMIZERS, STEPS, WIDTH, built, course, one_step, random_courses, same
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_zero.early import steps_beside
from hf_zero.early.timing import Trust
from hf_zero.integrations.announce import announce
from hf_zero.layout import slots
from hf_zero.offload import shards
from hf_zero.offload.host_memory import ShareOfCores

pytestmark = pytest.mark.timeout(180)


@examples(25)
@given(name=st.sampled_from(sorted(OPTIMIZERS)), stage=st.integers(0, 3), plan=STEPS)
def test_whatever_comes_between_backward_and_step_the_bits_are_the_same(name, stage, plan):
    expected, _ = course(0, IN_TIME, name, stage, plan)
    found, engine = course(0, EARLY, name, stage, plan)
    assert same(found, expected)
    early = engine.memory_report().early
    assert early.buckets == early.all_buckets == len(engine.buckets)
    if any(end == "step" for _, end, _ in plan):
        assert early.kept + early.forgotten > 0
    if all(between == "clip" for between, _, _ in plan):
        assert early.kept == 0
    if all((between, end, backwards) == ("nothing", "step", "one") for between, end, backwards in plan):
        assert early.forgotten == 0
    engine.close()


@pytest.mark.parametrize(("world_size", "count"), [(2, 2), slow(2, 4), slow(3, 3)], ids=["2", "2-more", "3"])
def test_ranks_forget_and_keep_together_bit_for_bit(world_size, count):
    for found in run_ranks(random_courses, world_size=world_size, time_limit_s=150, keyword_arguments={"count": count}):
        assert len(found) == count
        for what, is_same, kept, forgotten in found:
            assert is_same, what
            assert kept > 0 < forgotten, what


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bucket_is_stepped_while_backward_goes_on(stage, monkeypatch):
    monkeypatch.setattr(slots, "GRAD_BUFFERS", 1)
    model, optimizer, _ = built(EARLY, OPTIMIZERS["adamw"], stage)
    one_step(model, optimizer)
    stepped, waited = threading.Event(), []
    stock = steps_beside.Double.step
    monkeypatch.setattr(steps_beside.Double, "step", lambda *args: (stock(*args), stepped.set())[0])
    model[0][0].weight.register_hook(lambda _: waited.append(stepped.wait(20)))
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(4, WIDTH)).square().sum().backward()
    assert waited == [True], "no bucket was stepped before the first layer's gradient"
    assert same([p.detach() for p in model.parameters()], before), "forward would read a step that nobody called"


def test_a_fault_of_an_early_step_surfaces_at_the_step_and_no_thread_stays(monkeypatch):
    model, optimizer, engine = built(EARLY, OPTIMIZERS["adamw"])
    one_step(model, optimizer)

    def fail(*_):
        raise MemoryError("no room for copies")

    monkeypatch.setattr(steps_beside.Double, "step", fail)
    before = {(row.kind, row.name): row.tensor.clone() for row in engine.state.rows()}
    model(torch.ones(4, WIDTH)).square().sum().backward()
    with pytest.raises(MemoryError, match="no room for copies"):
        optimizer.step()
    assert all(torch.equal(row.tensor, before[row.kind, row.name]) for row in engine.state.rows())
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("hf_zero-step")]
    assert threads
    engine.close()
    assert not any(thread.is_alive() for thread in engine._parts.holder.timing._beside._thread._thread._threads)


def test_early_steps_have_their_own_number_of_threads(monkeypatch):
    own = torch.get_num_threads()
    seen = set()
    stock = steps_beside.Double.step
    monkeypatch.setattr(steps_beside.Double, "step", lambda *args: (seen.add(torch.get_num_threads()), stock(*args))[1])
    monkeypatch.setattr(shards, "choose_host_cores", lambda _: ShareOfCores(own + 2))
    model, optimizer, _ = built(EARLY, OPTIMIZERS["adamw"])
    for _ in range(3):
        one_step(model, optimizer)
    assert seen == {own + 2}
    assert torch.get_num_threads() == own
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == own


def test_buckets_beyond_the_memory_for_copies_wait_for_the_step():
    runs = []
    for offload in (IN_TIME, {"optimizer": "cpu", "speculate_bytes": "20KiB"}):
        model, optimizer, engine = built(offload, OPTIMIZERS["adamw"])
        for _ in range(4):
            one_step(model, optimizer)
        runs.append([p.detach().clone() for p in model.parameters()])
    assert same(*runs)
    early = engine.memory_report().early
    assert 0 < early.buckets < early.all_buckets
    assert 0 < engine._parts.holder.timing.copy_bytes() <= 20 * 2**10
    assert early.kept == early.buckets * 3, "the first step is watched"
    assert early.forgotten == 0
    assert "copies of the state" in engine.memory_report().table()


def test_hooks_see_and_change_gradients_that_no_early_step_has_touched():
    runs = []
    for offload in (IN_TIME, EARLY):
        model, optimizer, engine = built(offload, OPTIMIZERS["sgd"])
        seen = []

        def halve(optimizer, *_, seen=seen):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    seen.append(p.grad.clone())
                    p.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        for _ in range(3):
            one_step(model, optimizer)
        runs.append([*seen, *(p.detach().clone() for p in model.parameters())])
    assert same(*runs)
    assert engine.memory_report().early.kept == 0


class Noisy(torch.optim.SGD):
    """Adds noise, as Langevin dynamics do; so little that the pieces of a parameter look alike with it."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.add_(torch.randn_like(p.grad), alpha=1e-9)
        return super().step(closure)


class Remembering(torch.optim.SGD):
    """Keeps a list that grows."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("steps", []).append(1)
        return super().step(closure)


@pytest.mark.parametrize(("kind", "says"), [(Noisy, "draws random numbers"), (Remembering, "keeps 'steps'")])
def test_an_optimizer_whose_step_cannot_be_taken_early_is_stepped_in_time(kind, says, capsys):
    runs = []
    for offload in ({"optimizer": "none"}, EARLY):
        model, optimizer, engine = built(offload, partial(kind, lr=0.1, momentum=0.9))
        torch.manual_seed(1)
        for _ in range(3):
            one_step(model, optimizer)
        runs.append([p.detach().clone() for p in model.parameters()])
    early = engine.memory_report().early
    assert early.buckets == early.kept == 0
    assert says in early.hindrance
    announce(engine, "nobody")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "0 of 4 buckets are stepped during backward" in said
    assert f"since {kind.__name__} " in said
    if kind is Remembering:
        assert same(*runs)


class UsedTwice(nn.Module):
    """Under reentrant checkpointing, a second gradient of the shared layer comes when its bucket is on its way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda y: torch.tanh(self.shared(y)), x.requires_grad_(), use_reentrant=True)
        return self.last(checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=True))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_that_comes_late_is_in_the_step(stage):
    runs = []
    for offload in (IN_TIME, EARLY):
        model, optimizer, engine = built(offload, OPTIMIZERS["adamw"], stage, UsedTwice())
        for _ in range(4):
            one_step(model, optimizer)
        runs.append([p.detach().clone() for p in model.parameters()])
    assert same(*runs)
    assert engine.memory_report().early.kept > 0


def test_a_counter_in_the_group_and_an_attribute_of_the_optimizer_are_there_once():
    class Counting(torch.optim.SGD):
        scale = 0.1

        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
                group["lr"] = self.scale / group["k"]
            return super().step(closure)

    runs = []
    for offload in (IN_TIME, EARLY):
        model, optimizer, engine = built(offload, partial(Counting, lr=0.1, momentum=0.9))
        optimizer.scale = 0.05
        for _ in range(4):
            one_step(model, optimizer)
        assert [group["k"] for group in optimizer.param_groups] == [4, 4]
        runs.append([p.detach().clone() for p in model.parameters()])
    assert same(*runs)
    assert engine.memory_report().early.forgotten == 0


@given(st.lists(st.booleans(), max_size=80))
def test_trust_holds_while_at_most_one_of_twenty_steps_was_in_vain(history):
    trust = Trust()
    for in_vain in history:
        trust.record(in_vain=in_vain)
    assert trust.holds == (len(history) > 0 and sum(history[-20:]) <= 1)


def test_a_run_that_clips_every_step_stops_stepping_early_and_begins_again_when_it_stops_clipping():
    model, optimizer, engine = built({"optimizer": "cpu", "speculate_bytes": "1GiB"}, OPTIMIZERS["adamw"])
    forgotten = defaultdict(int)
    for step in range(60):
        model(torch.ones(4, WIDTH)).square().sum().backward()
        engine.clip_grad_norm_(1e-3 if 10 <= step < 30 else 1e9)
        optimizer.step()
        optimizer.zero_grad()
        forgotten[step] = engine.memory_report().early.forgotten
    early, buckets = engine.memory_report().early, len(engine.buckets)
    assert forgotten[9] == 0
    assert early.forgotten == 2 * buckets, "the second clip within twenty steps ends it"
    assert early.kept == buckets * (9 + 60 - 30 - 20 + 1)
