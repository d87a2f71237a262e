"""`mixed_precision="fp8"` by torchao's float8 linears, computed in float32 from values that are rounded to float8 on the CPU."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import AORecipeKwargs
from accelerate.utils.dataclasses import FP8BackendType
from shared_ranks import on_shared_ranks
from trainer_job import as_launched
from training import gpt2_batch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero import ConfigError, ZeroPlugin

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        find_spec("torchao") is None, reason="torchao is not installed: accelerate refuses fp8 without it"
    ),
]


def trained(rank: int, settings: dict | None, **recipe: bool) -> tuple[list[float], torch.Tensor]:
    """Losses, and a layer's weight at the end."""
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kwargs = AORecipeKwargs(**recipe)
    kwargs.config = replace(kwargs.config, emulate=True)
    plugin = None if settings is None else ZeroPlugin(settings)
    accelerator = Accelerator(mixed_precision="fp8", parallelism_config=plugin, kwargs_handlers=[kwargs], cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    data, losses = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        loss = model(**gpt2_batch(data, 2)).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # Trainer prepares a model again when it trains it again.
    prepared = accelerator.unwrap_model(accelerator.prepare(model))
    losses.append(prepared(**gpt2_batch(data, 2)).loss.item())
    weight = accelerator.unwrap_model(model).state_dict()["model.layers.1.mlp.up_proj.weight"].clone()
    accelerator.free_memory()
    return losses, weight


@on_shared_ranks
def test_losses_in_fp8_are_ddps_with_the_same_recipe(rank, world_size):
    as_launched(rank, world_size)
    losses, weight = trained(rank, None, enable_fsdp_float8_all_gather=False)
    for stage in (0, 1, 2, 3):
        # accelerate's default recipe is for FSDP2.
        found, found_weight = trained(rank, {"stage": stage, "unit_bytes": 0} if stage == 3 else {"stage": stage})
        assert found == losses, f"stage {stage}"
        assert torch.equal(found_weight, weight), f"stage {stage}"


def test_other_backends_of_fp8_are_refused_by_name(monkeypatch):
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="fp8", parallelism_config=ZeroPlugin(stage=2), cpu=True)
    monkeypatch.setattr(type(accelerator), "fp8_backend", FP8BackendType.TE)
    with pytest.raises(ConfigError, match="'fp8' with the backend TE is not built yet"):
        accelerator.prepare_model(torch.nn.Linear(16, 16))
    AcceleratorState._reset_state(True)
