"""The engine's settings in the run configuration that trackers store."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..config import ZeroConfig
from ..config.zero import changed
from ..hooks.replaced import replaced


class _Settings(NamedTuple):
    """Replaces `parallelism_config`, on which training arguments call `to_json` when trackers read the arguments."""

    config: ZeroConfig

    def to_json(self) -> dict[str, Any]:
        return changed(self.config)


@contextmanager
def told_to_trackers(trainer: Any) -> Iterator[None]:
    """Shows the engine's settings in the training arguments while callbacks set up their trackers.

    With `--zero` the arguments already contain them. Removed afterwards, because Trainer saves its arguments, and programs
    without hf_zero must be able to load them.
    """
    args, handler = trainer.args, trainer.callback_handler
    if args.parallelism_config is not None:
        yield
        return
    stock = handler.on_train_begin

    def begin(*passed: Any, **named: Any) -> Any:
        args.parallelism_config = _Settings(trainer.accelerator.zero_config)
        try:
            return stock(*passed, **named)
        finally:
            args.parallelism_config = None

    with replaced(handler, "on_train_begin", begin):
        yield
