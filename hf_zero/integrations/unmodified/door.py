"""The engine in every Accelerator of a process, and so in every Trainer, for as long as a script runs."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...config import ConfigError, ZeroConfig
from ..accelerator.run_record import RunRecord
from ..seams import replaced
from .after_import import AfterImport

if TYPE_CHECKING:
    import torch

    from ..accelerate import ZeroPlugin

_OTHER_ENGINES = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
}


class Door:
    """Gives each Accelerator that is built while it is open the engine.

    Args:
        config: for all of them.

    Attributes:
        record: what was built.
    """

    def __init__(self, config: ZeroConfig):
        self.record = RunRecord(config=config)
        self._plugin: ZeroPlugin | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, Accelerators get the engine; afterwards accelerate and torch are as they were."""
        with ExitStack() as entered:
            calls: dict[str, Callable[[ModuleType], None]] = {
                "torch": lambda _: self._watch_steps(entered),
                "accelerate": lambda accelerate: self._seat(entered, accelerate.Accelerator),
            }
            entered.enter_context(AfterImport(calls))
            yield

    def _seat(self, entered: ExitStack, accelerator_class: type) -> None:
        build: Callable[..., None] = vars(accelerator_class)["__init__"]

        @wraps(build)
        def __init__(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            _refuse_other_engines(kwargs)
            # Before accelerate sets up NCCL.
            plugin = self._made_plugin()
            build(accelerator, *args, **kwargs)
            plugin.install_for_run(accelerator, self.record)

        entered.enter_context(replaced(accelerator_class, "__init__", __init__))

    def _made_plugin(self) -> "ZeroPlugin":
        if self._plugin is None:
            # Here, not above: the script imports torch and accelerate when it needs them.
            from ..accelerate import ZeroPlugin

            self._plugin = ZeroPlugin(self.record.config)
        return self._plugin

    def _watch_steps(self, entered: ExitStack) -> None:
        from ..accelerator.first_step import StepWatch

        def judge(optimizer: "torch.optim.Optimizer", engine: object | None) -> bool:
            if engine is None and self.record.engines == 0:
                raise ConfigError(
                    f"hf_zero: {type(optimizer).__name__} steps without the engine: {self._why_not()}. {WHAT_IT_TAKES}"
                )
            # A ZeroEngine that the script has built by itself is one as well.
            self.record.engines = max(self.record.engines, 1)
            return True

        entered.callback(StepWatch(judge).close)

    def refuse_unmet(self) -> None:
        """Raises `ConfigError` for a script that has ended without any use of the engine; says so where it only evaluated."""
        if self.record.engines:
            return
        if not self.record.models:
            raise ConfigError(f"hf_zero: the script ended without the engine: {self._why_not()}. {WHAT_IT_TAKES}")
        if os.environ.get("RANK", "0") == "0":
            print(
                "hf_zero: the script has prepared models for evaluation only and trained nothing, so nothing was sharded.",
                file=sys.stderr,
                flush=True,
            )

    def _why_not(self) -> str:
        if self.record.accelerators == 0:
            return "it built neither an Accelerator nor a Trainer in this process"
        if self.record.models == 0:
            return "it built an Accelerator and prepared no model"
        return "it prepared a model without its optimizer"


WHAT_IT_TAKES = (
    "hf_zero.run gives the engine to scripts that call accelerator.prepare(model, optimizer), or that train with a Trainer, "
    "in the processes that the launcher starts. For another loop, build a ZeroEngine(model, [optimizer], 2) in it."
)


def _refuse_other_engines(arguments: dict[str, Any]) -> None:
    for name, engine in _OTHER_ENGINES.items():
        if arguments.get(name) is not None:
            raise ConfigError(
                f"hf_zero: the script builds an Accelerator with {name}, for {engine}. Two engines cannot own one model. Run the "
                f"script without hf_zero.run, or leave {name} out."
            )
