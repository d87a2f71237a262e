"""Everything people save a model with gives every name and value back, also inside saves that all ranks are in."""

import io
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import clean_state_dict_for_safetensors
from accelerate_job import make_accelerator
from cells import slow
from launching import launch, launch_forked
from peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, load_model, save_file, save_model
from shared_ranks import on_ranks, tell, wait_until_told
from torch import nn
from trainer_job import as_launched, make_trainer
from training import bert, bert_batch, gpt2, gpt2_batch
from transformers import Trainer

import hf_zero
from hf_zero import gathered
from hf_zero.config import CommConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.presence.arrivals import CommunicationError, RankProcess, leave_together

pytestmark = pytest.mark.timeout(180)
TIMEOUT_S = 3.0


@pytest.fixture(params=[1, 2, 3])
def trained(request):
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Kept alive by the optimizer alone, as in a script.
    ZeroEngine(model, [optimizer], {"stage": request.param})
    model(**gpt2_batch(torch.Generator().manual_seed(0), 2)).loss.backward()
    optimizer.step()
    return model, optimizer, {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(loaded: dict, expected: dict, but: tuple = ()) -> None:
    assert set(loaded) == set(expected) - set(but)
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)


def test_save_pretrained(trained, tmp_path):
    model, _, expected = trained
    model.save_pretrained(tmp_path)
    assert_equal(type(model).from_pretrained(tmp_path).state_dict(), expected)
    assert_equal(load_file(tmp_path / "model.safetensors"), expected, but=("lm_head.weight",))


def test_safetensors_save_model(trained, tmp_path):
    model, _, expected = trained
    save_model(model, tmp_path / "m.safetensors")
    other = gpt2()
    load_model(other, tmp_path / "m.safetensors")
    assert_equal(other.state_dict(), expected)


def test_save_file_of_an_untied_state_dict(tmp_path):
    torch.manual_seed(0)
    model = bert()
    ZeroEngine(model, [torch.optim.AdamW(model.parameters())], 2)
    state = model.state_dict()
    save_file(state, tmp_path / "m.safetensors")
    assert_equal(load_file(tmp_path / "m.safetensors"), state)


def test_accelerates_cleaning_drops_ties_only(trained):
    PartialState(cpu=True)
    model, _, expected = trained
    kept = clean_state_dict_for_safetensors(model.state_dict())
    assert_equal(
        kept, expected, but=(set(expected) - set(kept)).intersection({"lm_head.weight", "transformer.wte.weight"})
    )
    assert len(kept) == len(expected) - 1


def test_torch_save_of_a_submodule_holds_its_own_bytes_only(trained):
    model, _, expected = trained
    block = model.transformer.h[1]
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    own_bytes = sum(value.nbytes for value in block.state_dict().values())
    assert len(file.getvalue()) < own_bytes * 1.2 + 20_000
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_equal(
        {f"transformer.h.1.{name}": value for name, value in loaded.items()},
        {n: v for n, v in expected.items() if n.startswith("transformer.h.1.")},
    )


def test_load_state_dict_writes_through(trained):
    model, optimizer, expected = trained
    model.load_state_dict({name: torch.zeros_like(value) for name, value in expected.items()})
    optimizer.zero_grad()
    optimizer.step()
    assert all(p.abs().max() == 0 for p in model.parameters())


# Parameters sharded over two ranks (stage 3)


def sharded_and_whole(
    rank: int, make, make_batch, timeout_s: float = TIMEOUT_S
) -> tuple[nn.Module, nn.Module, ZeroEngine]:
    """A model after a step at stage 3, and the same one trained whole in this process on all ranks' rows."""
    models, ranks = [], dist.get_world_size()
    for sharded in (True, False):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if sharded:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CommConfig, "meeting_timeout_s", timeout_s)
                engine = ZeroEngine(model, [optimizer], 3)
        batches = [make_batch(torch.Generator().manual_seed(r), 2) for r in range(ranks)]
        for batch in [batches[rank]] if sharded else batches:
            (model(**batch).loss / (1 if sharded else ranks)).backward()
        optimizer.step()
        models.append(model)
    return models[0], models[1], engine


def slice_of(state: dict, prefix: str) -> dict:
    return {name: value for name, value in state.items() if name.startswith(prefix)}


@on_ranks(2)
def test_state_dict_is_whole_on_every_rank_for_the_model_and_a_part_of_it(rank, world_size, tmp_path):
    folder = str(tmp_path)
    model, whole, _ = sharded_and_whole(rank, gpt2, gpt2_batch)
    state, expected = model.state_dict(), whole.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    assert all(value.isfinite().all() for value in state.values())

    torch.save(model.state_dict(), f"{folder}/model-{rank}.pt")
    assert_equal(torch.load(f"{folder}/model-{rank}.pt", weights_only=True), state)
    fresh = gpt2()
    fresh.load_state_dict(model.state_dict())
    assert_equal(fresh.state_dict(), state)

    block = model.transformer.h[1].state_dict()
    assert_equal(
        {f"transformer.h.1.{name}": value for name, value in block.items()}, slice_of(state, "transformer.h.1.")
    )
    torch.save(block, f"{folder}/block-{rank}.pt")
    assert_equal(torch.load(f"{folder}/block-{rank}.pt", weights_only=True), block)
    assert model.transformer.h[1].ln_1.state_dict().keys() == {"weight", "bias"}

    model.save_pretrained(f"{folder}/pretrained")
    dist.barrier()
    assert_equal(type(model).from_pretrained(f"{folder}/pretrained").state_dict(), state)
    model.zero_grad()
    model(**gpt2_batch(torch.Generator(), 2)).loss.backward()


@on_ranks(2)
def test_save_file_of_a_sharded_models_state_dict(rank, world_size, tmp_path):
    folder = str(tmp_path)
    model, whole, _ = sharded_and_whole(rank, bert, bert_batch)
    state = model.state_dict()
    save_file(state, f"{folder}/model-{rank}.safetensors")
    loaded = load_file(f"{folder}/model-{rank}.safetensors")
    assert_equal(loaded, state)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(loaded[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.short_cells("(1, 2)")
@pytest.mark.parametrize("come", [(0,), (1, 2)], ids=str)
@on_ranks(3)
def test_a_save_to_which_not_all_ranks_come_is_named_within_the_time_limit(rank, world_size, come, tmp_path):
    folder = str(tmp_path)
    model = sharded_and_whole(rank, gpt2, gpt2_batch)[0]
    dist.barrier()
    if rank in come:
        started = time.monotonic()
        with pytest.raises(CommunicationError, match=r"only some ranks reached save_pretrained\(\) of GPT2LMHeadModel"):
            model.save_pretrained(f"{folder}/{rank}")
        waited = time.monotonic() - started
        assert TIMEOUT_S - 0.5 < waited < TIMEOUT_S + 60, f"waited {waited:.1f} s"
        tell(f"rank {rank}'s error")
    # The rest is somewhere else, and lives on.
    wait_until_told(*(f"rank {each}'s error" for each in come))


@pytest.mark.parametrize("ends_first", [True, False])
@on_ranks(2)
def test_ranks_that_have_ended_are_not_waited_for(rank, world_size, ends_first):
    model = sharded_and_whole(rank, gpt2, gpt2_batch, timeout_s=100)[0]
    process = [None] * world_size
    dist.all_gather_object(process, RankProcess())
    if rank == 1:
        time.sleep(0 if ends_first else 2)
        return
    while ends_first and not process[1].has_ended():
        time.sleep(0.1)
    started = time.monotonic()
    with pytest.raises(CommunicationError, match=r"state_dict\(\) of GPT2LMHeadModel; ranks \[1\] have ended"):
        model.state_dict()
    waited = time.monotonic() - started
    assert waited < 60, f"waited {waited:.1f} s"


@on_ranks(2)
def test_ranks_that_are_about_to_end_are_not_waited_for(rank, world_size):
    model = sharded_and_whole(rank, gpt2, gpt2_batch, timeout_s=100)[0]
    if rank == 1:
        assert leave_together(patience_s=0.2) == [0]
    else:
        with pytest.raises(CommunicationError, match=r"ranks \[1\] have ended"):
            model.state_dict()
    # Both are alive all the time.
    dist.barrier()
    assert leave_together(patience_s=50) == []


DONE_BY_ONE = """
import sys
import torch
from accelerate import Accelerator
from hf_zero import ZeroPlugin

accelerator = Accelerator(cpu=True, parallelism_config=ZeroPlugin(stage=3))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 8)).sum())
optimizer.step()
if accelerator.is_main_process:
    if sys.argv[1] == "state_dict":
        model.state_dict()
    if sys.argv[1] == "save_state":
        accelerator.save_state(sys.argv[2])
    if sys.argv[1] == "forward":
        model(torch.ones(2, 8))
"""


def forked(script: Path, *arguments: object, caches: Path) -> subprocess.CompletedProcess:
    return launch_forked(script, *arguments)


@pytest.mark.parametrize(
    ("start", "what", "named"),
    [
        (
            forked,
            "state_dict",
            r"only some ranks reached state_dict\(\) of Sequential; ranks \[1\] have ended(.|\n)*"
            r"call it on every rank, outside `if is_main_process`, or wrap the call in `with hf_zero\.gathered\(model\)`",
        ),
        slow(
            forked,
            "save_state",
            r"only some ranks reached accelerator\.save_state; ranks \[1\] have ended(.|\n)*"
            r"call it on every rank, outside `if is_main_process`\. The time limit is",
        ),
        slow(launch, "state_dict", r"only some ranks reached state_dict\(\) of Sequential; ranks \[1\] have ended"),
        slow(
            launch,
            "forward",
            r"rank 1 has finished its script(.|\n)*all-gather of parameters of bucket \d failed",
        ),
    ],
)
def test_a_script_whose_main_process_goes_on_alone_ends_soon_and_says_why(start, what, named, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DONE_BY_ONE)
    result = start(script, what, tmp_path / "state", caches=tmp_path)
    assert result.returncode != 0
    assert re.search(named, result.stderr), result.stderr
    assert "Exception ignored" not in result.stderr


@on_ranks(2)
def test_inside_gathered_one_rank_may_save_by_itself(rank, world_size, tmp_path):
    folder = str(tmp_path)
    model, _, _ = sharded_and_whole(rank, gpt2, gpt2_batch)
    with hf_zero.gathered(model):
        if rank == 0:
            model.save_pretrained(folder)
    state = model.state_dict()
    assert_equal(type(model).from_pretrained(folder).state_dict(), state)


# ---- inside saves that all ranks are in ----

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
@on_ranks(2)
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


@pytest.mark.slow
@pytest.mark.extra("wire")
@on_ranks(2)
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


@pytest.mark.slow
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


@pytest.mark.extra("wire")
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
