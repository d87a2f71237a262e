"""hf_zero: ZeRO sharded training for transformers and accelerate, with an engine of its own.

The public names are loaded on first use, so that `import hf_zero` costs nothing in scripts that only need one of them.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME_OF = {
    "ConfigError": "config",
    "GradScaler": "optimizer.state.loss_scale",
    "ZeroConfig": "config",
    "ZeroEngine": "engine.engine",
    "doctor": "diagnose.doctor",
    "engine_of": "integrations.engine_of",
    "ZeroPlugin": "integrations.accelerate",
    "ZeroCallback": "integrations.callback",
    "ZeroTrainingArguments": "integrations.arguments",
    "gathered": "integrations.gathered",
    "init": "integrations.checkpoints.init",
    "migrate": "config.migration.migrate",
    "last_good_state": "integrations.elastic.last_good",
    "make_plan": "integrations.planning.planner",
    "parallel_config": "integrations.model_parallel",
    "parity": "diagnose.parity",
    "same_global_batch": "integrations.elastic.global_batch",
    "Rescue": "diagnose.rescue",
    "RunRecorder": "report.recorder",
    "unsharded": "integrations.gathered",
    "with_zero": "integrations.arguments",
}

__all__ = [
    "ConfigError",
    "GradScaler",
    "Rescue",
    "RunRecorder",
    "ZeroCallback",
    "ZeroConfig",
    "ZeroEngine",
    "ZeroPlugin",
    "ZeroTrainingArguments",
    "__version__",
    "doctor",
    "engine_of",
    "gathered",
    "init",
    "last_good_state",
    "make_plan",
    "migrate",
    "parallel_config",
    "parity",
    "same_global_batch",
    "unsharded",
    "with_zero",
]

if TYPE_CHECKING:
    from .config import ConfigError, ZeroConfig
    from .config.migration.migrate import migrate
    from .diagnose.doctor import doctor
    from .diagnose.parity import parity
    from .diagnose.rescue import Rescue
    from .engine.engine import ZeroEngine
    from .integrations.accelerate import ZeroPlugin
    from .integrations.arguments import ZeroTrainingArguments, with_zero
    from .integrations.callback import ZeroCallback
    from .integrations.checkpoints.init import init
    from .integrations.elastic.global_batch import same_global_batch
    from .integrations.elastic.last_good import last_good_state
    from .integrations.engine_of import engine_of
    from .integrations.gathered import gathered, unsharded
    from .integrations.model_parallel import parallel_config
    from .integrations.planning.planner import make_plan
    from .optimizer.state.loss_scale import GradScaler
    from .report.recorder import RunRecorder


def __getattr__(name: str):
    if name == "ZeroAccelerator":
        from .config.checks import cut_name

        # `from hf_zero import name` says nothing of an AttributeError's words.
        raise ImportError(cut_name(name))
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hf_zero' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__():
    return __all__


def _nccl_may_have_run() -> bool:
    """Whether the process has a group that goes through NCCL."""
    dist = sys.modules.get("torch.distributed")
    return (
        dist is not None and dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    )


# Two communicators at once hang where NCCL does not keep to one order of collectives. NCCL reads the variable once, with the
# first communicator of the process, so the engine would set the variable too late.
if not _nccl_may_have_run():
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

if os.environ.get("HF_ZERO_CONFIG"):
    import_module(".integrations.accelerator.first_step", __name__).watch_for_the_variable()
