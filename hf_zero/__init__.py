"""hf_zero: ZeRO sharded training for transformers and accelerate, with its own engine.

Public names are imported when they are first used, so that `import hf_zero` is fast.
"""

import gc
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from .versions import __version__

try:
    import fcntl as _fcntl  # noqa: F401
except ImportError:
    raise ImportError(
        f"hf_zero runs on Linux, and this is Python for {sys.platform}. On Windows, install it in WSL 2."
    ) from None
if sys.platform == "darwin":
    raise ImportError(
        "hf_zero runs on Linux, and this is Python for macOS. torch has no collectives for its GPU (MPS)."
    )

_HOME_OF = {
    "ConfigError": "config",
    "GradScaler": "engine.loss_scale",
    "ZeroConfig": "config",
    "ZeroEngine": "engine.engine",
    "engine_of": "integrations.gathered",
    "ZeroPlugin": "integrations.plugin",
    "ZeroCallback": "integrations.arguments",
    "ZeroTrainingArguments": "integrations.arguments",
    "gathered": "integrations.gathered",
    "init": "integrations.init",
    "last_good_state": "integrations.elastic",
    "launch": "integrations.notebook",
    "parallel_config": "integrations.model_parallel",
    "same_global_batch": "integrations.global_batch",
    "unsharded": "integrations.gathered",
    "with_zero": "integrations.arguments",
}

_EXTRA_OF = {
    "Rescue": "diagnose",
    "RunRecorder": "report",
    "doctor": "diagnose",
    "make_plan": "planner",
    "migrate": "foreign",
    "parity": "diagnose",
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
    "launch",
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
    from .diagnose.doctor import doctor
    from .diagnose.parity import parity
    from .diagnose.rescue import Rescue
    from .engine.engine import ZeroEngine
    from .engine.loss_scale import GradScaler
    from .foreign.migrate import migrate
    from .integrations.arguments import ZeroCallback, ZeroTrainingArguments, with_zero
    from .integrations.elastic import last_good_state
    from .integrations.gathered import engine_of, gathered, unsharded
    from .integrations.global_batch import same_global_batch
    from .integrations.init import init
    from .integrations.model_parallel import parallel_config
    from .integrations.notebook import launch
    from .integrations.plugin import ZeroPlugin
    from .planner.planner import make_plan
    from .report.recorder import RunRecorder


def __getattr__(name: str):
    if name == "ZeroAccelerator":
        from .config.checks import cut_name

        # `from hf_zero import name` says nothing of an AttributeError's words.
        raise ImportError(cut_name(name))
    if name not in _EXTRA_OF and name not in _HOME_OF:
        raise AttributeError(f"module 'hf_zero' has no attribute {name!r}")
    # Imported objects stay alive. Garbage collections would walk them, and the objects of torch and transformers, several times
    # during the import, which needs two thirds of its CPU time.
    collects = gc.isenabled()
    gc.disable()
    try:
        if name in _EXTRA_OF:
            from .extras import extra

            return extra(_EXTRA_OF[name], name)
        return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    finally:
        if collects:
            gc.enable()


def __dir__():
    return __all__


def _nccl_may_have_run() -> bool:
    """Whether this process has a group that uses NCCL."""
    dist = sys.modules.get("torch.distributed")
    return (
        dist is not None and dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    )


# Two communicators at the same time hang if NCCL does not launch collectives in one order. NCCL reads this variable only when
# the process creates its first communicator, so setting the variable in the engine would be too late.
if not _nccl_may_have_run():
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")

if os.environ.get("HF_ZERO_CONFIG"):
    import_module(".integrations.step_watch", __name__).watch_for_the_variable()
