"""`ZeroTrainingArguments`, `with_zero` and `ZeroCallback`: the entry points for Trainer."""

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from ..config import ConfigError, ConfigLike, ZeroConfig
from ..config.checks import cut
from ..config.zero import differences
from ..presence.error_hook import ErrorHook
from .accelerator import ZeroAcceleratorMixin
from .callers import find_in_callers
from .environment import refuse_engines_of_the_launch
from .plugin import ZeroPlugin
from .trainer import ZeroTrainerMixin, install_in_trainer

# ---- TrainingArguments and subclasses, such as TRL's SFTConfig, with the additional flag `--zero 2` (or a YAML file) ----

if TYPE_CHECKING:
    # Mixed into dataclasses of training arguments at run time; the type checker treats their methods as inherited.
    from transformers import TrainingArguments as _ArgumentsBase
    from typing_extensions import Unpack

    from ..config.zero import ZeroSettings
else:
    _ArgumentsBase = object


@dataclass(repr=False)
class ZeroArguments(_ArgumentsBase):
    """The flag `--zero`, for a dataclass of training arguments: `class Arguments(ZeroArguments, TrainingArguments)`.

    Args:
        zero: installs the engine in the Trainer that gets the arguments; nothing else is needed. None means stock DDP,
            regardless of HF_ZERO_CONFIG.
    """

    zero: str | None = field(
        default=None,
        metadata={
            "help": "hf_zero: a stage (0, 1, 2, 3, auto), a YAML file, or settings such as stage=2,grad_accumulation=local."
        },
    )

    def __post_init__(self):
        if self.zero is None:
            super().__post_init__()
            return
        # Installed first, so an error in a setting is printed once instead of as a traceback from each rank.
        ErrorHook.installed()
        config = ZeroConfig.of(self.zero, "--zero")
        self._refuse_other_engines(config)
        super().__post_init__()
        # After super(), which resets accelerate's shared state.
        plugin = ZeroPlugin(config)
        plugin.take_sequences_of(vars(self)["parallelism_config"])
        self.parallelism_config = plugin

    def _refuse_other_engines(self, config: ZeroConfig) -> None:
        for name, engine in (("fsdp", "FSDP"), ("deepspeed", "DeepSpeed")):
            if getattr(self, name, None):
                raise ConfigError(
                    f"hf_zero: `--zero {cut(str(self.zero))}` and `--{name} {cut(str(getattr(self, name)))}`: two engines cannot "
                    f"own one model. Remove --{name} to train with hf_zero, or --zero to train with {engine}."
                )
        other = self.parallelism_config
        cuts = not isinstance(other, ZeroPlugin) and getattr(other, "sp_size", 1) > 1
        # A plugin with the same config was set by this class: `dataclasses.replace` passes it to `__post_init__` again.
        if other is not None and not cuts and getattr(other, "config", None) != config:
            raise ConfigError(
                f"hf_zero: `--zero {cut(str(self.zero))}` and parallelism_config={type(other).__name__}: both split the "
                "model. Pass only one of them."
            )
        refuse_engines_of_the_launch()

    @property
    def place_model_on_device(self) -> bool | None:
        """False if parameters may be sharded, because Trainer would first move the whole model to each device."""
        plugin = self.parallelism_config
        if isinstance(plugin, ZeroPlugin) and plugin.config.may_shard_parameters:
            return False
        return super().place_model_on_device


@dataclass(repr=False)
class ZeroTrainingArguments(ZeroArguments, TrainingArguments):
    """TrainingArguments with a field `zero`, which installs the engine in the Trainer.

    Without `zero`, these are plain TrainingArguments: the Trainer uses DDP, regardless of HF_ZERO_CONFIG.
    """


def with_zero(arguments: type[TrainingArguments]) -> type[TrainingArguments]:
    """Returns a class of training arguments with the flag `--zero`: `HfArgumentParser(with_zero(Seq2SeqTrainingArguments))`.

    The class is a subclass of `arguments` with one more field at the end. Repeated calls return the same class. Its objects
    can be unpickled if hf_zero and the module of `arguments` can be imported.

    Raises:
        TypeError: `arguments` is not a subclass of TrainingArguments.
    """
    if not (isinstance(arguments, type) and issubclass(arguments, TrainingArguments)):
        raise TypeError(
            f"hf_zero: with_zero takes a subclass of TrainingArguments, such as Seq2SeqTrainingArguments, not {arguments!r}."
        )
    if issubclass(arguments, ZeroArguments):
        return arguments
    if arguments is TrainingArguments:
        return ZeroTrainingArguments

    kind: type = arguments
    return _made_of(kind)


@cache
def _made_of(arguments: type) -> type[TrainingArguments]:
    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # pickle finds classes by their names, and this class cannot be found by its name.
        if type(self) is made:
            return _new, (arguments,), self.__dict__
        return super(made, self).__reduce_ex__(protocol)

    members = {"__module__": __name__, "__doc__": arguments.__doc__, "__reduce_ex__": __reduce_ex__}
    made: type[TrainingArguments] = dataclass(repr=False)(
        type(f"Zero{arguments.__name__}", (ZeroArguments, arguments), members)
    )
    return made


def _new(arguments: type[TrainingArguments]) -> TrainingArguments:
    made: Any = with_zero(arguments)
    # Without `__init__`, because the pickled attributes follow, and `__post_init__` would set up accelerate again.
    return made.__new__(made)


# ---- The callback: hf_zero in a stock Trainer with stock arguments ----


class ZeroCallback(TrainerCallback):
    """`Trainer(..., callbacks=[ZeroCallback(2)])` trains with the engine. Also works with subclasses of Trainer.

    Args:
        config: stage number, YAML path, dict, ZeroConfig or ZeroPlugin; None uses the config installed by the training
            arguments, or else all defaults.
        settings: fields of ZeroConfig by name, instead of `config`, as in `ZeroPlugin`.
    """

    def __init__(self, config: ZeroPlugin | ConfigLike = None, **settings: "Unpack[ZeroSettings]"):
        self._plugin = config if isinstance(config, ZeroPlugin) and not settings else ZeroPlugin(config, **settings)
        self._is_default = config is None and not settings
        self._trainer: Trainer | None = None

    def set_trainer(self, trainer: Trainer) -> None:
        """Sets the Trainer, for callers that call on_init_end themselves."""
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
        # The Trainer refers to this callback, so a reference back would be pickled with the callback.
        self._trainer = None
        if isinstance(trainer.accelerator, ZeroAcceleratorMixin):
            self._refuse_contradiction(trainer.accelerator.zero_config)
            # The arguments' plugin has installed the engine. Stop this plugin's watch, which would end a run with a different
            # config.
            self._plugin.stop_watching()
        else:
            self._plugin.attach(trainer.accelerator)
        if not isinstance(trainer, ZeroTrainerMixin):
            install_in_trainer(trainer)

    def get_device_mesh(self, *_args: object) -> None:
        """Refuses a callback as accelerate's `parallelism_config`."""
        raise ConfigError(
            "hf_zero: parallelism_config is a ZeroCallback, which is for Trainer(callbacks=[...]). Pass ZeroPlugin(stage=2)."
        )

    def _is_on(self, trainer: Trainer) -> bool:
        handler = getattr(trainer, "callback_handler", None)
        return handler is not None and any(callback is self for callback in handler.callbacks)

    def _refuse_contradiction(self, installed: ZeroConfig) -> None:
        asked = self._plugin.config
        if self._is_default or installed == asked:
            return
        raise ConfigError(
            "hf_zero: one Trainer got two different configs: the training arguments, or an earlier ZeroCallback, have "
            f"{'; '.join(differences(installed, asked))}. Pass only one of them, or make them equal."
        )
