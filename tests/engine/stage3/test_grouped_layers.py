"""Layers that are gathered together (`unit_bytes`): the same bits as layer by layer, in fewer and larger units."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cells import short_of, slow
from ddp_outcomes import assert_bitwise, assert_close, checkpoint_activations
from ranks import run_ranks
from torch import nn
from training import Answer, Job, bert, bert_batch, fused_adamw, gpt2, gpt2_batch
from transformers import T5Config, T5ForConditionalGeneration

from hf_zero.config import ConfigError, ZeroConfig
from hf_zero.engine.bucketing import find_unit_modules, group_layers, own_parameters
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(120)

VOCABULARY, LENGTH = 61, 8

ALL, PAIRS = "1MiB", "120KiB"  # a layer of the models here has 60 to 110 KiB
TOGETHER = {"stage": 3, "unit_bytes": ALL, "bucket_bytes": "20KiB"}
IN_PAIRS = {"stage": 3, "unit_bytes": PAIRS}


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 12, "num_heads": 4, "d_ff": 90, "num_layers": 3}
    return T5ForConditionalGeneration(
        T5Config(**sizes, num_decoder_layers=3, dropout_rate=0.0, decoder_start_token_id=0)
    )


def translations(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (2, size, LENGTH), generator=generator)
    return {"input_ids": ids[0], "labels": ids[1]}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(48, 150)
        self.narrow = nn.Linear(150, 48)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.narrow(torch.tanh(self.wide(hidden)))


class TwoStreams(nn.Module):
    """Goes through two lists of layers in turn, and leaves out the last layer of one of them on every other step."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 48)
        self.left = nn.ModuleList(Block() for _ in range(3))
        self.right = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(48, 3)
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        hidden = self.embed(input_ids)
        skipped = 2 if self.calls % 2 else 3
        self.calls += 1
        for index, (one, other) in enumerate(zip(self.left, self.right)):
            hidden = other(one(hidden)) if index != skipped else one(hidden)
        return Answer(nn.functional.cross_entropy(self.head(hidden.mean(1)), labels))


def classes(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(0, 3, (size,), generator=generator)}


JOBS = {
    "bert": Job(make_model=bert, make_batch=bert_batch, steps=3, max_norm=100.0),
    "gpt2": Job(make_model=gpt2, make_batch=gpt2_batch, steps=3, max_norm=100.0),
    "t5": Job(make_model=t5, make_batch=translations, steps=3, max_norm=100.0),
    "two streams": Job(make_model=TwoStreams, make_batch=classes, steps=4, find_unused=True),
}


@pytest.mark.parametrize("name", short_of(JOBS, ["gpt2", "t5", "two streams"]))
@pytest.mark.short_cells("gpt2", "two streams")
def test_trains_to_the_bits_of_ddp(name):
    assert_bitwise(JOBS[name], [TOGETHER, IN_PAIRS])


AHEAD_OR_KEPT = [{"prefetch_units": 0}, {"reshard_after_forward": False}, {"prefetch_units": 3}]


@pytest.mark.parametrize("others", [AHEAD_OR_KEPT[:2], slow(AHEAD_OR_KEPT)], ids=["some", "every"])
def test_whatever_is_gathered_ahead_or_kept_trains_to_the_bits_of_ddp(others):
    assert_bitwise(JOBS["t5"], [{**IN_PAIRS, **settings} for settings in others])


@pytest.mark.parametrize(
    ("name", "reentrant"), [slow("gpt2", False), ("t5", True), slow("gpt2", True), slow("t5", False)]
)
def test_recomputed_layers_train_to_the_bits_of_ddp(name, reentrant):
    checkpointing = partial(checkpoint_activations, reentrant=reentrant)
    assert_bitwise(replace(JOBS[name], prepare=checkpointing), [TOGETHER, IN_PAIRS])


def test_offloaded_parameters_train_to_the_bits_of_ddp():
    assert_bitwise(JOBS["gpt2"], [{**IN_PAIRS, "offload": {"params": "cpu", "optimizer": "cpu"}}])


@pytest.mark.slow
def test_accumulation_on_three_ranks_is_close():
    assert_close(replace(JOBS["bert"], accumulation=2, max_norm=0.3), [TOGETHER, IN_PAIRS], world_size=3)


def gathered_bytes(rank: int, world_size: int) -> dict[int | str, tuple[int, list[int], int]]:
    """Settings → the most that was gathered at a time, what each unit takes, and what was left after an evaluation."""
    found = {}
    for unit_bytes in (0, PAIRS, ALL):
        model = t5()
        optimizer = fused_adamw(model)
        engine = ZeroEngine(model, [optimizer], {"stage": 3, "unit_bytes": unit_bytes})
        for step in range(2):
            model(**translations(torch.Generator().manual_seed(step), 2)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(**translations(torch.Generator().manual_seed(3), 2))
        schedule = engine.sharded.schedule
        left = sum(unit.passing_bytes for unit in schedule.units if not unit.is_sharded)
        found[unit_bytes] = schedule.peak_bytes, [unit.passing_bytes for unit in schedule.units], left
    return found


def test_two_units_are_whole_at_a_time_and_none_after_an_evaluation():
    for found in run_ranks(gathered_bytes, world_size=2, time_limit_s=60):
        for peak, (root, *layers), left in found.values():
            assert peak <= root + sum(sorted(layers)[-2:])
            assert left == 0
        assert [len(units) for _, units, _ in found.values()] == [1 + 6, 1 + 4, 1 + 2]


def grouped(model: nn.Module, least_bytes: int) -> list[list[str]]:
    units = find_unit_modules(model, "auto")
    own = {name: [p for _, p in held] for name, held in own_parameters(model, units).items()}
    return group_layers(units, own, least_bytes)


def test_layers_of_one_list_and_class_are_joined_until_they_have_the_bytes():
    left, right = ([f"{side}.{index}" for index in range(3)] for side in ("left", "right"))
    layer = sum(p.nbytes for p in Block().parameters())
    assert grouped(TwoStreams(), 0) == [[name] for name in left + right]
    assert grouped(TwoStreams(), layer) == [[name] for name in left + right]
    assert grouped(TwoStreams(), layer + 1) == [left[:2], left[2:], right[:2], right[2:]]
    assert grouped(TwoStreams(), 10**9) == [left, right]


def test_layers_of_several_classes_are_not_joined():
    model = bert()
    assert [len(names) for names in grouped(model, 10**9)] == [1, 3]  # the embeddings, and the layers


def test_bytes_are_checked():
    assert ZeroConfig(stage=3, unit_bytes="16MiB").unit_bytes == 16 * 2**20
    assert ZeroConfig(stage=3, unit_bytes=0).unit_bytes == 0
    with pytest.raises(ConfigError, match=r"`unit_bytes`.*or 0"):
        ZeroConfig(stage=3, unit_bytes=-1)
