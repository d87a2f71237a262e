"""Models prepared for evaluation at stage 3, frozen or not, are sharded, compute as the trained model, and get no gradients."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate_job import make_accelerator
from cells import slow
from safetensors.torch import load_file
from shared_ranks import on_ranks
from stage3_runs import no_unit_is_whole
from torch import nn
from trainer_job import as_launched
from training import bert, bert_batch, gpt2, gpt2_batch

from hf_zero import ZeroPlugin, engine_of


def made(make: Any = gpt2, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make(dropout=0.0).eval()


def batch_of(rank: int, make_batch: Any = gpt2_batch, seed: int = 0) -> dict[str, torch.Tensor]:
    return make_batch(torch.Generator().manual_seed(10 * seed + rank), 2)


@pytest.mark.parametrize(("settings", "precision"), [({}, "bf16"), ({"param_dtype": "bfloat16"}, "no"), slow({}, "no")])
@on_ranks(2)
def test_a_reference_is_sharded_and_has_the_bits_of_the_trained_model(rank, world_size, settings, precision):
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=3, **settings), mixed_precision=precision, cpu=True)
    policy, first, second, reward = made(), made(), made(), made(bert, seed=1)
    first.transformer.wte.weight.requires_grad_(False)
    asked = {id(model): [p.requires_grad for p in model.parameters()] for model in (first, second, reward)}
    whole = {id(model): sum(p.nbytes for p in model.parameters()) for model in (first, second, reward)}
    first = accelerator.prepare_model(first, evaluation_mode=True)
    policy, optimizer = accelerator.prepare(policy, torch.optim.AdamW(policy.parameters(), lr=1e-3))
    second, reward = (accelerator.prepare_model(model, evaluation_mode=True) for model in (second, reward))
    batch = batch_of(rank)
    ours = policy(**batch)
    with torch.no_grad():
        for reference in (first, second):
            theirs = reference(**batch)
            assert torch.equal(ours.logits.detach(), theirs.logits) and torch.equal(ours.loss.detach(), theirs.loss)
        reward(**batch_of(rank, bert_batch))
    for model in (first, second, reward):
        assert [p.requires_grad for p in model.parameters()] == asked[id(model)]
        engine = engine_of(model)
        assert engine.evaluates and no_unit_is_whole(engine)
        assert engine.sharded.frozen_bytes <= 0.55 * whole[id(model)]
    accelerator.backward(ours.loss)
    optimizer.step()
    assert all(p.grad is None for model in (first, second, reward) for p in model.parameters())


@on_ranks(2)
def test_a_model_for_evaluation_generates_and_is_saved_whole(rank, world_size, tmp_path):
    as_launched(rank, world_size)
    plain, accelerator = made(), make_accelerator("plugin 3", cpu=True)
    model = accelerator.prepare_model(made(), evaluation_mode=True)
    prompt = batch_of(rank)["input_ids"][:, :4]
    tokens = [each.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0) for each in (plain, model)]
    assert torch.equal(*tokens)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    accelerator.wait_for_everyone()
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in found.items())
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))


@on_ranks(2)
def test_a_loss_through_an_evaluated_model_reaches_its_inputs_and_no_parameter(rank, world_size):
    as_launched(rank, world_size)
    accelerator = make_accelerator("plugin 3", cpu=True)
    model, plain = accelerator.prepare_model(made(), evaluation_mode=True), made()
    for part in (lambda each: each, lambda each: each.transformer):
        gradients = []
        for each in (model, plain):
            hidden = torch.ones(1, 4, plain.config.n_embd).requires_grad_()
            part(each)(inputs_embeds=hidden)[0].sum().backward()
            gradients.append(hidden.grad)
        assert torch.equal(*gradients)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    model.train()
    with pytest.raises(RuntimeError, match="was prepared without its optimizer"):
        model(**batch_of(rank))
    assert all(p.requires_grad for p in model.parameters())
    model.requires_grad_(False)
    with torch.no_grad():
        model.eval()(**batch_of(rank))


def trained(rank: int, door: str, order: str = "") -> list[float]:
    """Losses of a model that is evaluated before or after it is prepared for training, as a whole or in part."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = make_accelerator(door, cpu=True)
    model = made()
    part = {"part first": model.transformer, "part last": model.transformer, "whole first": model}.get(order)
    if part is not None and order != "part last":
        accelerator.prepare_model(part, evaluation_mode=True)
        with torch.no_grad():
            part(input_ids=batch_of(rank)["input_ids"])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if order == "part last":
        accelerator.prepare_model(part, evaluation_mode=True)
    losses = []
    for step in range(3):
        with torch.no_grad():
            if part is not None:
                part(input_ids=batch_of(rank)["input_ids"])
        loss = model.train()(**batch_of(rank, seed=step)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_a_model_that_was_evaluated_is_trained_afterwards_with_ddps_losses(rank, world_size):
    as_launched(rank, world_size)
    expected = trained(rank, "ddp")
    for stage, order in ((3, "whole first"), (3, "part first"), (3, "part last"), (2, "part first")):
        assert trained(rank, f"plugin {stage}", order) == expected, (stage, order)


@on_ranks(2)
def test_the_reference_of_an_adapter_is_the_model_without(rank, world_size):
    peft = pytest.importorskip("peft")
    as_launched(rank, world_size)
    accelerator = Accelerator(parallelism_config=ZeroPlugin(stage=3), mixed_precision="bf16", cpu=True)
    reference = accelerator.prepare_model(made(), evaluation_mode=True)
    model = peft.get_peft_model(made(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    )
    accelerator.backward(model(**batch_of(rank)).loss)
    optimizer.step()
    with torch.no_grad(), accelerator.unwrap_model(model).disable_adapter():
        assert torch.equal(model(**batch_of(rank)).logits, reference(**batch_of(rank)).logits)
