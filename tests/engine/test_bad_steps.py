"""`nonfinite: skip`: what is left out leaves no trace, on all ranks."""

import copy

import numpy as np
import pytest
import torch
from cells import slow
from ranks import run_ranks
from shared_ranks import on_ranks
from torch.utils.checkpoint import checkpoint
from training import bert, bert_batch, gpt2, gpt2_batch

from hf_zero.config import ConfigError, ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.step.nonfinite import NonFiniteGradientError

pytestmark = pytest.mark.timeout(180)


class Poisoned:
    """A GPT-2 in training whose loss is NaN for some batches on the last rank."""

    def __init__(self, rank: int, world_size: int, settings: dict, optimizer=torch.optim.AdamW):
        torch.manual_seed(0)
        self.model = gpt2(layers=1)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)
        self.engine = ZeroEngine(self.model, [self.optimizer], settings)
        self._rank, self._is_last = rank, rank == world_size - 1

    def step(self, number: int, *, is_bad: bool = False, accumulation: int = 1, clips: bool = True) -> None:
        for micro in range(accumulation):
            batch = gpt2_batch(torch.Generator().manual_seed(100 * number + 10 * micro + self._rank), 2)
            loss = self.model(**batch).loss
            (loss * float("nan") if is_bad and self._is_last and micro == 0 else loss).backward()
        if clips:
            self.engine.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, np.ndarray]:
        with self.engine.gathered():
            weights = {name: p.detach().float().numpy().copy() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for kind, value in self.engine.full_state(parameter).items():
                weights[f"{name} {kind}"] = torch.as_tensor(value).float().numpy()
        return weights


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not np.array_equal(one[name], other[name])]
    assert not different, different


def skip_is_as_without(rank: int, world_size: int, variants: list[dict], **step: object) -> list[int]:
    """Steps skipped of each variant, which ends as without their batches."""
    skipped = []
    for settings in variants:
        with_bad, without = (
            Poisoned(rank, world_size, {"nonfinite": policy, **settings}) for policy in ("skip", "stop")
        )
        for number in range(4):
            is_bad = number in (1, 2)
            with_bad.step(number, is_bad=is_bad, **step)
            assert with_bad.engine.bad_steps.was_skipped == is_bad, settings
            if not is_bad:
                without.step(number, **step)
        skipped.append(with_bad.engine.bad_steps.skipped)
        assert_same(with_bad.weights(), without.weights())
    return skipped


VARIANTS = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 2, "moments": "8bit"},
    {"stage": 2, "kernels": "always"},
    {"stage": 1, "offload": {"optimizer": "cpu"}},
    {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
    {"stage": 2, "param_dtype": "bfloat16"},
]


@pytest.mark.short_cells("2-True-variants0")
@pytest.mark.parametrize(
    "world_size, clips, variants",
    [
        (2, True, VARIANTS[::2]),
        (2, False, VARIANTS[1::2]),
        slow(1, False, VARIANTS[4:]),
        slow(2, True, VARIANTS[1::2]),
    ],
)
def test_a_skipped_step_leaves_the_run_as_without_its_batch(world_size, clips, variants):
    arguments = {"variants": variants, "clips": clips}
    skipped = run_ranks(skip_is_as_without, world_size=world_size, time_limit_s=150, keyword_arguments=arguments)
    assert skipped == [[2] * len(variants)] * world_size


@pytest.mark.slow
@on_ranks(2)
def test_steps_elsewhere_and_accumulated_ones_are_skipped_too(rank, world_size, tmp_path):
    folder = str(tmp_path)
    files = {"optimizer": "nvme", "nvme_path": folder}
    elsewhere = [{"stage": 2, "offload": files}, {"stage": 2, "offload": {"optimizer": "cpu"}}]
    assert skip_is_as_without(rank, world_size, elsewhere) == [2, 2]
    assert skip_is_as_without(rank, world_size, [{"stage": 2}, {"stage": 1}], accumulation=2) == [2, 2]


@on_ranks(2)
def test_all_optimizers_skip_together(rank, world_size):
    torch.manual_seed(0)
    model = bert()
    named = dict(model.named_parameters())
    heads = [p for name, p in named.items() if "classifier" in name]
    others = [p for name, p in named.items() if "classifier" not in name]
    optimizers = [torch.optim.SGD(others, lr=0.1), torch.optim.AdamW(heads, lr=0.1)]
    engine = ZeroEngine(model, optimizers, {"stage": 2, "nonfinite": "skip"})
    before = {name: p.detach().clone() for name, p in named.items()}
    for number in range(3):
        # Only the first optimizer's gradients are bad.
        loss = model(**bert_batch(torch.Generator().manual_seed(number), 2)).loss
        handle = model.bert.embeddings.word_embeddings.weight.register_hook(lambda g: g * float("inf"))
        loss.backward()
        handle.remove()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    engine.finish_parameters()
    assert engine.bad_steps.skipped == 3
    assert all(torch.equal(p, before[name]) for name, p in named.items())


class Counting(torch.optim.SGD):
    """Keeps a count in its groups, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_what_an_optimizer_counts_in_its_groups_is_not_counted_in_a_skipped_step():
    run = Poisoned(0, 1, {"stage": 1, "nonfinite": "skip"}, Counting)
    for number in range(4):
        run.step(number, is_bad=number == 2)
    assert run.optimizer.param_groups[0]["count"] == 3 and run.optimizer.param_groups[0]["params"]


@on_ranks(2)
def test_the_gradients_of_a_skipped_step_are_dropped_where_the_script_zeroes_none(rank, world_size):
    for stage in range(4):
        run = Poisoned(rank, world_size, {"stage": stage, "nonfinite": "skip"})
        run.optimizer.zero_grad = lambda: None
        run.step(0, is_bad=True, clips=False)
        assert run.engine.bad_steps.skipped == 1
        assert all(row.grad is None for group in run.optimizer.param_groups for row in group["params"])


def named_by_all(rank: int, world_size: int, policy: str) -> str:
    run = Poisoned(rank, world_size, {"stage": 2, "nonfinite": policy})
    run.step(0)
    with pytest.raises(NonFiniteGradientError) as error:
        for number in range(1, 16):
            batch = gpt2_batch(torch.Generator().manual_seed(number), 2)
            hidden = run.model.transformer.h[0].register_full_backward_hook(
                lambda module, into, out: tuple(None if g is None else g * float("nan") for g in into)
            )
            run.model(**batch).loss.backward()
            hidden.remove()
            run.optimizer.step()
            run.optimizer.zero_grad()
    return str(error.value)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_the_end_of_a_run_names_the_first_parameter_and_the_step(policy):
    first, second = run_ranks(named_by_all, world_size=2, time_limit_s=60, keyword_arguments={"policy": policy})
    assert first == second
    assert "First bad gradients in backward: transformer.wpe.weight" in first and "in transformer.wpe" in first
    assert (
        "step 2 since" if policy == "stop" else "step 12 since"
    ) in first and "losses that the model returned in it are finite" in first
    assert policy == "stop" or "10 bad steps in a row" in first


def tells_batch(rank: int, world_size: int) -> str:
    run = Poisoned(rank, world_size, {"stage": 2})
    with pytest.raises(NonFiniteGradientError) as error:
        for micro in range(3):
            batch = gpt2_batch(torch.Generator().manual_seed(micro), 2)
            if rank == 1 and micro == 1:
                with torch.no_grad():
                    run.model.transformer.wte.weight.fill_(float("inf"))
            run.model(**batch).loss.backward()
        run.optimizer.step()
    return str(error.value)


def test_the_micro_batch_and_the_rank_of_a_loss_that_is_not_finite_are_named():
    for message in run_ranks(tells_batch, world_size=2, time_limit_s=60):
        assert "step 1 since the engine was built, micro-batch 2 of 3 on rank 1: its loss is nan" in message, message


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_of_a_saver_and_one_that_backward_repeats_are_no_further_micro_batches(use_reentrant):
    run = Poisoned(0, 1, {"stage": 2})

    def loss_of(batch: dict, _takes_gradients: torch.Tensor) -> torch.Tensor:
        return run.model(**batch).loss

    with pytest.raises(NonFiniteGradientError) as error:
        for micro in range(3):
            if micro == 1:
                with torch.no_grad():
                    run.model.transformer.wte.weight.fill_(float("inf"))
            batch = gpt2_batch(torch.Generator().manual_seed(micro), 2)
            with run.engine.whole_copies("a saver's look", wanted=True):
                run.model(**batch)
            checkpoint(loss_of, batch, torch.ones((), requires_grad=True), use_reentrant=use_reentrant).backward()
        run.optimizer.step()
    assert "micro-batch 2 of 3 on rank 0: its loss is nan" in str(error.value)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"nonfinite": "never"}, "allowed: stop, skip, ignore."),
        ({"nonfinite": "skip", "comm": {"sync_every": 4}}, "`comm.sync_every: 4`"),
    ],
)
def test_settings_that_contradict_each_other(settings, words):
    with pytest.raises(ConfigError) as error:
        ZeroConfig.from_dict(settings)
    assert words in str(error.value)


def test_an_engine_that_skips_is_copied_with_its_model():
    run = Poisoned(0, 1, {"stage": 2, "nonfinite": "skip"})
    run.step(0)
    assert copy.deepcopy(run.model) is not None
