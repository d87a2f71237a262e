"""`gathered`, `unsharded` and `engine_of` for scripts."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import is_tensor, nn

from ..config.checks import shown
from ..engine.engine import ZeroEngine
from ..hooks.weak import engine_attached_to

# ---- Finds the engine of an object known to the script ----


def engine_of(owner: object) -> ZeroEngine:
    """Returns the engine of an Accelerator, a Trainer, or a prepared model.

    Raises:
        ValueError: there is none, or an Accelerator has several (pass the model instead).
    """
    if isinstance(owner, nn.Module):
        inner = extract_model_from_parallel(owner, keep_torch_compile=False)
        # accelerate unwraps only known wrappers. Other wrappers, for example a script's own, store the model as `module`.
        for module in (owner, inner, getattr(owner, "module", None)):
            engine = engine_attached_to(module) if isinstance(module, nn.Module) else None
            if engine is not None:
                return engine
        raise ValueError(_none_on("this model", owner))
    accelerator = getattr(owner, "accelerator", owner)
    engines = getattr(accelerator, "zero_engines", None)
    if engines is None:
        raise ValueError(_none_on("this object", owner))
    if len(engines) != 1:
        found = "none: it is built by prepare(model, optimizer)" if not engines else f"{len(engines)}: pass the model"
        raise ValueError(f"hf_zero: engine_of needs one engine; this {type(accelerator).__name__} has {found}.")
    return engines[0]


def _none_on(what: str, owner: object) -> str:
    return (
        f"hf_zero: no engine on {what} ({type(owner).__name__}). Use Accelerator(parallelism_config=ZeroPlugin(...)), "
        "ZeroTrainingArguments(zero=...) or ZeroCallback(...), and call prepare(model, optimizer) or train() first. "
        "accelerate ignores a plugin passed to a second Accelerator of one process: use plugin.attach(accelerator)."
    )


# ---- Whole parameters of a sharded model, for a script with the model, a submodule or a parameter ----


@contextmanager
def gathered(target: nn.Module | nn.Parameter | Iterable[nn.Parameter], writeback: bool = False) -> Iterator[None]:
    """Gathers whole parameters to read or edit, at any stage: `with hf_zero.gathered(model.head): print(model.head.weight)`.

    Collective: every rank must enter the context. Does nothing for a model that is not prepared.

    Args:
        target: a module, a parameter, or several parameters of one model.
        writeback: keeps edits made inside the context; all ranks get rank 0's values.

    Raises:
        CommunicationError: a rank did not enter within `comm.late_s`.
        MemoryError: the whole parameters do not fit.
        RuntimeError: a parameter was edited without `writeback`.
    """
    with _gathered_for("hf_zero.gathered", target, writeback=writeback):
        yield


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gathers the whole model once for many forwards, such as in `generate`. Collective.

    Raises:
        MemoryError: the whole model does not fit. Without this context, forwards gather one layer at a time.
    """
    with _gathered_for("hf_zero.unsharded", model, writeback=False):
        yield


@contextmanager
def _gathered_for(
    purpose: str, target: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, writeback: bool
) -> Iterator[None]:
    items: Any = target.parameters() if isinstance(target, nn.Module) else target
    parameters = list(items) if isinstance(items, Iterable) and not is_tensor(items) else [items]
    if not all(map(is_tensor, parameters)):
        raise TypeError(
            f"hf_zero: {purpose} got {shown(target)}. It takes a module, a parameter or several parameters."
        )
    engine = _engine_with(parameters)
    if engine is None:
        yield
    else:
        with engine.gathered(parameters, writeback=writeback, purpose=purpose):
            yield


def _engine_with(parameters: Iterable[nn.Parameter]) -> ZeroEngine | None:
    engines = {id(engine): engine for engine in map(engine_attached_to, parameters) if engine is not None}
    if len(engines) > 1:
        raise ValueError("hf_zero: these parameters belong to several prepared models; gather each model's separately.")
    return next(iter(engines.values()), None)
