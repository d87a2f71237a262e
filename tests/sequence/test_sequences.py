"""Sequences that several ranks compute together train as on one rank with the whole sequence."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import ParallelismConfig
from sequence_runs import (
    CAUSAL,
    KINDS,
    SequenceJob,
    batches,
    furthest,
    loop_with_accelerate,
    model_of,
    train_each_sequence,
    train_sequence,
    train_with_trainer,
)
from shared_ranks import four_ranks, on_shared_ranks, run_on_ranks, shared_ranks
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    RobertaConfig,
    T5Config,
)

from hf_zero import ZeroEngine, ZeroPlugin
from hf_zero.config import ConfigError
from hf_zero.engine.split_model import DifferentBatchesError
from hf_zero.planner.batches import exchanged_bytes
from hf_zero.planner.trace import trace
from hf_zero.sequence.parallel import enable_sequence_parallel, refuse_model, sequence_parallel_of

LAYOUTS = {kind: ("plain", "padded", "packed") if kind in CAUSAL else ("plain", "padded") for kind in KINDS}
LIMIT = 1e-6


def assert_as_on_one_rank(jobs: list[SequenceJob], ranks: Any, size: int) -> None:
    for job, ours in zip(jobs, ranks.run(train_each_sequence, jobs=[replace(job, size=size) for job in jobs])[0]):
        theirs = train_sequence(0, 1, job)
        assert len(set(theirs.losses)) == len(theirs.losses)
        found = furthest(ours, theirs)
        assert max(found.values()) < LIMIT, (job, found)


def test_losses_and_gradients_are_one_ranks():
    # Uneven labels: in the first half of a row, and so on the first rank, few tokens have one, or none.
    assert_as_on_one_rank(
        [
            SequenceJob(kind="llama", layout="packed", settings={"stage": 3}, trained=0.2),
            SequenceJob(kind="bert", layout="padded", tokens=23, trained=0.0, accumulation=2, settings={"stage": 1}),
            SequenceJob(kind="gpt2", checkpoints=True, kernel="eager", settings={"stage": 0}, max_norm=0.1),
        ],
        shared_ranks,
        2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_ten_steps_of_each_family_are_one_ranks(kind, size):
    """Two ranks train in every way; four ranks train in two of the ways, which neighboring families share out."""
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("plain", "sdpa", {"checkpoints": True}),
        ("padded", "eager", {"accumulation": 2}),
        (LAYOUTS[kind][-1], "sdpa", {"tokens": 22, "accumulation": 2, "max_norm": 0.05}),
        (LAYOUTS[kind][-1], "sdpa", {"checkpoints": "reentrant", "trained": 0.2}),
    ]
    common = {"kind": kind, "steps": 10, "trained": 0.3, "learning_rate": 0.01}
    jobs = [
        SequenceJob(**common | more, layout=layout, kernel=kernel, settings={"stage": stage})
        for stage, (layout, kernel, more) in enumerate(ways)
        if size == 2 or stage % 2 == list(KINDS).index(kind) % 2
    ]
    assert_as_on_one_rank(jobs, shared_ranks if size == 2 else four_ranks, size)


@pytest.mark.slow
def test_layers_and_sequences_split_over_two_ranks_each_are_one_ranks():
    jobs = [
        SequenceJob(kind="llama", tp=2, layout="packed", settings={"stage": 3}, trained=0.2, checkpoints=True),
        SequenceJob(
            kind="mistral", tp=2, layout="padded", tokens=23, accumulation=2, settings={"stage": 1}, max_norm=0.1
        ),
    ]
    for job, ours in zip(jobs, four_ranks.run(train_each_sequence, jobs=[replace(job, size=2) for job in jobs])[0]):
        found = furthest(ours, train_sequence(0, 1, replace(job, tp=1)))
        assert max(found.values()) < LIMIT, (job, found)


@pytest.mark.slow
def test_two_sequences_on_four_ranks_are_two_data_parallel_ranks():
    jobs = [
        SequenceJob(kind=kind, trained=0.3, layout="padded", settings={"stage": stage}, accumulation=2)
        for kind, stage in (("llama", 3), ("bert", 2))
    ]
    ours = four_ranks.run(train_each_sequence, jobs=[replace(job, size=2) for job in jobs])[0]
    for mine, theirs in zip(ours, shared_ranks.run(train_each_sequence, jobs=jobs)[0]):
        assert max(furthest(mine, theirs).values()) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(
    "offload", [{"optimizer": "cpu"}, {"params": "cpu", "optimizer": "cpu"}, {"activations": "cpu"}]
)
def test_offloaded_state_and_activations_are_one_ranks(offload):
    stage = 3 if "params" in offload else 2
    assert_as_on_one_rank(
        [SequenceJob(settings={"stage": stage, "offload": offload}, checkpoints=True)], shared_ranks, 2
    )


def test_a_layer_exchanges_heads_eight_times_a_step_and_no_more_bytes_than_its_tensors_have():
    job = SequenceJob(kind="qwen3", size=2, steps=1)
    [ours, _] = shared_ranks.run(train_sequence, job=job)
    config = KINDS["qwen3"][1]
    calls, sent = ours.rows["all-to-all of heads"]
    assert calls == config.num_hidden_layers * 4 * 2
    # Queries and what they attended to, and one head of keys and of values, doubled for two ranks.
    heads = 2 * config.num_attention_heads + 2 * 2
    numel = job.rows * job.tokens // 2 * heads * config.head_dim
    assert sent == config.num_hidden_layers * 2 * numel * 4 // 2
    assert sent == 2 * exchanged_bytes(model_of(job), job.rows * job.tokens // 2, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_accelerates_loop_evaluates_whole_and_generates_as_on_one_rank(tp):
    job = SequenceJob(kind="llama", trained=0.3, accumulation=2, steps=2, tokens=23, settings={"stage": 3})
    ours, *_, other = run_on_ranks(loop_with_accelerate, world_size=2 * tp, job=replace(job, size=2, tp=tp))
    [theirs] = run_on_ranks(loop_with_accelerate, world_size=1, job=job)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=LIMIT)
    assert ours["evaluated"] == pytest.approx(theirs["evaluated"], rel=LIMIT) == other["evaluated"]
    assert ours["logits"].shape == theirs["logits"].shape
    assert np.abs(ours["logits"] - theirs["logits"]).max() < 1e-5
    assert ours["made"] == other["made"] == theirs["made"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_compiled_model_trains_evaluates_and_generates_as_an_uncompiled_one(stage):
    job = SequenceJob(kind="gpt2", trained=0.3, steps=3, size=2, settings={"stage": stage})
    ours, _ = run_on_ranks(loop_with_accelerate, job=job, backend="aot_eager")
    theirs, _ = run_on_ranks(loop_with_accelerate, job=job)
    assert ours["losses"] == theirs["losses"] and ours["evaluated"] == theirs["evaluated"]
    assert np.array_equal(ours["logits"], theirs["logits"]) and ours["made"] == theirs["made"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        SequenceJob(kind="llama", trained=0.1, accumulation=2, tokens=23, settings={"stage": 3}),
        SequenceJob(kind="gpt2", layout="padded", settings={"stage": 2}),
        SequenceJob(kind="modernbert", layout="padded", trained=0.3, settings={"stage": 1}),
        SequenceJob(kind="llama", tp=2, layout="packed", trained=0.3, settings={"stage": 3}),
    ],
)
def test_trainer_logs_and_evaluates_as_on_one_rank(job, tmp_path):
    overrides = {"folder": str(tmp_path), "include_num_input_tokens_seen": "all"}
    ours = run_on_ranks(train_with_trainer, world_size=2 * job.tp, job=replace(job, size=2), **overrides)[0]
    theirs = run_on_ranks(train_with_trainer, world_size=1, job=replace(job, tp=1), **overrides)[0]
    assert np.array(ours["logs"]) == pytest.approx(np.array(theirs["logs"]), rel=1e-4)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["accuracy"] == pytest.approx(theirs["accuracy"])


@pytest.mark.parametrize(
    ("make", "config", "why"),
    [
        (AutoModelForSequenceClassification, BertConfig(), "has no loss for each token"),
        (AutoModelForSeq2SeqLM, T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1), "has an encoder and a decoder"),
        (AutoModelForCausalLM, LlamaConfig(num_attention_heads=3, hidden_size=12), "has 3 attention heads"),
        (AutoModelForMaskedLM, RobertaConfig(), "counts positions from the padding"),
        (AutoModelForCausalLM, OPTConfig(num_hidden_layers=1), "counts positions from the padding"),
        (AutoModelForCausalLM, GPT2Config(add_cross_attention=True), "has an encoder and a decoder"),
        (AutoModelForCausalLM, MixtralConfig(output_router_logits=True), "has a loss over its routers"),
        (AutoModelForCausalLM, JambaConfig(), "which need the tokens of other ranks"),
        (AutoModelForCausalLM, LlamaConfig(attn_implementation="flex_attention"), "attends with flex_attention"),
    ],
)
def test_models_that_a_sequence_cannot_be_cut_in_are_refused_by_name(make, config, why):
    with torch.device("meta"):
        model = make.from_config(copy.deepcopy(config))
    with pytest.raises(ConfigError, match=f"sp_size is 2, and {type(model).__name__} .*{why}"):
        refuse_model(model, 2)


def _in_parallel(rank: int, size: int = 2, **settings: Any) -> tuple[Any, ZeroEngine]:
    model = model_of(SequenceJob())
    engine = ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {"stage": 2, **settings})
    enable_sequence_parallel(engine, size)
    return model, engine


@on_shared_ranks
def test_a_sequences_ranks_must_have_the_same_batch(rank, world_size):
    model, engine = _in_parallel(rank)
    ids = torch.randint(9, (1, 8), generator=torch.Generator().manual_seed(rank))
    with pytest.raises(DifferentBatchesError, match="ranks 0 and 1 share a sequence"):
        model(input_ids=ids, labels=ids)
    engine.close()


@on_shared_ranks
def test_forwards_that_a_part_cannot_give_are_refused(rank, world_size):
    model, engine = _in_parallel(rank)
    ids = torch.zeros(1, 8, dtype=torch.long)
    for asked in ({"use_cache": True}, {"logits_to_keep": 2}, {"output_attentions": True}):
        with pytest.raises(ValueError, match=f"has {next(iter(asked))}"):
            model(input_ids=ids, labels=ids, **asked)
    with pytest.raises(ValueError, match="does not know how to cut the argument 'tags'"):
        model(input_ids=ids, tags=ids)
    with pytest.raises(ValueError, match="attention_mask has 4 dimensions"):
        model(input_ids=ids, attention_mask=torch.ones(1, 1, 8, 8))
    engine.close()


@on_shared_ranks
def test_settings_that_do_not_go_with_sequences_are_refused(rank, world_size):
    for size, settings, why in ((3, {}, "does not divide the 2 ranks"), (2, {"out_of_memory": "halve"}, "halve")):
        with pytest.raises(ConfigError, match=why):
            _in_parallel(rank, size, **settings)


@on_shared_ranks
def test_a_model_without_its_engine_and_a_copy_have_whole_sequences(rank, world_size):
    model, engine = _in_parallel(rank)
    job = SequenceJob(steps=1)
    [[batch]] = batches(job, 0, 1)
    cut = model(**batch)
    assert cut.logits.shape[1] == job.tokens // 2
    twin = copy.deepcopy(model)
    assert sequence_parallel_of(twin) is None
    whole = twin(**batch)
    assert whole.logits.shape[1] == job.tokens
    assert whole.loss.item() == pytest.approx(cut.loss.item(), rel=LIMIT)
    engine.close()
    assert model(**batch).loss.item() == whole.loss.item()
    assert "hf_zero" not in str(model.config.to_dict())


@on_shared_ranks
def test_outputs_without_labels_are_whole_and_their_gradients_are_one_ranks(rank, world_size):
    job = SequenceJob(steps=1, tokens=23)
    [[batch]] = batches(job, 0, 1)
    ids = batch["input_ids"]
    alone = model_of(job)
    loss = alone(input_ids=ids, output_hidden_states=True).logits.square().mean()
    loss.backward()
    model, engine = _in_parallel(rank)
    seen = model(input_ids=ids, output_hidden_states=True)
    assert seen.logits.shape[1] == seen.hidden_states[-1].shape[1] == 23
    seen.logits.square().mean().backward()
    for mine, theirs in zip(model.parameters(), alone.parameters()):
        assert (engine.full_grad(mine) - theirs.grad).abs().max() <= LIMIT * max(1.0, theirs.grad.abs().max())
    engine.close()


def _saved_bytes(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of activations and logits that a training forward keeps for backward."""
    of_parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    return sum(kept.values())


@on_shared_ranks
def test_a_rank_of_two_keeps_half_of_the_activations_and_logits(rank, world_size):
    job = SequenceJob(steps=1, rows=1, tokens=512)
    [[batch]] = batches(job, 0, 1)
    whole = _saved_bytes(model_of(job), batch)
    model, engine = _in_parallel(rank)
    saved = _saved_bytes(model, batch)
    assert saved <= 0.55 * whole
    planned = [trace(model_of(job), batch, shape="", tokens=512 // size, sp_size=size).saved_bytes for size in (1, 2)]
    assert planned[1] / planned[0] == pytest.approx(saved / whole, abs=0.03)
    engine.close()


def test_a_plugin_takes_sizes_that_go_together():
    assert repr(ZeroPlugin(2, sp_size=4)) == "ZeroPlugin(stage=2, sp_size=4)"
    assert ZeroPlugin(2).sp_size == 1
    assert repr(ZeroPlugin(2, sp_size=2, tp_size=2)) == "ZeroPlugin(stage=2, tp_size=2, sp_size=2)"
    plugin = ZeroPlugin(2)
    assert plugin.take_sequences_of(ParallelismConfig(sp_size=2, tp_size=2))
    assert repr(plugin) == "ZeroPlugin(stage=2, tp_size=2, sp_size=2)"
    with pytest.raises(ConfigError, match="allowed: an integer of at least 1"):
        ZeroPlugin(2, sp_size=0)


def test_the_launch_says_how_many_ranks_a_sequence_has(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    # accelerate counts the other ranks so.
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert ZeroPlugin(3).sp_size == 2
    assert ZeroPlugin(3, sp_size=1).sp_size == 1
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(ConfigError, match="attention for context parallelism"):
        ZeroPlugin(3)
