"""Steps taken while backward goes on, in memory and in files: the bits of steps in their time, and what a fault leaves."""

import errno
import random
import tempfile
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from cells import examples, slow
from hypothesis import given
from hypothesis import strategies as st
from shared_ranks import run_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_zero.config import OffloadConfig, ZeroConfig
from hf_zero.early.double import Double
from hf_zero.early.trust import Trust
from hf_zero.engine import assemble
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.announce import announce
from hf_zero.layout import gradient_buffers
from hf_zero.offload import choice
from hf_zero.offload.files import ALIGNMENT, OffloadError, aligned
from hf_zero.offload.host_memory import ShareOfCores

pytestmark = pytest.mark.timeout(180)
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


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bucket_is_stepped_while_backward_goes_on(stage, monkeypatch):
    monkeypatch.setattr(gradient_buffers, "GRAD_BUFFERS", 1)
    model, optimizer, _ = built(EARLY, OPTIMIZERS["adamw"], stage)
    one_step(model, optimizer)
    stepped, waited = threading.Event(), []
    stock = Double.step
    monkeypatch.setattr(Double, "step", lambda *args: (stock(*args), stepped.set())[0])
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

    monkeypatch.setattr(Double, "step", fail)
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
    stock = Double.step
    monkeypatch.setattr(Double, "step", lambda *args: (seen.add(torch.get_num_threads()), stock(*args))[1])
    monkeypatch.setattr(choice, "choose_host_cores", lambda _: ShareOfCores(own + 2))
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
    """Adds noise, as Langevin dynamics do."""

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


# ---- state in files ----


def in_time(path: object) -> dict:
    return {"optimizer": "nvme", "nvme_path": str(path)}


def early(path: object, **more) -> dict:
    return in_time(path) | {"speculate_bytes": EARLY["speculate_bytes"]} | more


def state_of(engine: ZeroEngine) -> dict[tuple[str, str], torch.Tensor]:
    return {(row.kind, row.name): row.tensor.clone() for row in engine.state.rows()}


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def backward(model: nn.Module) -> None:
    model(torch.ones(4, WIDTH)).square().sum().backward()


PLACES = ({}, {"params": "nvme"}, {"optimizer": "cpu", "params": "nvme"}, {"ratio": 0.5})
"""Of state in files; None is host memory."""


@examples(45)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    stage=st.integers(0, 3),
    place=st.sampled_from((*PLACES, *[None] * 4)),
    plan=STEPS,
)
def test_whatever_comes_between_backward_and_step_the_bits_are_the_same(name, stage, place, plan):
    more = place or {}
    stage = 3 if "params" in more else stage
    with tempfile.TemporaryDirectory() as path:
        # Parameters in files come in other buckets, and so in another order; rows that are whole parameters add gradients in
        # another order, too.
        expected, other = course(0, (in_time(path) if "params" in more else IN_TIME) | more, name, stage, plan)
        found, engine = course(0, EARLY if place is None else early(path) | more, name, stage, plan)
        assert same(found, expected)
        report = engine.memory_report().early
        assert report.buckets == report.all_buckets == len(engine.buckets) or "ratio" in more
        if place is None and any(end == "step" for _, end, _ in plan):
            assert report.kept + report.forgotten > 0
        if all(between == "clip" for between, _, _ in plan):
            assert report.kept == 0
        if all((between, end, backwards) == ("nothing", "step", "one") for between, end, backwards in plan):
            assert report.forgotten == 0
        engine.close()
        other.close()


@pytest.mark.parametrize(
    ("world_size", "count", "in_files"),
    [(2, 2, False), slow(2, 4, False), slow(3, 3, False), slow(2, 2, True), slow(3, 3, True)],
    ids=["2", "2-more", "3", "2-files", "3-files"],
)
def test_ranks_forget_and_keep_together_bit_for_bit(world_size, count, in_files, tmp_path):
    where = {"early": early(tmp_path)} if in_files else {}
    for found in run_on_ranks(random_courses, world_size=world_size, count=count, **where):
        assert len(found) == count
        for what, is_same, kept, forgotten in found:
            assert is_same, what
            assert kept > 0 < forgotten, what


def test_a_bucket_is_read_stepped_and_written_while_backward_goes_on_and_nothing_has_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(gradient_buffers, "GRAD_BUFFERS", 1)
    model, optimizer, engine = built(early(tmp_path), OPTIMIZERS["adamw"])
    one_step(model, optimizer)
    weights, state = weights_of(model), state_of(engine)
    written, waited = threading.Event(), []
    shard = engine.tier.files.shards[0]
    stock = shard.write_aside
    monkeypatch.setattr(shard, "write_aside", lambda buffer: (stock(buffer), written.set()))
    model[0][0].weight.register_hook(lambda _: waited.append(written.wait(20)))
    backward(model)
    assert waited == [True], "no bucket was written before the first layer's gradient"
    assert same(weights_of(model), weights), "a forward would read a step that nobody asked for"
    assert same(list(state_of(engine).values()), list(state.values())), "a save would have a step that nobody asked for"
    optimizer.step()
    assert not same(weights_of(model), weights)
    assert engine.memory_report().early.kept == 2 * len(engine.buckets)


def test_a_backward_that_fails_leaves_what_it_found(tmp_path):
    runs = []
    for offload in (in_time(tmp_path), early(tmp_path)):
        model, optimizer, engine = built(offload, OPTIMIZERS["adamw"])
        one_step(model, optimizer)
        weights, state = weights_of(model), state_of(engine)

        def fail(_):
            raise ArithmeticError("the script's own hook")

        handle = model[0][0].weight.register_hook(fail)
        with pytest.raises(ArithmeticError, match="the script's own hook"):
            backward(model)
        handle.remove()
        assert same(weights_of(model), weights)
        assert same(list(state_of(engine).values()), list(state.values()))
        optimizer.zero_grad()
        one_step(model, optimizer)
        runs.append([*weights_of(model), *state_of(engine).values()])
        engine.close()
    assert same(*runs)


def with_a_disk_that_fails_behind_one_rank(rank: int, world_size: int, path: str) -> tuple[list[str], bool]:
    model, optimizer, engine = built(early(path), OPTIMIZERS["adamw"])
    one_step(model, optimizer)
    weights, state = weights_of(model), state_of(engine)
    if rank == 1:

        def fail(_):
            raise OffloadError(errno.EIO, "hf_zero: the disk of one rank is broken")

        engine.tier.files.shards[1].write_aside = fail
    backward(model)
    is_whole = same(weights_of(model), weights) and same(list(state_of(engine).values()), list(state.values()))
    said = []
    for _ in range(2):
        with pytest.raises(OffloadError) as caught:
            optimizer.step()
        said.append(str(caught.value))
    engine.close()
    return said, is_whole


def test_a_disk_that_fails_during_backward_ends_the_step_on_all_ranks_with_its_reason(tmp_path):
    found = run_on_ranks(with_a_disk_that_fails_behind_one_rank, path=str(tmp_path))
    assert all(is_whole for _, is_whole in found)
    (here, later_here), (there, later_there) = (said for said, _ in found)
    assert "on rank 1: hf_zero: the disk of one rank is broken" in here
    assert "hf_zero: the disk of one rank is broken" in there
    assert "an earlier step of this run failed" in later_here
    assert "an earlier step of this run failed" in later_there


def test_second_sides_are_made_as_far_as_asked_and_reported(tmp_path, capsys):
    model, optimizer, engine = built(in_time(tmp_path) | {"speculate_bytes": "40KiB"}, OPTIMIZERS["adamw"])
    for _ in range(4):
        one_step(model, optimizer)
    report = engine.memory_report()
    assert 0 < report.early.buckets < report.early.all_buckets == len(engine.buckets)
    assert report.early.kept == report.early.buckets * 3, "the first step is watched"
    one = sum(3 * aligned(4 * bucket.layout.shard_numel) for bucket in engine.buckets)
    copies = {row.kind: row for row in report.rows}["copies of the state"]
    assert 0 < copies.bytes <= 40 * 2**10
    assert copies.where == "NVMe"
    assert report.traffic.held_bytes == one + copies.bytes
    assert sum(path.stat().st_size for path in engine.tier.files.folder.path.glob("*.state")) == one + copies.bytes
    # What was stepped early is read once more: masters, for their parameters.
    assert report.traffic.written_bytes_a_step == one
    assert one < report.traffic.read_bytes_a_step <= 4 * one // 3 + ALIGNMENT * len(engine.buckets)
    announce(engine, "nobody")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "are stepped during backward, on copies in files" in said


def test_a_disk_without_room_for_second_sides_is_refused_before_the_first_step(monkeypatch, tmp_path):
    needed = 3 * 4 * sum(p.numel() for p in built({}, OPTIMIZERS["adamw"])[0].parameters())
    monkeypatch.setattr(assemble, "free_disk_bytes", lambda _: needed + ALIGNMENT)
    built(in_time(tmp_path), OPTIMIZERS["adamw"])
    with pytest.raises(OSError, match=rf"\({needed - ALIGNMENT} bytes\) too little"):
        built(early(tmp_path), OPTIMIZERS["adamw"])


def test_beside_an_accelerator_half_of_the_free_disk_is_for_second_sides(monkeypatch, tmp_path):
    monkeypatch.setattr(assemble, "free_disk_bytes", lambda path: 1000 if path == tmp_path else 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = ZeroConfig(offload=OffloadConfig(**in_time(tmp_path))).offload
    needed = assemble.Elsewhere(host=0, disk=100)
    assert assemble.speculate_bytes(config, torch.device("cuda"), needed) == (1000 // 2 - 100) // 2
    assert assemble.speculate_bytes(config, torch.device("cpu"), needed) == 0
