"""Evaluators of sentence-transformers at stage 3."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..hooks.replaced import replaced
from ..hooks.weak import engine_attached_to

# sentence-transformers' Trainer runs an evaluator on rank 0, which sends each rank a part of the texts. Parts may have
# different numbers of batches or no text. At stage 3, ranks would wait for a forward that another rank does not run.


@contextmanager
def evaluators_on_all_ranks() -> Iterator[None]:
    """Runs evaluators with all texts on every rank if the model is sharded, as sentence-transformers does under FSDP."""
    module: Any = sys.modules.get("sentence_transformers.base.trainer")
    shared = getattr(module, "distributed_evaluation", None)
    if shared is None:
        yield
        return

    def evaluation(model: nn.Module, enabled: bool = True) -> Any:
        engine = engine_attached_to(model)
        return shared(model, enabled=enabled and (engine is None or engine.config.stage < 3))

    with replaced(module, "distributed_evaluation", evaluation):
        yield
