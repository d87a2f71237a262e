"""Files with a tensor for each expert, read into a model whose experts are one tensor and split over ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import save_file
from split_runs import KINDS, SplitJob, load, save_models, whole_of
from transformers import MixtralForCausalLM, core_model_loading

from hf_zero.checkpoint.files import CheckpointError
from hf_zero.checkpoint.pieces import mapped_tensors
from hf_zero.engine.engine import ZeroEngine
from hf_zero.integrations import saved_weights
from hf_zero.integrations.file_weights import load_weights_into


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models to load, and a checkpoint with other weights."""
    folder = tmp_path_factory.mktemp("experts")
    save_models(folder)
    torch.manual_seed(5)
    model = KINDS["mixtral"][0](KINDS["mixtral"][1])
    model.save_pretrained(folder / "checkpoint")
    # As `hf-zero consolidate` writes it of a split run.
    save_file(model.state_dict(), folder / "mixtral" / "model.safetensors", metadata={"format": "pt"})
    return folder


def resumes(rank: int, world_size: int, folder: Path, ep: int) -> dict[str, np.ndarray]:
    model = load(SplitJob(folder=str(folder), kind="mixtral", tp=2, ep=ep))
    engine = ZeroEngine(model, [torch.optim.AdamW(model.parameters())], {"stage": 2})
    load_weights_into(engine, folder / "checkpoint")
    engine.close()
    return whole_of(model)


# A model that was loaded from files with a tensor for all experts.
@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_files_with_a_tensor_an_expert_are_read_into_a_split_model(folder, ep):
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in mapped_tensors(
        folder / "checkpoint/model.safetensors"
    )
    expected = dict(MixtralForCausalLM.from_pretrained(folder / "checkpoint").named_parameters())
    arguments = {"folder": folder, "ep": ep}
    for whole in run_ranks(resumes, world_size=4, time_limit_s=60, keyword_arguments=arguments):
        assert whole.keys() == expected.keys()
        assert all(np.array_equal(value, expected[name].detach().numpy()) for name, value in whole.items())


def test_tensors_that_are_computed_and_not_cut_are_refused_by_name(folder, monkeypatch):
    model = MixtralForCausalLM.from_pretrained(folder / "checkpoint")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    blocks = saved_weights.blocks_in_files(model, shapes, then="")
    w3 = blocks["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    assert (w3.name, w3.offsets, w3.sizes) == ("model.layers.0.mlp.experts.gate_up_proj", (2, 48, 0), (1, 48, 32))
    monkeypatch.setattr(
        core_model_loading, "revert_weight_conversion", lambda _, state: {"sum": state["lm_head.weight"] + 1}
    )
    with pytest.raises(CheckpointError, match="'sum' of a weights file is no block of one of the model's tensors"):
        saved_weights.blocks_in_files(model, shapes, then="")
    # Every second row, and a transposed matrix.
    for view in (lambda value: value[::2], lambda value: value.t()):
        monkeypatch.setattr(
            core_model_loading,
            "revert_weight_conversion",
            lambda _, state, view=view: {"view": view(state["lm_head.weight"])},
        )
        with pytest.raises(CheckpointError, match="'view' of a weights file"):
            saved_weights.blocks_in_files(model, shapes, then="")
