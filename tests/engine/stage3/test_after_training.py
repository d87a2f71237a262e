"""Stages 1 to 3: what scripts do with a prepared model besides training it works, or is one paragraph that names the way out."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from ranks import run_ranks
from stage3_runs import SHARDED, Run, assert_equal, run_on_ranks
from torch import nn
from trainer_job import as_launched, make_trainer
from training import VOCABULARY, bert, gpt2, gpt2_batch
from transformers import TrainerCallback

import hf_zero
from hf_zero.buckets.sharded_parameter import ShardedParametersError
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(120)

# ---- evaluation in 16 bits ----


def evaluates_in_16_bits(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    settings = {"max_steps": 2, "bf16_full_eval": True, "dropout": 0.0}
    seen = []
    for door in ("flag 2", "flag stage=3,persist_below_numel=200"):
        trainer = make_trainer(door, "bert", Path(folder) / door[-3:], **settings)
        trainer.train()
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        seen.append(trainer.predict(trainer.eval_dataset))
        after = trainer.model.state_dict()
        assert_equal(after, before)
        assert {value.dtype for value in after.values() if value.is_floating_point()} == {torch.float32}
        trainer.train()
    ddp = make_trainer("ddp", "bert", Path(folder) / "ddp", **settings)
    ddp.train()
    expected = ddp.predict(ddp.eval_dataset)
    for found in seen:
        assert found.metrics["test_loss"] == expected.metrics["test_loss"]
        assert (found.predictions == expected.predictions).all()


def test_a_trainer_evaluates_in_bfloat16_as_under_ddp_and_its_model_stays_as_it_was(tmp_path):
    run_ranks(evaluates_in_16_bits, world_size=2, time_limit_s=110, keyword_arguments={"folder": str(tmp_path)})


# ---- a reference model that follows ----


class SyncsReference(TrainerCallback):
    """As TRL's callback for `sync_ref_model=True` does."""

    def __init__(self, reference: nn.Module):
        self.reference = reference

    @staticmethod
    def sync_target_model(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        for target, source in zip(target_model.parameters(), model.parameters(), strict=True):
            target.data.mul_(1.0 - alpha).add_(source.data, alpha=alpha)

    def on_step_end(self, args, state, control, model, **kwargs) -> None:
        self.sync_target_model(model, self.reference, 0.6)


def follows(rank: int, world_size: int, folder: str) -> None:
    as_launched(rank, world_size)
    references = []
    for door in ("flag 3", "ddp"):
        trainer = make_trainer(door, "bert", Path(folder) / door, max_steps=2, dropout=0.0)
        torch.manual_seed(1)
        reference = bert().requires_grad_(False)
        reference = trainer.accelerator.prepare_model(reference, evaluation_mode=True)
        trainer.add_callback(SyncsReference(reference))
        trainer.train()
        references.append(reference.state_dict())
    assert_equal(*references)


def test_a_reference_model_that_a_callback_syncs_is_ddps(tmp_path):
    run_ranks(follows, world_size=2, time_limit_s=110, keyword_arguments={"folder": str(tmp_path)})


# ---- adapters merged ----


def adapted(make: Callable[[], nn.Module] = gpt2) -> nn.Module:
    return get_peft_model(
        make(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    )


def merges(rank: int, world_size: int) -> None:
    ddp = Run(rank, adapted, None)
    ddp.step()
    expected = ddp.model.merge_and_unload().state_dict()
    for way in ("close", "gathered"):
        run = Run(rank, adapted, SHARDED)
        run.step()
        with pytest.raises(
            ShardedParametersError, match=r"needs the values of '.*c_attn.*hf_zero\.engine_of\(model\)\.close\(\)"
        ):
            run.model.merge_and_unload()
        if way == "close":
            hf_zero.engine_of(run.model).close()
            merged = run.model.merge_and_unload()
        else:
            with hf_zero.gathered(run.model, writeback=True):
                merged = run.model.merge_and_unload()
        assert_equal(merged.state_dict(), expected)


def test_merging_an_adapter_at_stage_3_names_the_ways_that_then_give_ddps_model():
    run_on_ranks(merges)


# ---- stages 1 and 2: a model that is changed after prepare ----


def cast(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def halve(model: nn.Module) -> nn.Module:
    return model.half()


def resize(model: nn.Module) -> nn.Module:
    model.resize_token_embeddings(VOCABULARY + 7, mean_resizing=False)
    return model


def merge(model: nn.Module) -> nn.Module:
    return model.merge_and_unload()


def merge_and_call_the_wrapper(model: nn.Module) -> nn.Module:
    model.merge_and_unload()
    return model


CHANGES = [
    (
        cast,
        gpt2,
        r"is torch\.bfloat16 and was torch\.float32, as after \.to\(\).*before accelerator\.prepare.*readopt\(\)",
    ),
    (
        halve,
        gpt2,
        r"is torch\.float16 and was torch\.float32, as after .*\.half\(\).*before accelerator\.prepare.*readopt\(\)",
    ),
    (
        resize,
        gpt2,
        r"'transformer\.wte\.weight' has shape .* as after resize_token_embeddings.*resize_embeddings\(num_tokens\)",
    ),
    (merge, adapted, r"as after merge_and_unload.*engine_of\(model\)\.close\(\).*a new optimizer"),
    (merge_and_call_the_wrapper, adapted, r"as after merge_and_unload.*engine_of\(model\)\.close\(\).*a new optimizer"),
]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("change", "make", "message"), CHANGES)
def test_a_model_changed_after_prepare_is_named_at_its_next_forward_and_still_evaluates(change, make, message, stage):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    engine = ZeroEngine(model, [optimizer], stage)
    batch = gpt2_batch(torch.Generator().manual_seed(0), 2)
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    changed = change(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            changed(**batch).loss.backward()
    with torch.no_grad():
        assert changed(**batch).loss.isfinite()
    assert engine.model is model


def test_a_model_that_was_cast_trains_on_once_it_is_readopted():
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], 2)
    batch = gpt2_batch(torch.Generator().manual_seed(0), 2)
    values = {name: value.clone() for name, value in cast(model).state_dict().items()}
    engine.readopt()
    assert all(torch.equal(p, values[name].float()) for name, p in model.named_parameters())
    model(**batch).loss.backward()
    optimizer.step()
