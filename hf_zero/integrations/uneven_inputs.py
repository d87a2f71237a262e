"""`accelerator.join_uneven_inputs`: ranks out of batches continue with the other ranks without changing the gradients.

[Note: ranks that have run out]
Each rank stores a part of the optimizer's state, and at stage 3 of the parameters, so a rank out of batches cannot leave.
Inside the context, the ranks announce each forward, backward, clip and step to each other. Ranks that have reached the end of
the context repeat them: the forward with their last batch, the backward with zeros, and the step with the other ranks'
learning rates. Gradients are divided by the number of all ranks, like those of DistributedDataParallel under
`torch.distributed.algorithms.Join` with accelerate's default arguments.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..config import ConfigError
from ..engine.engine import ZeroEngine
from ..hooks.tensors import differentiable_tensors, is_in_backward
from ..hooks.weak import WeakHook, engine_attached_to

_PURPOSE = "batches that may be uneven"


@dataclass(frozen=True)
class Event:
    """A rank's next action, equal on all ranks that still have batches.

    Attributes:
        kind: forward, backward, clip norm, clip value or step.
        engine: index of the model among the joined ones.
        details: the arguments, for ranks out of batches.
    """

    kind: str
    engine: int = 0
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Joined:
    """A joined model, and this rank's last call of the model."""

    engine: ZeroEngine
    model: nn.Module
    inputs: tuple[tuple, dict[str, Any]] | None = None
    forwards: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)


class JoinedRanks:
    """Makes ranks without batches repeat the other ranks' actions until the last rank has run out.

    Args:
        engines: engines of the joined models.
        models: the models as called by the script.
        schedulers: learning-rate schedulers; a rank out of batches no longer steps them.
    """

    def __init__(self, engines: Sequence[ZeroEngine], models: Sequence[nn.Module], schedulers: Sequence[Any]):
        self._schedulers = list(schedulers)
        self._joined = [_Joined(engine=engine, model=model) for engine, model in zip(engines, models)]
        self._transport = engines[0].transport
        self._follows = False
        self._steps = 0
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "JoinedRanks":
        before, after = WeakHook(self, JoinedRanks._before_forward), WeakHook(self, JoinedRanks._after_forward)
        for joined in self._joined:
            # Before the engine's own hooks, which start gathers.
            self._handles += [
                joined.model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                joined.model.register_forward_hook(after, prepend=True),
            ]
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._follow()
        finally:
            for handle in self._handles:
                handle.remove()

    # ---- on ranks with batches ----

    def clips(self, engine: ZeroEngine, kind: str, parameters: Sequence[nn.Parameter], *values: float) -> None:
        """Announces a clip of the gradients of some parameters."""
        index = next((i for i, joined in enumerate(self._joined) if joined.engine is engine), None)
        if index is None or self._follows:
            return
        wanted = set(parameters)
        trained = list(engine.module.parameters())
        subset = [i for i, p in enumerate(trained) if p in wanted]
        # By index instead of by object, because the other ranks have their own parameters in the same order.
        self._tell(Event(kind, index, {"values": values, "parameters": subset if len(subset) < len(trained) else None}))

    def _before_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # A forward inside backward is a recomputation of activation checkpointing, which all ranks repeat in their backward.
        if self._follows or is_in_backward():
            return
        index = self._index_of(model)
        joined = self._joined[index]
        joined.inputs = (args, kwargs)
        joined.forwards += 1
        details = {
            "learns": torch.is_grad_enabled(),
            "training": model.training,
            "accumulates": joined.engine.is_accumulating,
        }
        self._tell(Event("forward", index, details))

    def _after_forward(self, model: nn.Module, _args: tuple, outputs: object) -> None:
        if self._follows or is_in_backward():
            return
        told: list[bool] = []
        index = self._index_of(model)
        number = self._joined[index].forwards
        # Hook every output, because a loss may use any of them. `told` makes only the first hook act.
        for tensor in differentiable_tensors(outputs):
            tensor.register_hook(lambda _: self._before_backward(index, number, told))

    def _index_of(self, model: nn.Module) -> int:
        return next(index for index, joined in enumerate(self._joined) if joined.model is model)

    def _before_backward(self, index: int, number: int, told: list[bool]) -> None:
        if told:
            return
        told.append(True)
        joined = self._joined[index]
        if number != joined.forwards:
            raise RuntimeError(
                "hf_zero: a backward inside join_uneven_inputs goes through more than one forward of a model, which "
                "ranks without batches cannot follow. Make the batches even (even_batches=True), or call the model "
                "once for each backward."
            )
        self._tell(Event("backward", index, {"accumulates": joined.engine.is_accumulating}))

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        for index, joined in enumerate(self._joined):
            for index, sharded in enumerate(joined.engine.optimizers):
                if sharded.optimizer is optimizer and not self._follows:
                    self._steps += 1
                    self._tell(Event("step", index, {"optimizer": index, "groups": _settings_of(optimizer)}))

    def _tell(self, event: Event) -> None:
        everyones: list[Event | None] = self._transport.exchange(event, _PURPOSE)
        self._check(everyones)

    def _check(self, everyones: Sequence[Event | None]) -> Event | None:
        """Returns the next action of the ranks with batches; None if there are none. Raises on all ranks if actions differ."""
        at_work = [(rank, event) for rank, event in enumerate(everyones) if event is not None]
        kinds = {(event.kind, event.engine, str(event.details.get("accumulates"))) for _, event in at_work}
        if len(kinds) > 1:
            said = "; ".join(f"rank {rank}: {_in_words(event)}" for rank, event in at_work)
            raise RuntimeError(
                f"hf_zero: inside join_uneven_inputs, ranks that have batches do different things ({said}). With gradient "
                "accumulation, the last batch of a rank ends its step early: make the batches even, or accumulate "
                "without `sync_with_dataloader`."
            )
        return at_work[0][1] if at_work else None

    # ---- on ranks out of batches ----

    def _follow(self) -> None:
        """Repeats the actions of the other ranks until all ranks have run out."""
        self._follows = True
        while True:
            # One exchange for each action of the other ranks; see [Note: ranks that have run out].
            event = self._check(self._transport.exchange(None, _PURPOSE))
            if event is None:
                break
            joined = self._joined[event.engine]
            if joined.inputs is None:
                raise RuntimeError(
                    "hf_zero: this rank had no batch inside join_uneven_inputs, but needs one to follow the others. "
                    "Give each rank at least one batch."
                )
            _DOES[event.kind](self, joined, event.details)
        self._catch_up()

    def _forward(self, joined: _Joined, details: dict[str, Any]) -> None:
        assert joined.inputs is not None
        args, kwargs = joined.inputs
        device = joined.engine.device
        was_training = joined.model.training
        joined.model.train(details["training"])
        # Restore the random state afterwards, because this rank's random numbers are for its own batches.
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.set_grad_enabled(details["learns"]),
            _accumulating(joined.engine, details),
        ):
            # The last batch again, because shapes and used layers must be realistic.
            joined.outputs = differentiable_tensors(joined.model(*args, **kwargs))
        joined.model.train(was_training)

    def _backward(self, joined: _Joined, details: dict[str, Any]) -> None:
        device = joined.engine.device
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            _accumulating(joined.engine, details),
        ):
            # Zeros through the same graph, so the same buckets fill in the same order and the collectives match the other
            # ranks'.
            torch.autograd.backward(joined.outputs, [torch.zeros_like(tensor) for tensor in joined.outputs])
        joined.outputs = []

    def _clip_norm(self, joined: _Joined, details: dict[str, Any]) -> None:
        max_norm, norm_type = details["values"]
        joined.engine.clip_grad_norm_(max_norm, norm_type, _chosen(joined.engine, details["parameters"]))

    def _clip_value(self, joined: _Joined, details: dict[str, Any]) -> None:
        [clip_value] = details["values"]
        joined.engine.clip_grad_value_(clip_value, _chosen(joined.engine, details["parameters"]))

    def _step(self, joined: _Joined, details: dict[str, Any]) -> None:
        optimizer = joined.engine.optimizers[details["optimizer"]].optimizer
        # Use the other ranks' learning rates, because this rank's scheduler no longer runs but it steps shards of all
        # parameters.
        _set_settings(optimizer, details["groups"])
        optimizer.step()
        # Zero the gradients for the script, whose loop has ended on this rank. Otherwise they would accumulate over steps.
        optimizer.zero_grad()

    def _catch_up(self) -> None:
        """Copies learning rates and schedulers from a rank with the most own steps."""
        optimizers = [sharded.optimizer for joined in self._joined for sharded in joined.engine.optimizers]
        settings = [_settings_of(optimizer) for optimizer in optimizers]
        mine = (self._steps, settings, [scheduler.state_dict() for scheduler in self._schedulers])
        most, settings, states = max(self._transport.exchange(mine, _PURPOSE), key=lambda told: told[0])
        if self._steps == most:
            return
        for scheduler, state in zip(self._schedulers, states):
            scheduler.load_state_dict(state)
        for optimizer, groups in zip(optimizers, settings):
            _set_settings(optimizer, groups)


_DOES = {
    "forward": JoinedRanks._forward,
    "backward": JoinedRanks._backward,
    "clip norm": JoinedRanks._clip_norm,
    "clip value": JoinedRanks._clip_value,
    "step": JoinedRanks._step,
}


@contextmanager
def joined_ranks(
    accelerator: Accelerator, models: Sequence[object], even_batches: bool | None
) -> Iterator[JoinedRanks | None]:
    """Opens the context of `accelerator.join_uneven_inputs`; yields None if no rank can run out of batches.

    Args:
        accelerator: the Accelerator.
        models: prepared models.
        even_batches: as in accelerate, overrides the loaders' setting inside the context.
    """
    if accelerator.num_processes == 1:
        yield None
        return
    joined = None if _is_even(accelerator, even_batches) else _make(accelerator, models)
    with _batches_made(accelerator, even_batches):
        if joined is None:
            yield None
            return
        with joined:
            yield joined


def _make(accelerator: Accelerator, models: Sequence[object]) -> JoinedRanks:
    engines = []
    for model in models:
        engine = (
            engine_attached_to(accelerator.unwrap_model(model, keep_torch_compile=False))
            if isinstance(model, nn.Module)
            else None
        )
        if engine is None:
            raise TypeError(
                f"hf_zero: join_uneven_inputs takes models that were prepared with their optimizers, not {type(model).__name__}."
            )
        if len(engine.models) > 1:
            raise ConfigError(
                "hf_zero: join_uneven_inputs does not support several models that share an optimizer. Make the batches even "
                "(even_batches=True), or give each model its own optimizer."
            )
        if any(getattr(m, "track_running_stats", False) for m in engine.model.modules()):
            raise ConfigError(
                f"hf_zero: join_uneven_inputs does not support {type(engine.model).__name__}: it has batch norms, and a rank "
                "without batches would add its last batch to their statistics again. Make the batches even (even_batches=True)."
            )
        if engine.config.out_of_memory == "halve":
            raise ConfigError(
                "hf_zero: join_uneven_inputs cannot be combined with `out_of_memory: halve`: ranks without batches would not "
                "know that a micro-batch was split. Make the batches even (even_batches=True), or remove the setting."
            )
        engines.append(engine)
    if not engines:
        raise TypeError("hf_zero: join_uneven_inputs got no model; pass the prepared models in a list.")
    if accelerator.scaler is not None:
        raise ConfigError(
            "hf_zero: join_uneven_inputs cannot be combined with loss scaling (float16): a rank without batches does not "
            "take part in the scale. Train in bfloat16, or make the batches even (even_batches=True)."
        )
    schedulers = [prepared.scheduler for prepared in accelerator._schedulers]
    return JoinedRanks(engines, [model for model in models if isinstance(model, nn.Module)], schedulers)


def _is_even(accelerator: Accelerator, even_batches: bool | None) -> bool:
    return accelerator.even_batches if even_batches is None else even_batches


@contextmanager
def _batches_made(accelerator: Accelerator, even_batches: bool | None) -> Iterator[None]:
    """Sets `even_batches` inside the context, for loaders over datasets with a length."""
    before: list[tuple[Any, bool]] = []
    for loader in accelerator._dataloaders if even_batches is not None else ():
        sampler: Any = getattr(loader, "batch_sampler", None)
        if not hasattr(sampler, "even_batches"):
            warnings.warn(
                "hf_zero: even_batches is only for datasets with a length; it does not change iterable datasets.",
                stacklevel=4,
            )
            continue
        before.append((sampler, sampler.even_batches))
        sampler.even_batches = even_batches
    try:
        yield
    finally:
        for sampler, was in before:
            sampler.even_batches = was


def _accumulating(engine: ZeroEngine, details: dict[str, Any]) -> AbstractContextManager[None]:
    return engine.no_sync() if details["accumulates"] else nullcontext()


def _chosen(engine: ZeroEngine, indices: list[int] | None) -> list[nn.Parameter] | None:
    parameters = list(engine.module.parameters())
    return None if indices is None else [parameters[index] for index in indices]


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the groups' settings, such as learning rates, without parameters."""
    return [{k: _plain(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _set_settings(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    for group, settings in zip(optimizer.param_groups, groups):
        for name, value in settings.items():
            if isinstance(group.get(name), torch.Tensor):
                # Fill the existing tensor, which a captured or compiled step reads.
                group[name].fill_(value)
            else:
                group[name] = value


def _in_words(event: Event) -> str:
    return event.kind + (" that only accumulates" if event.details.get("accumulates") else "")
