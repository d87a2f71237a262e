"""The loss of a sentence-transformers Trainer as a module whose activations can be traced like a model's."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..engine.models import models_in
from ..hooks.replaced import replaced
from ..hooks.tensors import differentiable_tensors

_TRAINERS = "sentence_transformers.base.trainer"
_GATHERS = "sentence_transformers.util.distributed"
_OTHER_COLUMNS = ("dataset_name", "prompt", "task")
"""Keys of a batch that a Trainer removes before collecting the columns of texts."""


class TextLoss(nn.Module):
    """Computes a batch's loss like the Trainer's `compute_loss`: text models get a dict with each column's tokens.

    Parameters have the same names as in the engine.

    Args:
        trained: the module with all trained parameters (`joined`).
        trainer: a Trainer of sentence-transformers.
        world_size: number of ranks whose negatives a loss may gather.
        only_encodes: omit the loss and read each column once, because some losses need values.
    """

    def __init__(self, trained: nn.Module, trainer: Any, world_size: int, *, only_encodes: bool = False):
        super().__init__()
        self.trained = trained
        self.losses = list(trainer.loss.values()) if isinstance(trainer.loss, dict) else [trainer.loss]
        self.only_encodes = only_encodes
        names = list(trainer.loss) if isinstance(trainer.loss, dict) else [None]
        self._index_of = {name: index for index, name in enumerate(names)}
        self._world_size = world_size
        # A copy of this module keeps functions as they are. A bound method would be copied with its Trainer.
        self._collect = lambda batch: trainer.collect_features(batch)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        yield from self.trained.named_modules(memo, prefix, remove_duplicate)
        # Only the loss contains a guide model, which is not trained.
        for index, loss in enumerate(self.losses):
            yield from loss.named_modules(memo, f"loss[{index}]", remove_duplicate)

    def forward(self, **batch: Any) -> Any:
        others = {name: batch.pop(name, None) for name in _OTHER_COLUMNS}
        loss = self.losses[self._index_of.get(others.pop("dataset_name"), 0)]
        columns, labels = self._collect(batch)
        if self.only_encodes:
            return self._encoded(models_in(self.trained)[0], columns)
        taken = inspect.signature(loss.forward).parameters
        with _gathers_of(self._world_size):
            found = loss(columns, labels, **{name: value for name, value in others.items() if name in taken})
        return sum(found.values()) if isinstance(found, Mapping) else found

    def _encoded(self, model: nn.Module, columns: list[Any]) -> torch.Tensor:
        if not isinstance(columns[0], Mapping):
            # A cross-encoder reads each query with each of its texts.
            queries, *others = columns
            pairs = [
                (query, text)
                for other in others
                for query, texts in zip(queries, other)
                for text in ([texts] if isinstance(texts, str) else texts)
            ]
            columns = [model.preprocess(pairs)]  # type: ignore[operator]
        # A tokenizer's own kind of dict hides its tensors. The last output depends on all others that have gradients.
        found = [differentiable_tensors(dict(model(each)))[-1] for each in columns]
        return torch.stack([each.float().mean() for each in found]).sum()


def text_trainer(trainer: Any) -> bool:
    """Whether this is a Trainer of sentence-transformers with a loss."""
    module = sys.modules.get(_TRAINERS)
    return module is not None and isinstance(trainer, module.BaseTrainer) and hasattr(trainer, "loss")


@contextmanager
def _gathers_of(world_size: int) -> Iterator[None]:
    """Replaces gathers of other ranks' embeddings by copies of this rank's, because a trace runs on one rank."""
    module = sys.modules[_GATHERS]

    def gather(tensor: torch.Tensor, with_grad: bool = False) -> torch.Tensor:
        return torch.cat([tensor] * world_size)

    with ExitStack() as stack:
        stack.enter_context(replaced(module, "all_gather", gather))
        stack.enter_context(replaced(module, "is_dist_initialized", lambda: False))
        yield
