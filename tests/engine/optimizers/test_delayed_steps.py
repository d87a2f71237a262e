"""Steps that end one step late: a loop in one process that applies each update one step late, bit for bit."""

import copy
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from cells import examples, slow
from early_courses import OPTIMIZERS, WIDTH, small_model
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations.accelerator.announce import announce
from hf_zero.integrations.checkpoints.checkpointing import ZERO_FOLDER, load_engine, seal_state, write_state

pytestmark = pytest.mark.timeout(180)

WARMUP = 3
DELAYED = {"optimizer": "cpu", "delay": 1, "delay_warmup": WARMUP}
EVENTS = ("nothing", "clamp", "lr", "betas", "edit a weight", "skip")


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return OPTIMIZERS[name](groups)


def batches(rank: int, count: int, world_size: int) -> list[torch.Tensor]:
    """Of one rank. More than two have the same ones: a sum of three depends on its order, unless they are equal."""
    generator = torch.Generator().manual_seed(rank if world_size <= 2 else 0)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def change_settings(event: str, optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    if event == "lr" and torch.is_tensor(group["lr"]):
        # As schedulers of torch do: in place.
        group["lr"].mul_(0.5)
    elif event == "lr":
        group["lr"] *= 0.5
    if event == "betas" and "betas" in group:
        group["betas"] = (0.5, group["betas"][1])


def reference(name: str, events: list[str], world_size: int, warmup: int = WARMUP) -> list:
    """Losses of rank 0, and the weights and momenta at the end, of a loop in one process."""
    model = small_model()
    optimizer = optimizer_of(name, model)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    everyone = [batches(rank, len(events), world_size) for rank in range(world_size)]
    losses, due = [], None
    for number, event in enumerate(events):
        total = [torch.zeros_like(p) for p in parameters]
        for rank in range(world_size):
            loss = model(everyone[rank][number]).square().sum()
            if rank == 0:
                losses.append(loss.item())
            for held, gradient in zip(total, torch.autograd.grad(loss, parameters)):
                # As the engine divides: on three ranks the digits of a quotient would be others.
                held.add_(gradient * (1 / world_size))
        if event == "clamp":
            total = [gradient.clamp(-1e-3, 1e-3) for gradient in total]
        change_settings(event, optimizer)
        if event == "edit a weight":
            with torch.no_grad():
                model[0][0].weight.mul_(0.5)
        if event == "skip":
            continue
        if due is not None:
            apply(optimizer, parameters, *due)
        of_now = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        due = (total, of_now)
        if warmup > 0:
            apply(optimizer, parameters, *due)
            due, warmup = None, warmup - 1
    return [*losses, *(p.detach() for p in model.parameters())]


def apply(optimizer, parameters, gradients, settings_then) -> None:
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    now = [dict(group) for group in optimizer.param_groups]
    for group, then in zip(optimizer.param_groups, settings_then):
        group.update(then)
    optimizer.step()
    for group, saved in zip(optimizer.param_groups, now):
        group.update(saved)


def delayed(rank: int, name: str, stage: int, events: list[str], *, first: int = 0, folder: Path | None = None, **more):
    """Losses, and weights at the end; from the step `first` on, out of a checkpoint."""
    model = small_model()
    if first:
        model.load_state_dict(torch.load(folder / f"weights-{rank}.pt", weights_only=True))
    optimizer = optimizer_of(name, model)
    engine = ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "5KiB", "offload": DELAYED | more})
    if first:
        load_engine(engine, folder / ZERO_FOLDER)
    losses = []
    for batch, event in list(zip(batches(rank, len(events), engine.groups.world_size), events))[first:]:
        loss = model(batch).square().sum()
        loss.backward()
        losses.append(loss.item())
        if event == "clamp":
            engine.clip_grad_value_(1e-3)
        change_settings(event, optimizer)
        if event == "edit a weight":
            with engine.gathered(model[0], writeback=True), torch.no_grad():
                model[0][0].weight.mul_(0.5)
        if event != "skip":
            optimizer.step()
        optimizer.zero_grad()
    with engine.gathered(model):
        return [*losses, *(p.detach().clone() for p in model.parameters())], model, engine


def same(ours: list, theirs: list) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(ours, theirs)
    )


PLACES = ({}, {"optimizer": "nvme"}, {"params": "nvme"}, {"optimizer": "nvme", "params": "nvme"})


@examples(30)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    stage=st.integers(0, 3),
    events=st.lists(st.sampled_from(EVENTS), min_size=1, max_size=9),
    place=st.sampled_from(PLACES),
)
def test_one_rank_trains_as_the_loop_that_applies_updates_one_step_late(name, stage, events, place):
    with TemporaryDirectory() as path:
        in_files = place | {"nvme_path": path} if place else {}
        found, _, engine = delayed(0, name, 3 if "params" in place else stage, events, **in_files)
        assert same(found, reference(name, events, 1))
        engine.close()


def on_several_ranks(rank: int, world_size: int, path: str, names: list[str]) -> list[tuple[str, bool]]:
    draw, found = random.Random(0), []
    for turn, name in enumerate(names):
        events = [draw.choice(EVENTS) for _ in range(8)] + ["lr", "betas", "nothing"]
        more = {"optimizer": "nvme", "nvme_path": path} if turn % 2 else {}
        ours, *_ = delayed(rank, name, turn % 4, events, **more)
        expected = reference(name, events, world_size)
        found.append(
            (f"{name}, {events}", same(ours[rank > 0 and len(events) :], expected[rank > 0 and len(events) :]))
        )
        # Due gradients go with a checkpoint, to another stage.
        folder = Path(path) / name
        cut = len(events) - 3
        _, _, engine = delayed(rank, name, turn % 4, events[:cut], **more)
        folder.mkdir(parents=True, exist_ok=True)
        weights = engine.whole_state_dict(wanted=True)
        torch.save(weights, folder / f"weights-{rank}.pt")
        seal_state(engine, folder, write_state(engine, folder / ZERO_FOLDER))
        resumed, *_ = delayed(rank, name, (turn + 2) % 4, events, first=cut, folder=folder, **more)
        found.append((f"{name}, resumed", same(resumed, ours[cut:])))
    return found


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(2, list(OPTIMIZERS)[::2]), slow(2, list(OPTIMIZERS)), slow(3, list(OPTIMIZERS))],
    ids=["2-some", "2-every", "3-every"],
)
def test_several_ranks_do_too_and_resume_what_was_due_at_another_stage(world_size, names, tmp_path):
    arguments = {"path": str(tmp_path), "names": names}
    for found in run_ranks(on_several_ranks, world_size=world_size, time_limit_s=150, keyword_arguments=arguments):
        assert len(found) == 2 * len(names)
        for what, is_same in found:
            assert is_same, what


def resumed_after(cut: int, name: str, events: list[str], folder: Path) -> tuple[list, list]:
    """What a run sees from the step `cut` on that goes on from a checkpoint made there, and what one does that just goes on."""
    whole, *_ = delayed(0, name, 2, events)
    _, _, engine = delayed(0, name, 2, events[:cut])
    torch.save(engine.whole_state_dict(wanted=True), folder / "weights-0.pt")
    seal_state(engine, folder, write_state(engine, folder / ZERO_FOLDER))
    resumed, *_ = delayed(0, name, 3, events, first=cut, folder=folder)
    return resumed, whole[cut:]


@pytest.mark.parametrize("cut", range(1, WARMUP + 1))
def test_a_warmup_goes_on_where_the_checkpoint_has_left_it(cut, tmp_path):
    resumed, uninterrupted = resumed_after(cut, "adamw", ["nothing"] * (WARMUP + 4), tmp_path)
    assert same(resumed, uninterrupted)


def test_a_learning_rate_in_a_tensor_is_that_of_the_steps_own_call_also_when_resumed(tmp_path, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "tensor lr", lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2)))
    events = ["lr"] * (WARMUP + 4)
    assert same(delayed(0, "tensor lr", 2, events)[0], reference("tensor lr", events, 1))
    resumed, uninterrupted = resumed_after(WARMUP + 2, "tensor lr", events, tmp_path)
    assert same(resumed, uninterrupted)


def state_saved_by(engine: ZeroEngine) -> list:
    rows = {(row.kind, row.name, row.interval): row.tensor.clone() for row in engine.state.rows()}
    return [*rows.items(), *engine.state.scalars().items()]


def test_a_checkpoint_made_before_the_next_step_holds_what_the_one_before_it_held(tmp_path):
    events = ["lr"] * (WARMUP + 2)
    _, _, engine = delayed(0, "adamw", 2, events)
    torch.save(engine.whole_state_dict(wanted=True), tmp_path / "weights-0.pt")
    seal_state(engine, tmp_path, write_state(engine, tmp_path / ZERO_FOLDER))
    _, _, resumed = delayed(0, "adamw", 2, events, first=len(events), folder=tmp_path)
    before, after = state_saved_by(engine), state_saved_by(resumed)
    assert [key for key, _ in before] == [key for key, _ in after]
    assert same([value for _, value in before], [value for _, value in after])


def test_a_delayed_run_is_another_one_and_its_checkpoint_says_so_to_a_run_without(tmp_path, capsys):
    events = ["nothing"] * 6
    ours, _, engine = delayed(0, "adamw", 2, events)
    exact = reference("adamw", events, 1, warmup=len(events))
    assert ours[: WARMUP + 1] == exact[: WARMUP + 1], "the warm-up is in time"
    assert ours[WARMUP + 1] != exact[WARMUP + 1]
    assert "copies of the state" in engine.memory_report().table()
    announce(engine, "nobody")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "one step late, after 3 in their time: not exact" in said
    seal_state(engine, tmp_path, write_state(engine, tmp_path / ZERO_FOLDER))
    model = small_model()
    in_time = ZeroEngine(model, [optimizer_of("adamw", model)], 2)
    with pytest.warns(UserWarning, match="gradients of its last step, which were due, are dropped"):
        load_engine(in_time, tmp_path / ZERO_FOLDER)
    assert {row.kind for row in in_time.state.rows()} == {"exp_avg", "exp_avg_sq"}


def test_an_optimizer_that_cannot_be_stepped_beside_training_is_refused():
    model = small_model()
    optimizer = torch.optim.Adafactor(model.parameters())
    with pytest.raises(ValueError, match=r"`offload.delay: 1` steps a bucket at a time.*Adafactor"):
        ZeroEngine(model, [optimizer], {"stage": 2, "offload": DELAYED})
