"""`ZeroPlugin`: installs the engine in an Accelerator."""

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, is_initialized
from torch.distributed.device_mesh import DeviceMesh

from ..buckets.precision import check_cast_owner
from ..config import ConfigError, ConfigLike, ZeroConfig
from ..config.checks import cut, shown
from ..config.zero import changed
from ..hooks.mixins import mix_in
from ..presence.error_hook import ErrorHook
from .accelerator import ZeroAcceleratorMixin
from .callers import trainer_in_callers
from .clean_end import end_cleanly
from .environment import check_environment, refuse_engines_of_the_launch, refuse_split_models, sp_size_of_launch
from .launcher import CONFIG_VARIABLE
from .run_record import RunRecord
from .split_models import mesh_of_batches
from .step_watch import StepWatch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..config.zero import ZeroSettings


# ---- A plugin ignored by accelerate: the run stops at its first step instead of training without the engine ----
#
# All Accelerators of a process share the state of the first one. accelerate silently drops the `parallelism_config` of a later
# one, so the plugin detects this from optimizer steps.


def watch_for_steps_without(plugin: ParallelismConfig, config: ZeroConfig) -> StepWatch:
    """Raises `ConfigError` in the first optimizer step made without the plugin's engine although an Accelerator exists.

    Args:
        plugin: closes the watch when installed. Until an Accelerator exists, the plugin may be garbage-collected unused.
        config: the plugin's config.
    """
    # Checked now, because accelerate drops every plugin after the first Accelerator.
    came_second = is_initialized()
    # A weak reference, because torch keeps the watch's hook for the whole process. A plugin deleted unused ends its watch.
    reference = weakref.ref(plugin)

    def judge(optimizer: torch.optim.Optimizer, engine: object | None) -> bool:
        if reference() is None and not came_second:
            return True
        if not is_initialized():
            return False
        first = getattr(AcceleratorState().parallelism_config, "config", None)
        is_without = engine is None and first is None
        is_anothers = came_second and first is not None and first != config
        if is_without or is_anothers:
            raise ConfigError(
                f"hf_zero: {type(optimizer).__name__} steps, but a ZeroPlugin for stage {config.stage} was not "
                f"installed: accelerate uses the plugin of the first Accelerator only ({_named(first)}). Call "
                "plugin.attach(accelerator) before prepare, or pass ZeroCallback to the Trainer."
            )
        # A plugin with an equal config is equivalent.
        return came_second and first == config

    return StepWatch(judge)


def _named(first: ZeroConfig | None) -> str:
    return "no plugin" if first is None else f"a plugin for stage {first.stage}"


# ---- Entry point of accelerate: a plugin object for `Accelerator(parallelism_config=…)` ----
#
# accelerate passes its Accelerator to any truthy `parallelism_config`, in `_validate_accelerator`, before models exist. The
# plugin then changes the class of this instance to one with the engine's methods; nothing in accelerate is patched.


class ZeroPlugin(ParallelismConfig):
    """Installs hf_zero in an Accelerator: `Accelerator(parallelism_config=ZeroPlugin(stage=2))`.

    Args:
        config: stage number, YAML path, flag text, mapping or ZeroConfig. Without `config` and `settings`, the value of the
            environment variable HF_ZERO_CONFIG (a YAML path, a stage or flag text) is used, or else all defaults.
        tp_size: number of ranks that together hold one copy of a split model; Trainer reads this number from the model.
        sp_size: number of ranks that compute a sequence together, each a part of its tokens; by default the launch's.
        settings: fields of ZeroConfig by name, instead of `config`.
    """

    _watch: StepWatch | None = None
    tp_size: int
    sp_size: int

    def __init__(
        self,
        config: ConfigLike = None,
        *,
        tp_size: int = 1,
        sp_size: int | None = None,
        **settings: "Unpack[ZeroSettings]",
    ):
        # Installed first, so an error in a setting is printed once instead of as a traceback from each rank.
        ErrorHook.installed()
        if config is not None and settings:
            raise ConfigError(
                f"hf_zero: ZeroPlugin got a config ({shown(config)}) and the settings {cut(', '.join(settings))}; pass only "
                "one of the two."
            )
        refuse_engines_of_the_launch()
        if settings:
            self.config = ZeroConfig.from_dict(settings)
        elif config is None:
            # An empty variable counts as unset.
            self.config = ZeroConfig.of(os.environ.get(CONFIG_VARIABLE) or None, CONFIG_VARIABLE)
        else:
            self.config = ZeroConfig.of(config)
        # sp_size is set below: for any number above 1, accelerate would assume DeepSpeed and create its settings.
        super().__init__(dp_replicate_size=1, dp_shard_size=1, tp_size=tp_size, cp_size=1, sp_size=1)
        self._cut_sequences(sp_size_of_launch() if sp_size is None else sp_size)
        self._watch = watch_for_steps_without(self, self.config)

    def _cut_sequences(self, sp_size: int) -> None:
        """Sets the number of ranks per sequence.

        Raises:
            ConfigError: `sp_size` is not positive, or the plugin already has a different number.
        """
        if not isinstance(sp_size, int) or sp_size < 1:
            raise ConfigError(f"hf_zero: sp_size is {shown(sp_size)}; allowed: an integer of at least 1.")
        if self.sp_size not in (1, sp_size):
            raise ConfigError(
                f"hf_zero: sp_size is {self.sp_size} in the ZeroPlugin and {sp_size} in the script's ParallelismConfig. Set only "
                "one of them."
            )
        self.sp_size = sp_size
        if sp_size > 1:
            # For "deepspeed", Trainer and TRL would use DeepSpeed's groups, and split batches and average losses themselves.
            self.sp_backend = "hf_zero"

    def take_sequences_of(self, said: ParallelismConfig | None) -> bool:
        """Adopts `sp_size`, and with it `tp_size`, from a script's `ParallelismConfig`.

        Args:
            said: the script's config; None without one.

        Returns:
            Whether this plugin should replace the script's config.

        Raises:
            ConfigError: the script requests an unsupported split or a different `sp_size`.
        """
        if isinstance(said, ZeroPlugin):
            return False
        if said is not None and max(said.sp_size, said.cp_size) > 1:
            refuse_split_models(said)
            self._cut_sequences(said.sp_size)
            if said.tp_size > 1:
                # accelerate now deals batches according to the plugin's mesh.
                self.tp_size = said.tp_size
        return self.sp_size > 1

    def attach(self, accelerator: Accelerator) -> Accelerator:
        """Installs the engine's methods in an existing Accelerator, before anything is prepared; returns the Accelerator."""
        if not isinstance(accelerator, Accelerator):
            raise TypeError(
                f"hf_zero: plugin.attach got {type(accelerator).__name__}. It takes the Accelerator: plugin.attach(accelerator)."
            )
        if accelerator._models or accelerator._optimizers:
            raise ConfigError(
                "hf_zero: plugin.attach(accelerator) was called after accelerator.prepare; attach first, then prepare."
            )
        self._install(accelerator)
        return accelerator

    def install_for_run(self, accelerator: Accelerator, record: RunRecord) -> None:
        """Installs the engine's methods in an Accelerator built by a script under `hf_zero.run`.

        Raises:
            ConfigError: the script itself has installed hf_zero with different settings.
        """
        record.accelerators += 1
        accelerator.zero_run = record
        if isinstance(accelerator, ZeroAcceleratorMixin):
            record.refuse_other(accelerator.zero_config)
        else:
            self._validate_accelerator(accelerator)

    def stop_watching(self) -> None:
        """Allows optimizer steps without this plugin, if the engine is built in a different way."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy, for example in a file of training arguments, need not be installed.
        return {name: value for name, value in self.__dict__.items() if name != "_watch"}

    def to_json(self) -> dict[str, Any]:
        """Returns the stage and all non-default settings, for TrainingArguments.to_dict and trackers.

        Kept short, because MLflow drops arguments of more than 250 characters.
        """
        return changed(self.config)

    def __repr__(self) -> str:
        sizes = {"tp_size": self.tp_size, "sp_size": self.sp_size}
        said = self.config.changes() | {name: size for name, size in sizes.items() if size > 1}
        return f"ZeroPlugin({', '.join(f'{name}={value!r}' for name, value in said.items())})"

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Returns the mesh by which accelerate deals batches; None unless several ranks compute a batch together."""
        if not isinstance(self, ZeroPlugin):
            # The class itself was passed, so accelerate has called the plain function.
            raise ConfigError(
                "hf_zero: parallelism_config is the class ZeroPlugin. Pass an object: ZeroPlugin(stage=2)."
            )
        sizes = {name: size for name, size in (("tp_size", self.tp_size), ("sp_size", self.sp_size)) if size > 1}
        if not sizes:
            return None
        return mesh_of_batches(device_type or "cpu", self.tp_size * self.sp_size, " x ".join(sizes))

    def on_init_end(self, *_args: object, **_kwargs: object) -> None:
        """Refuses a plugin among Trainer's `callbacks`."""
        raise ConfigError(
            f"hf_zero: {self!r} is in Trainer's callbacks. Pass a ZeroCallback there: ZeroCallback({self.config.stage})."
        )

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        self._install(accelerator)
        trainer = trainer_in_callers()
        if trainer is not None:
            # Imported here because a plain loop may not use transformers, and the import takes seconds.
            from .trainer import install_in_trainer

            install_in_trainer(trainer)
            own = trainer.args.parallelism_config
            if isinstance(own, ZeroPlugin) and own is not self:
                # accelerate uses the plugin of the process's first Accelerator; install this Trainer's own one instead.
                own._install(accelerator)

    def _install(self, accelerator: Accelerator) -> None:
        check_environment(accelerator)
        # Checked before anything is changed, so a refused Accelerator stays a plain one.
        run: RunRecord | None = getattr(accelerator, "zero_run", None)
        if run is not None:
            run.refuse_other(self.config)
        cast_owner = check_cast_owner(self.config, accelerator.mixed_precision)
        if self.take_sequences_of(accelerator.parallelism_config):
            # accelerate deals batches by these two attributes, and Trainer and TRL read sizes from them.
            accelerator.state.parallelism_config = self
            accelerator.state.device_mesh = self.get_device_mesh(accelerator.device.type)
        # After the checks above: a refused plugin continues to watch, and stops a script that trains anyway.
        self.stop_watching()
        if not isinstance(accelerator, ZeroAcceleratorMixin):
            mix_in(accelerator, ZeroAcceleratorMixin)
            # Once per Accelerator, because every further exit handler would wait for the other ranks again.
            end_cleanly(accelerator)
        accelerator.zero_plugin = self
        accelerator.zero_config = self.config
        accelerator.zero_cast_owner = cast_owner
        accelerator.zero_engines = []
        accelerator._zero_early_optimizers = {}
