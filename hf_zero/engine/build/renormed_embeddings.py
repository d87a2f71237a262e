"""Refuses embeddings that each rank would edit by its own inputs."""

import torch.distributed as dist
from torch import nn

from ...config import ZeroConfig


def refuse_renormed_embeddings(model: nn.Module, config: ZeroConfig) -> None:
    """Raises `ValueError` for an embedding with `max_norm` whose weight the ranks would share the state of.

    Its forward scales, in place, the rows of the tokens that this rank has seen. Under DDP, whose copies are never compared, each
    rank goes on with weights of its own.
    """
    if config.stage == 0 or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and _is_edited(module, config):
            raise ValueError(
                f"hf_zero: {name!r} is an embedding with `max_norm={module.max_norm}`: its forward scales the rows of the tokens "
                "that this rank has seen, so that the ranks' weights come apart (under DDP too, unnoticed), and above stage 0 a "
                "step puts one rank's over the others'. Build it with `max_norm=None`, and scale all rows behind each step "
                "inside `with hf_zero.gathered(model, writeback=True):`; or train at `stage: 0`."
            )


def _is_edited(module: nn.Embedding | nn.EmbeddingBag, config: ZeroConfig) -> bool:
    is_shared_out = config.stage == 3 or module.weight.requires_grad
    return module.max_norm is not None and is_shared_out
