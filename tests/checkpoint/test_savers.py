"""Everything people save a model with gives every name and value back, and no more bytes than the model has."""

import io
import re
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import clean_state_dict_for_safetensors
from launching import launch, launch_forked
from safetensors.torch import load_file, load_model, save_file, save_model
from shared_ranks import on_ranks
from told import tell, wait_until_told
from torch import nn
from training import bert, bert_batch, gpt2, gpt2_batch

import hf_zero
from hf_zero.comm.arrivals import CommunicationError, RankProcess, RankProcesses
from hf_zero.config import CommConfig
from hf_zero.engine.engine import ZeroEngine

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
        with pytest.raises(CommunicationError, match=r"only some ranks came to save_pretrained\(\) of GPT2LMHeadModel"):
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
        assert RankProcesses().leave(patience_s=0.2) == [0]
    else:
        with pytest.raises(CommunicationError, match=r"ranks \[1\] have ended"):
            model.state_dict()
    # Both are alive all the time.
    dist.barrier()
    assert RankProcesses().leave(patience_s=50) == []


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
            r"only some ranks came to state_dict\(\) of Sequential; ranks \[1\] have ended(.|\n)*"
            r"call it on every rank, outside `if is_main_process`, or wrap the call in `with hf_zero\.gathered\(model\)`",
        ),
        (
            forked,
            "save_state",
            r"only some ranks came to accelerator\.save_state; ranks \[1\] have ended(.|\n)*"
            r"call it on every rank, outside `if is_main_process`\. The time limit is",
        ),
        pytest.param(
            *(launch, "state_dict", r"only some ranks came to state_dict\(\) of Sequential; ranks \[1\] have ended"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            launch,
            "forward",
            r"rank 1 has come to the end of its script(.|\n)*all-gather parameters of bucket \d failed",
            marks=pytest.mark.slow,
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
