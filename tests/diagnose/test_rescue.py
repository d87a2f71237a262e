"""Micro-batches that run out of memory are taken again in parts: the same sums, on all ranks alike."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from cells import examples, short_of, slow
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from shared_ranks import on_ranks
from torch import nn
from trainer_job import as_launched, history, make_trainer
from training import VOCABULARY, gpt2, gpt2_batch

from hf_zero import Rescue
from hf_zero.config import ConfigError, ZeroConfig
from hf_zero.diagnose.rescue import cut, rows_of
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(180)

HALVE = {"out_of_memory": "halve"}


def runs_out(module: nn.Module, most_rows: int, *, when: str = "forward", here: bool = True) -> None:
    """Makes a module fail for batches of more rows, in forward or in backward, on a rank that it is `here` for."""

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def on_forward(_module, _args, output):
        tensor = output[0] if isinstance(output, tuple) else output
        if here and tensor.shape[0] > most_rows and torch.is_grad_enabled():
            if when == "forward":
                fail()
            tensor.register_hook(lambda gradient: fail())

    module.register_forward_hook(on_forward)


class Run:
    """A GPT-2 in training whose micro-batches go through a `Rescue`, or are taken in a number of parts by hand."""

    def __init__(self, rank: int, world_size: int, settings_: dict):
        torch.manual_seed(0)
        self.model = gpt2(layers=2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.engine = ZeroEngine(self.model, [self.optimizer], settings_)
        self.rescue = Rescue(self.engine) if settings_.get("out_of_memory") else None
        self._rank = rank

    def part(self, inputs: dict, weight: float) -> torch.Tensor:
        loss = self.model(**inputs).loss * weight
        loss.backward()
        return loss.detach()

    def step(self, number: int, rows: int, accumulation: int, parts: int = 1) -> float:
        total = 0.0
        for micro in range(accumulation):
            batch = gpt2_batch(torch.Generator().manual_seed(100 * number + 10 * micro + self._rank), rows)
            is_last = micro == accumulation - 1
            if self.rescue is not None:
                with self._context(is_last):
                    total += self.rescue.run(batch, self.part, ends_step=is_last).item()
                continue
            pieces = cut(batch, parts)
            loss = 0.0
            for place, piece in enumerate(pieces):
                with self._context(is_last and place == len(pieces) - 1):
                    loss = loss + self.part(*piece)
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _context(self, is_last: bool):
        return nullcontext() if is_last else self.engine.no_sync()

    def weights(self) -> dict[str, np.ndarray]:
        with self.engine.gathered():
            return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}


def rescued(rank: int, world_size: int, variants: list[dict], when: str, accumulation: int = 2) -> None:
    for variant in variants:
        saved = Run(rank, world_size, {**HALVE, **variant})
        by_hand, plain = Run(rank, world_size, variant), Run(rank, world_size, variant)
        # The last rank alone has too little memory, and only in the middle of the model.
        runs_out(saved.model.transformer.h[1], 2, when=when, here=rank == world_size - 1)
        # In the second step the batches are cut from the start.
        for number in range(2):
            mine = saved.step(number, 6, accumulation)
            # The first micro-batch fails, so that no loss of the step comes from a larger part.
            assert mine == by_hand.step(number, 6, accumulation, parts=4), variant
            assert mine == pytest.approx(plain.step(number, 6, accumulation), rel=1e-5), variant
        assert saved.rescue.parts == 4
        # Bit for bit those of the same parts taken by hand, and those of the whole batch to rounding.
        theirs, whole = by_hand.weights(), plain.weights()
        for name, values in saved.weights().items():
            assert np.array_equal(values, theirs[name]), (variant, name)
            np.testing.assert_allclose(values, whole[name], rtol=1e-4, atol=1e-6)


VARIANTS = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 2, "grad_accumulation": "local"}]


@pytest.mark.parametrize(
    ("when", "variants"),
    [("forward", VARIANTS[1:3]), slow("forward", [VARIANTS[0], VARIANTS[3]]), slow("backward", VARIANTS)],
    ids=["forward", "forward-others", "backward"],
)
def test_all_ranks_take_the_step_again_in_parts_when_one_runs_out(when, variants):
    arguments = {"variants": variants, "when": when}
    run_ranks(rescued, world_size=2, time_limit_s=120, keyword_arguments=arguments)


@pytest.mark.parametrize("when", short_of(["forward", "backward"], ["backward"]))
def test_one_rank_is_rescued(when):
    variants = [{"stage": 2}, {"stage": 2, "offload": {"optimizer": "cpu"}}]
    run_ranks(rescued, world_size=1, time_limit_s=90, keyword_arguments={"variants": variants, "when": when})


@pytest.mark.parametrize(
    "variants", [[VARIANTS[0], VARIANTS[3]], slow(VARIANTS[1:3])], ids=["whole and local", "sharded"]
)
@on_ranks(2)
def test_the_micro_batches_before_the_one_that_fails_are_taken_again_too(rank, world_size, variants):
    for variant in variants:
        saved, by_hand = Run(rank, world_size, {**HALVE, **variant}), Run(rank, world_size, variant)
        calls = []

        def fail_at_the_third(module, args, output, calls=calls):
            calls.append(module)
            if len(calls) == 3 and rank == 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        saved.model.transformer.h[0].register_forward_hook(fail_at_the_third)
        saved.step(0, 4, 3)
        by_hand.step(0, 4, 3, parts=2)
        theirs = by_hand.weights()
        assert all(np.array_equal(values, theirs[name]) for name, values in saved.weights().items()), variant


@on_ranks(2)
def test_a_rank_that_fails_before_its_forward_takes_part_in_the_broadcast_of_buffers(rank, world_size):
    saved, by_hand = Run(rank, world_size, {"stage": 2, **HALVE}), Run(rank, world_size, {"stage": 2})
    for run in (saved, by_hand):
        # All ranks have rank 0's from the forward on, in which the rank that fails takes no part.
        run.model.register_buffer("temperature", torch.ones(()))
    part = saved.part
    attempts = []

    def fails_once(inputs: dict, weight: float) -> torch.Tensor:
        attempts.append(inputs)
        if rank == 1 and len(attempts) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return part(inputs, weight)

    saved.part = fails_once
    for number, parts in enumerate((1, 2)):
        assert saved.step(number, 4, 1) == by_hand.step(number, 4, 1, parts=parts)


def ends_at_one_row(rank: int, world_size: int) -> str:
    run = Run(rank, world_size, {"stage": 2, **HALVE})
    runs_out(run.model.transformer.h[0], 0, here=rank == 1)
    with pytest.raises(torch.OutOfMemoryError) as error:
        run.step(0, 4, 1)
    return str(error.value)


def test_single_rows_that_do_not_fit_end_the_run_on_all_ranks():
    for message in run_ranks(ends_at_one_row, world_size=2, time_limit_s=60):
        assert "its parts are single rows already" in message and " out of memory." in message


def test_a_loop_that_does_not_use_it_is_told():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ZeroEngine(model, [optimizer], {"stage": 1, **HALVE})
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ConfigError, match="but this training loop runs them itself"):
        optimizer.step()


@examples(50)
@given(
    rows=st.integers(1, 9), parts=st.sampled_from([2, 4, 8]), hidden=st.lists(st.booleans(), min_size=36, max_size=36)
)
def test_parts_come_to_the_gradient_of_the_whole(rows, parts, hidden):
    torch.manual_seed(rows)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)).double()
    ids = torch.randint(0, VOCABULARY, (rows, 4))
    labels = ids.masked_fill(torch.tensor(hidden[: rows * 4]).view(rows, 4), -100)
    batch = {"input_ids": ids, "labels": labels, "scale": torch.tensor(2.0)}

    def gradient(pieces) -> torch.Tensor:
        model.zero_grad()
        for inputs, weight in pieces:
            logits, wanted = model(inputs["input_ids"]), inputs["labels"]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
            mean = loss * inputs["scale"] / max(1, int((wanted != -100).sum()))
            (mean * weight).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    pieces = cut(batch, parts)
    has_labels = bool((labels != -100).any())
    assert len(pieces) == parts and sum(weight for _, weight in pieces) == pytest.approx(float(has_labels))
    torch.testing.assert_close(gradient(pieces), gradient([(batch, 1.0)]), rtol=1e-9, atol=1e-12)


def test_what_can_be_cut():
    assert rows_of({"a": torch.zeros(4, 2), "b": [torch.zeros(4), torch.tensor(1.0)], "c": "text"}) == 4
    assert rows_of({"ids": torch.zeros(4, 2), "positions": torch.zeros(1, 2)}) == 4
    assert rows_of({"ids": torch.zeros(4, 2), "patches": torch.zeros(9, 2)}) is None
    assert rows_of(["text"]) is None


@pytest.mark.parametrize(
    ("settings", "other"),
    [("comm.gradients=int8", r"comm\.gradients: int8"), ("stage=3", "stage: 3"), ("stage=3,unit_bytes=0", "stage: 3")],
)
def test_halving_is_refused_where_ranks_could_not_drop_a_pass_together(settings, other):
    with pytest.raises(ConfigError, match=rf"out_of_memory: halve` cannot be combined with `{other}`"):
        ZeroConfig.of(f"out_of_memory=halve,{settings}")
    assert ZeroConfig.of("out_of_memory=halve,stage=auto").is_open


def with_and_without(rank: int, world_size: int, **arguments) -> tuple[dict, dict]:
    plain = through_trainer(rank, world_size, most_rows=None, **arguments)
    return plain, through_trainer(rank, world_size, most_rows=1, **arguments)


def through_trainer(
    rank: int, world_size: int, output_dir: str, most_rows: int | None, model: str, **overrides
) -> dict:
    as_launched(rank, world_size)
    door = "flag stage=2,out_of_memory=halve"
    trainer = make_trainer(door, model, output_dir, dropout=0.0, max_steps=4, warmup_steps=0, **overrides)
    if most_rows is not None:
        layers = trainer.model.bert.encoder.layer if model == "bert" else trainer.model.transformer.h
        runs_out(layers[1], most_rows, here=rank == world_size - 1)
    own = trainer.compute_loss = partial(trainer.compute_loss)
    trainer.train()
    assert vars(trainer)["compute_loss"] is own
    seen = {"parts": trainer._rescue.parts, "batch": trainer._train_batch_size, "steps": trainer.state.global_step}
    return history(trainer) | seen


@pytest.mark.short_cells("bert-overrides1")
@pytest.mark.parametrize(
    "model, overrides",
    [
        ("gpt2", {"gradient_accumulation_steps": 2}),
        ("bert", {}),
        ("gpt2", {"auto_find_batch_size": True}),
    ],
)
def test_trainer_keeps_its_losses_and_its_batch(model, overrides, tmp_path):
    arguments = {"output_dir": str(tmp_path), "model": model, **overrides}
    for plain, saved in run_ranks(with_and_without, world_size=2, time_limit_s=90, keyword_arguments=arguments):
        assert (plain["parts"], saved["parts"]) == (1, 4) and plain["batch"] == saved["batch"] == 4
        assert saved["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        assert saved["norms"] == pytest.approx(plain["norms"], rel=1e-3)
        assert saved["steps"] == 4
