"""From whatever a script has in hand to its engine."""

from torch import nn

from ..engine.engine import ZeroEngine
from ..engine_reference import engine_attached_to


def engine_of(owner: object) -> ZeroEngine:
    """The engine of an Accelerator, a Trainer, or a model that was prepared by one.

    Raises:
        ValueError: there is none, or an Accelerator has several (ask with the model then).
    """
    if isinstance(owner, nn.Module):
        for module in (owner, getattr(owner, "_orig_mod", None), getattr(owner, "module", None)):
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
        f"hf_zero: no engine on {what} ({type(owner).__name__}). Give Accelerator(parallelism_config=ZeroPlugin(...)), "
        "ZeroTrainingArguments(zero=...) or ZeroCallback(...), and call prepare(model, optimizer) or train() first. A plugin "
        "given to a second Accelerator of one process is ignored by accelerate: use plugin.attach(accelerator)."
    )
