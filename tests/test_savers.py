"""Everything people save a model with gives every name and value back, and no more bytes than the model has."""

import io

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import clean_state_dict_for_safetensors
from safetensors.torch import load_file, load_model, save_file, save_model
from training import bert, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine


@pytest.fixture(params=[1, 2])
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
