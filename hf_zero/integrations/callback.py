"""The callback door: hf_zero in a stock Trainer with stock arguments."""

from transformers import Trainer, TrainerCallback

from ..config import ConfigError, ConfigLike, ZeroConfig
from ..config.zero import differences
from .accelerate import ZeroPlugin
from .accelerator_mixin import ZeroAcceleratorMixin
from .frames import find_in_callers
from .trainer.trainer import ZeroTrainerMixin, install_in_trainer


class ZeroCallback(TrainerCallback):
    """`Trainer(..., callbacks=[ZeroCallback(2)])` trains with the engine. Works on subclasses of Trainer too.

    Args:
        config: stage number, YAML path, dict, ZeroConfig or ZeroPlugin; None is what the arguments already installed, or
            all defaults.
    """

    def __init__(self, config: ZeroPlugin | ConfigLike = None):
        self._plugin = config if isinstance(config, ZeroPlugin) else ZeroPlugin(config)
        self._is_default = config is None
        self._trainer: Trainer | None = None

    def set_trainer(self, trainer: Trainer) -> None:
        """Names the Trainer, where it cannot be found from the call to on_init_end."""
        self._trainer = trainer

    def on_init_end(self, args, state, control, **kwargs):
        trainer = self._trainer or find_in_callers(
            lambda candidate: isinstance(candidate, Trainer) and self._is_on(candidate)
        )
        if trainer is None:
            raise RuntimeError(
                "hf_zero: ZeroCallback did not find its Trainer. Pass it in Trainer(callbacks=[...]), or call "
                "callback.set_trainer(trainer) and callback.on_init_end(args, state, control) by hand."
            )
        # The trainer holds this callback; a reference back would be pickled with it.
        self._trainer = None
        if isinstance(trainer.accelerator, ZeroAcceleratorMixin):
            self._refuse_contradiction(trainer.accelerator.zero_config)
            self._plugin.stand_aside()
        else:
            self._plugin.attach(trainer.accelerator)
        if not isinstance(trainer, ZeroTrainerMixin):
            install_in_trainer(trainer)

    def _is_on(self, trainer: Trainer) -> bool:
        handler = getattr(trainer, "callback_handler", None)
        return handler is not None and any(callback is self for callback in handler.callbacks)

    def _refuse_contradiction(self, installed: ZeroConfig) -> None:
        asked = self._plugin.config
        if self._is_default or installed == asked:
            return
        raise ConfigError(
            "hf_zero: two configs for one Trainer: the training arguments, or an earlier ZeroCallback, have "
            f"{'; '.join(differences(installed, asked))}. Give one of them, or the same to both."
        )
