"""Saves that all ranks are in: what peft, a script's subclass or a hook saves of parts of the model inside them finds values."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate_job import make_accelerator
from peft import (
    LoraConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from shared_ranks import on_ranks
from told import tell, wait_until_told
from torch import nn
from trainer_job import as_launched, make_trainer
from training import bert, bert_batch, gpt2, gpt2_batch
from transformers import Trainer

from hf_zero import gathered
from hf_zero.comm.arrivals import CommunicationError
from hf_zero.config import CommConfig

pytestmark = pytest.mark.timeout(180)

SHARDED = "flag stage=3"


def with_classifier(model: nn.Module) -> nn.Module:
    """An adapter whose classifier is trained and saved whole."""
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(model, config)


def with_trained_tokens(model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["query"], trainable_token_indices=[3, 5]))


def with_prompt(model: nn.Module) -> nn.Module:
    return get_peft_model(model, PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))


def with_prompt_encoder(model: nn.Module) -> nn.Module:
    """What is saved of it is computed by a module of the model."""
    config = PromptEncoderConfig(task_type="SEQ_CLS", num_virtual_tokens=2, encoder_hidden_size=16)
    return get_peft_model(model, config)


class WithRoom:
    """Adapts a model that has room for virtual tokens in front of its texts."""

    def __init__(self, adapt: Callable[[nn.Module], nn.Module]):
        self._adapt = adapt

    def __call__(self, model: nn.Module) -> nn.Module:
        model.config.max_position_embeddings += 2
        torch.manual_seed(0)
        return self._adapt(type(model)(model.config))


@pytest.mark.parametrize(
    "adapts",
    [
        pytest.param([with_classifier], id="modules_to_save"),
        pytest.param([with_trained_tokens, with_prompt, with_prompt_encoder], id="others", marks=pytest.mark.slow),
    ],
)
@on_ranks(2, time_limit_s=150)
def test_a_trainers_checkpoint_of_an_adapter_is_ddps_at_stage_3(rank, world_size, tmp_path, adapts):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    for adapt in adapts:
        settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "dropout": 0.0, "logging_steps": 2}
        saved = []
        for name, door in (("ours", SHARDED), ("ddp", "ddp")):
            output_dir = Path(folder) / adapt.__name__ / name
            trainer = make_trainer(door, "bert", output_dir, adapt=WithRoom(adapt), **settings)
            trainer.train()
            trainer.save_model(str(output_dir / "end"))
            trainer.accelerator.wait_for_everyone()
            saved += [load_file(output_dir / last / "adapter_model.safetensors") for last in ("checkpoint-2", "end")]
        *others, expected = saved
        for found in others:
            assert found.keys() == expected.keys(), adapt.__name__
            assert all(torch.equal(found[name], expected[name]) for name in expected), adapt.__name__


# ---- subclasses of Trainer ----


class SavesParts(Trainer):
    """As trainers of sentence embeddings do: `_save` ignores the state dict that it is given."""

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        self.model.save_pretrained(output_dir)
        self.model.bert.save_pretrained(Path(output_dir) / "encoder")
        save_file(self.model.classifier.state_dict(), Path(output_dir) / "classifier.safetensors")
        norm = sum(p.detach().pow(2).sum() for p in self.model.classifier.parameters())
        save_file({"norm": norm.reshape(1)}, Path(output_dir) / "norm.safetensors")


class SavesByItself(Trainer):
    """Overrides what Trainer calls on every rank."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.model.bert.save_pretrained(Path(output_dir) / "encoder", is_main_process=self.args.should_save)
        if self.args.should_save:
            save_file(self.model.classifier.state_dict(), Path(output_dir) / "classifier.safetensors")


@on_ranks(2, time_limit_s=150)
def test_a_trainer_that_saves_parts_of_its_model_by_itself_finds_their_values(rank, world_size, tmp_path):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    for kind in (SavesParts, SavesByItself):
        for door in (SHARDED, "flag stage=2,comm.weights=int8"):
            output_dir = Path(folder) / kind.__name__ / door[-5:]
            settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "dropout": 0.0}
            trainer = make_trainer(door, "bert", output_dir, trainer_class=kind, **settings)
            trainer.train()
            (output_dir / "end").mkdir(exist_ok=True)
            trainer.save_model(str(output_dir / "end"))
            trainer.accelerator.wait_for_everyone()
            with gathered(trainer.model):
                expected = {name: value.clone() for name, value in trainer.model.state_dict().items()}
            for last in ("checkpoint-2", "end"):
                for file, prefix in (("encoder/model", "bert."), ("classifier", "classifier.")):
                    found = load_file(output_dir / last / f"{file}.safetensors")
                    wanted = {name: value for name, value in expected.items() if name.startswith(prefix)}
                    assert found.keys() == {name.removeprefix(prefix) for name in wanted}
                    assert all(torch.equal(found[name.removeprefix(prefix)], wanted[name]) for name in wanted)
            assert not any(p.device.type == "meta" for p in trainer.model.parameters())


# ---- plain loops ----


def with_a_step(accelerator: Accelerator, rank: int) -> nn.Module:
    """A prepared model whose adapter trains a classifier whole, behind one step."""
    torch.manual_seed(0)
    model = with_classifier(bert())
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    )
    model(**bert_batch(torch.Generator().manual_seed(rank), 2)).loss.backward()
    optimizer.step()
    return model


@on_ranks(2)
def test_savers_of_a_plain_loop_find_the_values_of_an_adapters_modules(rank, world_size, tmp_path):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    accelerator = make_accelerator("plugin stage=3")
    model = with_a_step(accelerator, rank)
    expected = get_peft_model_state_dict(model)

    def same(path: Path) -> None:
        accelerator.wait_for_everyone()
        found = load_file(path / "adapter_model.safetensors")
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)

    # As accelerate's documentation has it, and its variant on the main process alone.
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(Path(folder) / "alone", state_dict=state)
        part = get_peft_model_state_dict(accelerator.unwrap_model(model), state_dict=state)
        assert part.keys() == expected.keys() and all(torch.equal(part[name], expected[name]) for name in expected)
    same(Path(folder) / "alone")
    # On all ranks, of which the main one has the values.
    part = get_peft_model_state_dict(model, state_dict=state)
    assert part.keys() == (expected.keys() if accelerator.is_main_process else set())
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        Path(folder) / "documented",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    same(Path(folder) / "documented")
    model.save_pretrained(Path(folder) / "together", is_main_process=accelerator.is_main_process)
    same(Path(folder) / "together")

    def save_on_main(models, weights, output_dir) -> None:
        if accelerator.is_main_process:
            models[0].save_pretrained(Path(output_dir) / "hook_on_main")

    def save_on_all(models, weights, output_dir) -> None:
        models[0].save_pretrained(Path(output_dir) / "hook_on_all", is_main_process=accelerator.is_main_process)

    for hook in (save_on_main, save_on_all):
        accelerator.register_save_state_pre_hook(hook)
    state_dir = Path(accelerator.save_state(str(Path(folder) / "state")))
    for name in ("hook_on_main", "hook_on_all"):
        same(state_dir / name)
    accelerator.load_state(str(state_dir))
    now = get_peft_model_state_dict(model)
    assert all(torch.equal(now[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "door", ["plugin stage=2,comm.weights=int8", "plugin stage=1,comm.sync_every=2,comm.shard_group_size=1"]
)
@on_ranks(2)
def test_an_adapter_is_saved_by_the_documented_line_where_the_main_process_has_the_exact_weights(
    rank, world_size, door, tmp_path
):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    accelerator = make_accelerator(door)
    model = with_a_step(accelerator, rank)
    state = accelerator.get_state_dict(model)
    unwrapped = accelerator.unwrap_model(model)
    assert state.keys() == unwrapped.state_dict().keys()
    unwrapped.save_pretrained(folder, is_main_process=accelerator.is_main_process, state_dict=state)
    accelerator.wait_for_everyone()
    expected = get_peft_model_state_dict(unwrapped, state_dict=state)
    if accelerator.is_main_process:
        found = load_file(Path(folder) / "adapter_model.safetensors")
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(2)
def test_save_pretrained_on_one_rank_alone_is_named_and_leaves_no_folder(rank, world_size, tmp_path):
    folder = str(tmp_path)
    as_launched(rank, world_size)
    accelerator = make_accelerator("plugin stage=3")
    model = gpt2()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommConfig, "meeting_timeout_s", 3.0)
        model = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))[0]
    model(**gpt2_batch(torch.Generator().manual_seed(rank), 2)).loss.backward()
    if rank == 0:
        with pytest.raises(CommunicationError, match=r"(?s)save_pretrained\(\) of GPT2LMHeadModel.*on every rank"):
            model.save_pretrained(Path(folder) / "model")
        assert not (Path(folder) / "model").exists()
        tell("the error")
    else:
        wait_until_told("the error")
