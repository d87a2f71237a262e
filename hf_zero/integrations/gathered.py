"""Whole parameters of a sharded model, wherever a script holds the model, a part of it or a parameter."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from ..engine.engine import ZeroEngine
from ..engine_reference import engine_attached_to


@contextmanager
def gathered(target: nn.Module | nn.Parameter | Iterable[nn.Parameter], writeback: bool = False) -> Iterator[None]:
    """Whole parameters to read or edit, at any stage: `with hf_zero.gathered(model.lm_head): print(model.lm_head.weight)`.

    Collective: every rank enters it. A model that is not prepared is whole anyway, and nothing happens.

    Args:
        target: a module, a parameter or several of one model.
        writeback: keep what is written inside; rank 0's values are what all ranks have afterwards.

    Raises:
        CommunicationError: some rank did not come within `comm.gather_timeout_s`.
        MemoryError: the whole parameters do not fit.
        RuntimeError: a parameter was edited without `writeback`.
    """
    parameters = list(target.parameters()) if isinstance(target, nn.Module) else target
    parameters = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    engine = _engine_with(parameters)
    if engine is None:
        yield
    else:
        with engine.gathered(parameters, writeback=writeback):
            yield


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """The whole model for many forwards, such as `generate`: gathered once instead of at each forward. Collective.

    Raises:
        MemoryError: it does not fit; without this context, forwards gather a layer at a time.
    """
    with gathered(model):
        yield


def _engine_with(parameters: Iterable[nn.Parameter]) -> ZeroEngine | None:
    engines = {id(engine): engine for engine in map(engine_attached_to, parameters) if engine is not None}
    if len(engines) > 1:
        raise ValueError("hf_zero: these parameters belong to several prepared models; gather each model's by itself.")
    return next(iter(engines.values()), None)
