"""A GPT-2 with moments in 8 bits, and its whole state, compared bit for bit."""

import torch
from torch import nn
from training import adamw_in_two_groups
from transformers import GPT2Config, GPT2LMHeadModel

from hf_zero.engine.engine import ZeroEngine

IN_8_BITS = {"moments": "8bit", "grad_accumulation": "local"}


def gpt(width: int = 72, vocabulary: int = 256) -> nn.Module:
    """Its matrices are large enough for blocks, most of them no whole number of these; the rest is not."""
    size = {"vocab_size": vocabulary, "n_embd": width, "n_layer": 2, "n_head": 4, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **dropout, bos_token_id=0, eos_token_id=0))


def prepared(settings: dict, **kwargs) -> tuple[nn.Module, torch.optim.Optimizer, ZeroEngine]:
    torch.manual_seed(0)
    model = gpt()
    optimizer = adamw_in_two_groups(model, **kwargs)
    return model, optimizer, ZeroEngine(model, [optimizer], settings)


def whole_states(engine: ZeroEngine, model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, parameter in model.named_parameters():
        state = engine.full_state(parameter) if parameter.requires_grad else {}
        found[name] = {kind: torch.as_tensor(value).clone() for kind, value in state.items()}
    return found


def refuse_difference(some: dict, others: dict) -> None:
    """Bit for bit, so that zeros have their signs too."""
    assert some.keys() == others.keys()
    for name, state in some.items():
        assert state.keys() == others[name].keys()
        for kind, value in state.items():
            assert value.numpy().tobytes() == others[name][kind].numpy().tobytes(), (name, kind)
