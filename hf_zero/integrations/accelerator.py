"""The mixin of an Accelerator whose methods build and use engines."""

import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import DynamoBackend, compile_regions
from accelerate.utils.dataclasses import FP8BackendType
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..buckets.precision import for_evaluation, resolve_casts
from ..buckets.unread_weights import is_loaded
from ..checkpoint.commit import put_back
from ..checkpoint.manifest import Manifest
from ..config import ConfigError, ZeroConfig
from ..engine.compiled import is_compiled
from ..engine.engine import ZeroEngine
from ..engine.kept_state import keep_state, take_up_state
from ..engine.unsupported import refuse_meta, refuse_other_engines
from ..extras import extra
from ..hooks.tensors import reaches_no_parameter
from ..hooks.weak import EngineReference, WeakHook, engine_attached_to
from ..optimizer.scope import refuse_wrapper
from ..presence.error_hook import naming_lost_ranks
from ..read_ahead import ask_for
from ..step.sharded_optimizer import engine_stepped_by, whole_parameters
from .announce import announce, peak_at_start
from .elastic import warn_of_scaled_schedule
from .environment import refuse_earlier_accelerator
from .followed_loader import follow_loader
from .global_batch import micro_batches_of, rows_of_a_step
from .loop_stop import LoopStop, follow_signals, may_stop
from .loss_scaler import seat_scaler, unscale
from .no_sync import add_no_sync
from .progress_bars import progress_of
from .recorded_runs import RecordedAccelerator, begin_in_loop
from .resume_message import say_resumed
from .run_record import RunRecord
from .same_loops import refuse_other_loops
from .signals import StopSignals
from .skipped_steps import tell_of_skipped_steps
from .split_models import cut_sequences, refuse_other_split, without_split_models
from .state_folder import folder_to_fill, numbered_states, refuse_unless_state
from .state_io import ZERO_FOLDER, load_engine, refuse_faults, seal_state, steps_of, write_state
from .uneven_inputs import JoinedRanks, joined_ranks
from .without_engine import refuse_step_without_engine, refuse_training_alone

logger = get_logger(__name__)


class ZeroAcceleratorMixin(RecordedAccelerator):
    """Builds and uses an Accelerator's engines. An engine is built once a model and its optimizers are both prepared.

    Attributes:
        zero_config: settings of the engines.
        zero_plugin: the plugin that installed these methods.
        zero_cast_owner: which library casts to the compute dtype, in words for the log.
        zero_engines: one per model, or per set of models that share an optimizer, in the order in which they were built.
        zero_run: the record of a script run by `hf_zero.run`; None otherwise.
        zero_goes_on: whether Trainer resumes a run; its memory was already forecast at the first start.
        zero_stop: handles the signals after which the run saves and ends; None if signals are not followed.
    """

    zero_config: ZeroConfig
    zero_plugin: Any
    zero_cast_owner: str
    zero_engines: list[ZeroEngine]
    zero_run: RunRecord | None = None
    zero_goes_on: bool = False
    _zero_joined: JoinedRanks | None = None
    zero_stop: StopSignals | None = None
    _zero_steps_before: int = 0
    _models: list[nn.Module]
    _optimizers: list[Any]
    _zero_preparing: bool = False
    _zero_with_optimizer: bool = False
    _zero_early_optimizers: dict[torch.optim.Optimizer, RemovableHandle]

    def __getstate__(self) -> dict[str, Any]:
        """Excludes engines, their models and their optimizers from copies and pickles.

        Each rank stores only a part of their parameters, so a copy could not train with them. Prepare new ones with a copy.
        """
        # In Python 3.10, `object` has no `__getstate__`.
        state = dict(super().__getstate__() if hasattr(super(), "__getstate__") else self.__dict__)
        for name in ("zero_recorder", "zero_run", "_zero_joined", "zero_stop"):
            state.pop(name, None)
        mine = {id(optimizer) for engine in self.zero_engines for optimizer, _ in engine.state.groups()}
        state["_models"] = [m for m in self._models if self._engine_for(m) is None]
        state["_optimizers"] = [o for o in self._optimizers if id(_bare(o)) not in mine]
        # A prepared scheduler refers to its optimizer, so copying the scheduler would also copy the optimizer with its shards.
        state["_schedulers"] = [s for s in self._schedulers if not any(id(_bare(o)) in mine for o in s.optimizers)]
        return state | {"zero_engines": [], "_zero_early_optimizers": {}}

    # ---- prepare ----

    def _refuse_reset_state(self) -> None:
        """Raises accelerate's own AttributeError after `AcceleratorState._reset_state()`; the error names that call."""
        _ = self.distributed_type

    def prepare(self, *args, device_placement=None):
        self._refuse_reset_state()
        # Noted here because accelerate calls `prepare_model` with one model at a time, and the placement of a model depends on
        # the remaining arguments.
        self._zero_with_optimizer = any(isinstance(arg, torch.optim.Optimizer) for arg in args)
        # Before any model is placed, because `stage: auto` decides on which device a model is placed.
        self._choose_stage(args)
        # Before accelerate wraps the optimizers, because the wrapper keeps the Accelerator's scaler of that moment.
        seat_scaler(self, [arg for arg in args if isinstance(arg, nn.Module)])
        # Build no engine inside accelerate's prepare: an engine needs all optimizers of a model, and accelerate prepares the
        # arguments one at a time.
        self._zero_preparing = True
        try:
            result = super().prepare(*args, device_placement=device_placement)
        finally:
            self._zero_preparing = self._zero_with_optimizer = False
        # After accelerate's own prepare, which moves the model: the engine needs the final parameters.
        self._build_engines()
        for model in self._models:
            # Again, because accelerate's prepare marks each result after `prepare_model` has returned.
            _mark_prepared(model, False)
        return result

    def _choose_stage(self, args: Iterable[Any]) -> None:
        """Resolves `stage: auto` if `args` contain a model; collective in this case."""
        if self.zero_config.is_open:
            self.zero_config = extra("planner", "config_for")(self.zero_config, self, list(args))

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False):
        self._refuse_reset_state()
        self._choose_stage([model])
        is_evaluated = evaluation_mode and self._is_to_evaluate(model)
        is_sharded = engine_attached_to(model) is not None or is_evaluated or self._is_sharded_next(model)
        if self.zero_config.stage == 3 and is_sharded:
            # The whole model may not fit on the device, so the engine moves only this rank's shard there.
            device_placement = False
        if self.device.type == "cpu" and all(parameter.device.type == "cpu" for parameter in model.parameters()):
            # accelerate gives the CPU device an index, the rank, so `.to()` would copy the model.
            device_placement = False
        elif device_placement is not False:
            if not hasattr(model, "hf_device_map"):
                # `model.to` below would fail without naming the remedy.
                refuse_meta(model)
            # Read parameters that still lie in their checkpoint files before they are moved.
            for parameter in filter(is_loaded, model.parameters()):
                ask_for(parameter.data)
        refuse_other_engines(model)
        if self.mixed_precision == "fp8" and self.fp8_backend != FP8BackendType.AO:
            raise ConfigError(
                f"hf_zero: mixed_precision='fp8' with the backend {self.fp8_backend.value} is not built yet. Install torchao and "
                "pass kwargs_handlers=[AORecipeKwargs()], or use mixed_precision='bf16'."
            )
        compiler = self.state.dynamo_plugin
        settings = (self.mixed_precision, compiler.backend)
        # Also check the model inside: for a compiled model, the script passes the compiled wrapper.
        inside = self.unwrap_model(model, keep_torch_compile=False)
        is_again = settings in (model.__dict__.get(_PREPARED), inside.__dict__.get(_PREPARED))
        # If the settings are unchanged, accelerate must skip the model, because a second autocast would wrap the forward
        # again.
        _mark_prepared(model, is_again)
        # evaluation_mode: device, autocast and compilation, without wrapping in DistributedDataParallel.
        prepared = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        if is_again and compiler.backend != DynamoBackend.NO and not is_compiled(model):
            # Plain accelerate marks only the compiled wrapper. Without this, the script would train the bare model uncompiled.
            compiles = compile_regions if compiler.use_regional_compilation else torch.compile
            prepared = compiles(model, **compiler.to_kwargs())
        model.__dict__[_PREPARED] = settings
        _mark_prepared(model, False)
        original = self.unwrap_model(prepared, keep_torch_compile=False)
        original.__dict__[_EVALUATED] = evaluation_mode
        if self.zero_run is not None:
            self.zero_run.models += 1
        engine = engine_attached_to(original)
        if prepared is not original:
            # accelerate lists the model inside the wrapper, but the engine must know the wrapper, which the script calls.
            original.__dict__[_CALLED] = EngineReference(prepared)
            if engine is not None:
                engine.compile_layers(prepared)
        # The engine was built by another Accelerator, or by this one before `free_memory()`. From here on this Accelerator
        # saves, clips and closes with this engine.
        if engine is not None and engine not in self.zero_engines:
            self.zero_engines.append(engine)
        is_frozen = self.zero_config.stage == 3 and _is_frozen(original)
        if engine is None and (is_frozen or is_evaluated):
            # Built here instead of in _build_engines, because `prepare_model(teacher, evaluation_mode=True)` may be the only
            # call with this model.
            self._build_engine([original], [], [prepared], evaluates=is_evaluated)
        if engine is None and not is_frozen and self.num_processes > 1:
            # Not refused yet, because the optimizer may be prepared in a later call. The hook refuses the first training
            # forward without a training engine.
            prepared.register_forward_pre_hook(WeakHook(original, refuse_training_alone))
        if not self._zero_preparing:
            self._build_engines()
        return prepared

    def _is_sharded_next(self, model: nn.Module) -> bool:
        """Whether this call to prepare builds the engine: an optimizer is passed, or the model is frozen and needs none."""
        return self._zero_with_optimizer or _is_frozen(model)

    def _is_to_evaluate(self, model: nn.Module) -> bool:
        """Whether this call shards a trainable model for evaluation only."""
        config = self.zero_config
        is_shared = self.num_processes > 1 or config.offload.moves_params
        # A submodule of a prepared model is already sharded with the whole model.
        has_no_engine = all(engine_attached_to(parameter) is None for parameter in model.parameters())
        return config.stage == 3 and is_shared and has_no_engine and not _is_frozen(model)

    def _prepare_ao(self, *args):
        # By default accelerate replaces the weights by tensors for FSDP2, which casts before it gathers. The optimizer still
        # holds the original weights, so the replaced ones would not be trained; DDP has the same problem.
        recipe = self.ao_recipe_handler
        if recipe.config.enable_fsdp_float8_all_gather:
            logger.warning_once(
                "hf_zero: enable_fsdp_float8_all_gather of the fp8 recipe was turned off, because it requires FSDP2. With DDP, "
                "accelerate would not train the converted layers."
            )
            recipe.config = replace(recipe.config, enable_fsdp_float8_all_gather=False)
        # Skip models trained by an engine: new layers would lack the engine's hooks.
        models = [arg for arg in args if isinstance(arg, nn.Module) and self._engine_for(arg) is None]
        super()._prepare_ao(*models)
        return args

    def _prepare_tp(self, *args):
        # accelerate would look up DTensors in the model, and the engine has replaced them.
        return args

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None):
        self._refuse_reset_state()
        refuse_wrapper(_bare(optimizer))
        # With device placement, accelerate would load the optimizer's state into itself. The engine places the state together
        # with the parameters.
        if self._zero_preparing:
            return super().prepare_optimizer(optimizer, device_placement=False)
        # In a call without a model, the models prepared before decide whether losses are scaled (float16).
        seat_scaler(self, self._models)
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        self._build_engines()
        return prepared

    def _build_engines(self) -> None:
        """Builds an engine for each set of prepared models with a prepared optimizer outside of all engines."""
        bound = {id(o) for engine in self.zero_engines for o, _ in engine.state.groups()}
        optimizers = list(map(_bare, self._optimizers))
        called: dict[nn.Module, nn.Module] = {}
        for prepared in self._models:
            called.setdefault(self.unwrap_model(prepared, keep_torch_compile=False), prepared)
        # Models prepared only now, although an engine's optimizer already holds some of their parameters.
        late = [
            model for model in called if any(model not in e.models and e.has_outside(model) for e in self.zero_engines)
        ]
        waiting = [o for o in optimizers if id(o) not in bound or any(_holds(o, model) for model in late)]
        for models, mine in _sets_of(list(called), waiting, self.zero_engines):
            waiting = [o for o in waiting if o not in mine]
            going_on = self._going_on(models, mine)
            self._build_engine(models, [*going_on, *mine], [called[model] for model in models])
            # An engine steps these optimizers now, so remove the early hook, which would refuse each step.
            for optimizer in self._zero_early_optimizers.keys() & mine:
                self._zero_early_optimizers.pop(optimizer).remove()
        for optimizer in waiting:
            self._refuse_foreign(optimizer)
            # No model is prepared yet. Until one is, a step would train each rank separately.
            if optimizer not in self._zero_early_optimizers:
                hook = optimizer.register_step_pre_hook(refuse_step_without_engine)
                self._zero_early_optimizers[optimizer] = hook

    def _going_on(self, models: list[nn.Module], added: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Returns the optimizers prepared earlier for further parameters of the models, which `added` do not train."""
        taken = {p for optimizer in added for p in whole_parameters(optimizer)}
        prepared = [_bare(optimizer) for optimizer in self._optimizers]
        return [
            sharded.optimizer
            for former in _engines_of(models)
            for sharded in former.optimizers
            if sharded.optimizer in prepared and taken.isdisjoint(whole_parameters(sharded.optimizer))
        ]

    def _build_engine(
        self,
        models: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        prepared: list[nn.Module],
        *,
        evaluates: bool = False,
    ) -> None:
        refuse_earlier_accelerator(self)
        parameters = {p for model in models for p in model.parameters()}
        for engine in [each for each in self.zero_engines if each.evaluates and each.model not in models]:
            # An engine that only evaluates a submodule of these models, or a model containing them.
            if not parameters.isdisjoint(engine.model.parameters()):
                engine.close()
                self.zero_engines.remove(engine)
        for former in _engines_of(models):
            # Before the close, because the former engine's shards are the only copy of the state.
            keep_state(former)
            # Two engines cannot own the same parameter.
            former.close()
            self.zero_engines.remove(former)
        # The Accelerator writes the report of a run because the Accelerator knows a folder for the report; an engine refuses
        # the setting.
        config = replace(resolve_casts(self.zero_config, self.mixed_precision), report=False)
        if evaluates:
            config = for_evaluation(config)
        ddp = self.ddp_handler
        # accelerate builds no DDP wrapper here, so the engine has to follow DDP's settings.
        if ddp is not None and not ddp.broadcast_buffers:
            config = replace(config, broadcast_buffers=False)
        # Before the engine is built, because the forecast traces the model with its original parameters.
        is_told = self.is_main_process and bool(optimizers) and not self.zero_goes_on
        at_start = peak_at_start(self, models, optimizers, config) if is_told else None
        try:
            with progress_of("building", is_main=self.is_main_process) as show:
                engine = ZeroEngine(
                    models,
                    optimizers,
                    config,
                    # The script calls the wrapper of a compiled model, so the forward hooks belong on the wrapper.
                    entry=prepared,
                    # Below stage 3 accelerate has already moved the whole model, and the engine leaves the model on its
                    # device.
                    device=self.device if self.zero_config.stage == 3 else None,
                    on_progress=show,
                    # With either setting, DDP leaves a gradient None if no rank computes one, and the optimizer skips the
                    # parameter. Without them, the gradient is zeros.
                    find_unused_parameters=ddp is not None and (ddp.find_unused_parameters or ddp.static_graph),
                    evaluates=evaluates,
                )
            take_up_state(engine)
            for model in models:
                called = model.__dict__.get(_CALLED, EngineReference())()
                if called is not None:
                    engine.compile_layers(called)
        except Exception:
            self._forget(prepared, optimizers)
            raise
        # `end_cleanly` already waits for the other ranks at the end of this process, so the engine need not wait again.
        engine.transport.watch.is_left_by_others = True
        refuse_other_split(self, engine)
        refuse_other_loops(self, engine)
        if optimizers:
            cut_sequences(self, engine)
        self.zero_engines.append(engine)
        if self.zero_run is not None and optimizers:
            self.zero_run.engines += 1
        add_no_sync(engine, *models, *prepared)
        if engine.config.nonfinite == "skip":
            tell_of_skipped_steps(engine, self._optimizers)
        casts = f"{self.zero_cast_owner}{'; the loss is scaled' if self.scaler is not None else ''}"
        accumulates = micro_batches_of(self) > 1
        sp_size = getattr(self.parallelism_config, "sp_size", 1)
        announce(engine, casts, rows_of_a_step(self), at_start, accumulates=accumulates, sp_size=sp_size)
        begin_in_loop(self, engine)
        follow_signals(self, engine)

    def _forget(self, prepared: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        """Removes objects whose preparation failed from accelerate's lists, so a notebook can try again."""
        self._models = [m for m in self._models if m not in prepared]
        self._optimizers = [o for o in self._optimizers if not any(_bare(o) is refused for refused in optimizers)]

    def _refuse_foreign(self, optimizer: torch.optim.Optimizer) -> None:
        if self._models:
            self._forget([], [optimizer])
            raise ValueError(
                f"hf_zero: {type(optimizer).__name__} holds none of the parameters of the prepared models, so it "
                "would train nothing. Build it from the prepared model, after steps that replace parameters "
                "(resize_token_embeddings, get_peft_model)."
            )

    # ---- a step ----

    @contextmanager
    def no_sync(self, model: nn.Module):
        engine = self._engine_for(model)
        if engine is None:
            yield
        else:
            with engine.no_sync():
                yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        with ExitStack() as stack:
            if reaches_no_parameter(loss):
                for engine in self.zero_engines:
                    stack.enter_context(engine.inner_backwards())
            super().backward(loss, **kwargs)

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module):
        engine = self._engine_for(model)
        with engine.sync() if engine is not None else nullcontext():
            yield

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter] | torch.Tensor, max_norm: float, norm_type: float = 2):
        parameters = _listed(parameters)
        engine = self._engine_with(parameters)
        if engine is None or self._clips_before_reducing(engine):
            return super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        # Unscale before the norm is computed: the norm of scaled gradients is too large by the loss scale.
        unscale(self, engine)
        if self._zero_joined is not None:
            # Announce before the clip, which is collective: ranks without batches need the arguments to join the clip.
            self._zero_joined.clips(engine, "clip norm", parameters, float(max_norm), float(norm_type))
        return engine.clip_grad_norm_(float(max_norm), float(norm_type), parameters)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | torch.Tensor, clip_value: float) -> None:
        parameters = _listed(parameters)
        engine = self._engine_with(parameters)
        if engine is None or self._clips_before_reducing(engine):
            super().clip_grad_value_(parameters, clip_value)
        else:
            # Unscale before the values are clamped, for the same reason.
            unscale(self, engine)
            if self._zero_joined is not None:
                self._zero_joined.clips(engine, "clip value", parameters, float(clip_value))
            engine.clip_grad_value_(clip_value, parameters)

    def unscale_gradients(self, optimizer=None):
        wanted = (
            self._optimizers if optimizer is None else optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        )
        for engine in dict.fromkeys(engine_stepped_by(_bare(opt)) for opt in wanted):
            if engine is not None:
                unscale(self, engine)
        others = [opt for opt in wanted if engine_stepped_by(_bare(opt)) is None]
        if others:
            super().unscale_gradients(others)

    @contextmanager
    def join_uneven_inputs(self, joinables, even_batches=None):
        stop = self.zero_stop
        with stop.put_off() if isinstance(stop, LoopStop) else nullcontext():
            with joined_ranks(self, joinables, even_batches) as joined:
                self._zero_joined = joined
                try:
                    yield
                finally:
                    self._zero_joined = None

    @property
    def zero_steps(self) -> int:
        """Optimizer steps of the first engine's run, including the steps before the loaded state."""
        return self._zero_steps_before + (self.zero_engines[0].steps_taken if self.zero_engines else 0)

    def prepare_data_loader(self, data_loader, *args, **kwargs):
        return self._followed(super().prepare_data_loader(data_loader, *args, **kwargs))

    def skip_first_batches(self, dataloader, num_batches: int = 0):
        return self._followed(super().skip_first_batches(dataloader, num_batches))

    def _followed(self, loader: Any) -> Any:
        if self.zero_stop is not None or may_stop(self.zero_config.checkpoint):
            follow_loader(loader, WeakHook(self, ZeroAcceleratorMixin._batch_of_loop))
        return loader

    def _batch_of_loop(self) -> AbstractContextManager[None]:
        return self.zero_stop.batch() if isinstance(self.zero_stop, LoopStop) else nullcontext()

    # ---- accelerate's own collectives ----

    def gather(self, tensor):
        with naming_lost_ranks(self):
            return super().gather(tensor)

    def gather_for_metrics(self, input_data, use_gather_object=False):
        with naming_lost_ranks(self):
            return super().gather_for_metrics(input_data, use_gather_object=use_gather_object)

    def reduce(self, tensor, reduction="sum", scale=1.0):
        with naming_lost_ranks(self):
            return super().reduce(tensor, reduction=reduction, scale=scale)

    def pad_across_processes(self, tensor, dim=0, pad_index=0, pad_first=False):
        with naming_lost_ranks(self):
            return super().pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def wait_for_everyone(self):
        with naming_lost_ranks(self):
            super().wait_for_everyone()

    # ---- state ----

    def get_state_dict(self, model: nn.Module, unwrap: bool = True):
        engine = self._engine_for(model)
        if engine is not None:
            # An all-gather after the last step may still be writing to the parameters read here.
            engine.finish_parameters()
            if engine.saves_together:
                # As with FSDP, the writing process gets whole tensors in host memory, and the other processes get nothing.
                each_node = self.project_configuration.save_on_each_node
                wanted = self.is_local_main_process if each_node else self.is_main_process
                bare = self.unwrap_model(model, keep_torch_compile=False)
                state = engine.whole_state_dict(wanted=wanted, model=bare)
                if wanted or not engine.holds_whole_model:
                    # accelerate's savers look for tied weights in an OrderedDict only.
                    return OrderedDict(state)
                # peft looks for the names on every rank, so the other ranks return their compute parameters, as under DDP.
        return super().get_state_dict(model, unwrap=unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs):
        self._refuse_reset_state()
        if not self.zero_engines:
            return super().save_state(output_dir, safe_serialization=safe_serialization, **save_model_func_kwargs)
        began_s = time.perf_counter()
        clock = None if self.zero_stop is None else self.zero_stop.clock
        with (
            nullcontext() if clock is None else clock.saving(),
            folder_to_fill(self, self.zero_engines[0], output_dir) as (root, final, save),
        ):
            # All ranks have met in the barrier of `folder_to_fill`, so these collectives match.
            for engine in self.zero_engines:
                engine.synchronize("accelerator.save_state")
            with self._without_engines_optimizers(), without_split_models(self), self._copies_for_hooks():
                super().save_state(str(root), safe_serialization=safe_serialization, **save_model_func_kwargs)
            folders = [_zero_folder(root, index) for index in range(len(self.zero_engines))]
            manifests = [write_state(engine, folder, save) for engine, folder in zip(self.zero_engines, folders)]
            manifests[0] = replace(manifests[0], step=self.zero_steps)
            # Written last, because the first engine's manifest vouches for the whole folder.
            for engine, folder, manifest in reversed(list(zip(self.zero_engines, folders, manifests))):
                within = "" if folder is folders[0] else f"{folder.name}/"
                seal_state(engine, root, manifest, folder=folder.name, within=within)
        self.record_save(began_s, final)
        return final

    def load_state(self, input_dir: str | None = None, load_kwargs: dict | None = None, **load_model_func_kwargs):
        self._refuse_reset_state()
        if self.zero_engines:
            # Before anything is read or loaded: if only some ranks call this, the barrier raises and nothing has changed.
            engine = self.zero_engines[0]
            engine.world.barrier("accelerator.load_state", engine.config.comm.limit_s)
        folder = Path(input_dir).expanduser() if input_dir is not None else self._newest_state()
        if input_dir is not None and self.zero_engines:
            # Resolved, because a save replaces the target of a link.
            put_back([folder.resolve()], exchange=self.zero_engines[0].world.exchange)
            refuse_unless_state(folder)
        for engine in self.zero_engines:
            # Before accelerate writes into the parameters: an all-gather still under way would overwrite the loaded values
            # with the former ones.
            engine.finish_parameters()
        if self.zero_engines:
            refuse_faults(self.zero_engines[0], folder, ZERO_FOLDER)
            # accelerate would read the whole model into each device, which may have no room for it at stage 3.
            load_model_func_kwargs.setdefault("map_location", "cpu")
        # After `refuse_faults`, on which all ranks agree: an error on only one rank here would leave the others waiting.
        folders = [_zero_folder(folder, index) for index in range(len(self.zero_engines))]
        manifests = [Manifest.read(each) for each in folders]
        in_rows = [engine.model for engine, manifest in zip(self.zero_engines, manifests) if manifest.weights]
        with self._without_engines_optimizers(), without_split_models(self, in_rows) as whole:
            super().load_state(str(folder), load_kwargs=load_kwargs, **load_model_func_kwargs)
        if manifests and manifests[0].world_size != self.num_processes:
            # accelerate counts micro-batches. With another number of ranks, the count does not match; start a new step.
            self.step -= self.step % self.gradient_accumulation_steps
        # After accelerate's own load, because the master weights and the optimizer state are filled in after the parameters.
        for engine, own in zip(self.zero_engines, folders):
            if engine.model in in_rows or engine.model in whole:
                # Imported here because `.init` imports transformers' Trainer, which takes seconds.
                from .init import load_weights_into

                load_weights_into(engine, folder, rows=own.name, number=whole.get(engine.model, 0))
            load_engine(engine, own)
        if self.zero_engines:
            self._zero_steps_before = steps_of(folder) - self.zero_engines[0].steps_taken
            say_resumed(self.zero_engines[0], folder)
            self.resume_report(folder)
            warn_of_scaled_schedule(self, folder)

    def free_memory(self, *objects):
        for engine in self.zero_engines:
            # While the engines are still listed: at the end of the process, only the all-gathers of listed engines are
            # awaited.
            engine.finish_parameters()
        self.end_report()
        # An engine lives as long as its model and optimizer, and is found when they are prepared again.
        self.zero_engines = []
        return super().free_memory(*objects)

    def _newest_state(self) -> Path:
        """Returns the last folder of accelerate's automatic checkpoint naming."""
        is_automatic = self.project_configuration.automatic_checkpoint_naming
        numbered = numbered_states(self) if is_automatic else []
        if not numbered:
            why = (
                f"{self.project_dir}/checkpoints holds no checkpoint_N"
                if is_automatic
                else "accelerate's automatic naming, which would find the newest one, is off"
            )
            raise ValueError(
                f"hf_zero: load_state() was called without a folder, and {why}. Pass the folder that save_state wrote."
            )
        return numbered[-1]

    @contextmanager
    def _copies_for_hooks(self):
        """Gathers whole parameters on every rank for hooks of `register_save_state_pre_hook`, which may save on any rank."""
        with ExitStack() as stack:
            for engine in self.zero_engines if self._save_model_state_pre_hook else ():
                for model in engine.models:
                    stack.enter_context(engine.whole_copies("accelerator.save_state", wanted=True, model=model))
            yield

    @contextmanager
    def _without_engines_optimizers(self):
        """Hides the engines' optimizers from accelerate, which pickles whole optimizers; the engines save theirs as shards."""
        held = self._optimizers
        bound = {id(o) for engine in self.zero_engines for o, _ in engine.state.groups()}
        self._optimizers = [o for o in held if id(_bare(o)) not in bound]
        try:
            yield
        finally:
            self._optimizers = held

    def _engine_for(self, model: nn.Module) -> ZeroEngine | None:
        return engine_attached_to(self.unwrap_model(model, keep_torch_compile=False))

    def _engine_with(self, parameters: Iterable[nn.Parameter]) -> ZeroEngine | None:
        found = [engine for engine in self.zero_engines if any(engine.trains(p) for p in parameters)]
        if len(found) > 1:
            raise ValueError(
                "hf_zero: clip_grad_norm_ got parameters of several models with separate optimizers, which have separate "
                "gradient norms. Call it once for each model, or use one optimizer for all of the models."
            )
        if not found:
            self._refuse_rows(parameters)
        return found[0] if found else None

    def _clips_before_reducing(self, engine: ZeroEngine) -> bool:
        """Whether gradients are clipped while each rank accumulates its own; warns if the ranks have already summed theirs.

        Raises:
                RuntimeError: the gradients are scaled, and would be unscaled before the step has all of them.
        """
        if not engine.is_accumulating:
            return False
        when = "gradients are clipped before the last micro-batch of a step"
        what = "Clip them only if accelerator.sync_gradients is true."
        if self.scaler is not None:
            raise RuntimeError(
                f"hf_zero: {when}, but with loss scaling (float16) they can be unscaled only once. {what}"
            )
        if not engine.config.accumulates_locally:
            logger.warning_once(
                f"hf_zero: {when}. DDP would clip each rank's own gradients; hf_zero clips the ranks' sum so far. {what}"
            )
        return engine.config.accumulates_locally

    def _refuse_rows(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises ValueError for shards from `param_groups`: each rank would clip by the norm of its own part."""
        rows = {id(row.tensor) for engine in self.zero_engines for sharded in engine.optimizers for row in sharded.rows}
        if any(id(p) in rows for p in parameters):
            raise ValueError(
                "hf_zero: clip_grad_norm_ got parameters from optimizer.param_groups. Those are this rank's shards, so each rank "
                "would clip by the norm of its own shards. Pass model.parameters(), or some of them."
            )


def _listed(parameters: Iterable[nn.Parameter] | torch.Tensor) -> list[nn.Parameter]:
    # A tensor is iterable too, and its rows would be mistaken for parameters. A generator would be exhausted after the search
    # for the engine.
    return [cast(nn.Parameter, parameters)] if isinstance(parameters, torch.Tensor) else list(parameters)


_PREPARED = "_hf_zero_prepared"
"""Attribute of a model: the precision and the compiler backend it was prepared with."""

_EVALUATED = "_hf_zero_evaluated"
"""Attribute of a model: whether its last preparation used `evaluation_mode=True`."""


_CALLED = "_hf_zero_called"
"""Attribute of a model: the compiled module that `prepare` returned to the script for this model."""


def _mark_prepared(model: Any, is_prepared: bool) -> None:
    """Sets accelerate's mark. accelerate skips a marked model even if its settings are new.

    Under DDP the wrapper has the mark. Here it would be on the script's own model, and a plain Accelerator would later train this
    model without DDP.
    """
    model._is_accelerate_prepared = is_prepared


def _holds(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    return not set(model.parameters()).isdisjoint(whole_parameters(optimizer))


def _engines_of(models: list[nn.Module]) -> list[ZeroEngine]:
    """Returns the engines of the models, and the engines whose optimizers held parameters of a model not yet prepared."""
    found: dict[ZeroEngine, None] = {}
    for model in models:
        own = engine_attached_to(model)
        others = dict.fromkeys(map(engine_attached_to, model.parameters()))
        found |= {
            each: None for each in (own, *others) if each is not None and (each is own or each.has_outside(model))
        }
    return list(found)


def _sets_of(
    models: list[nn.Module], waiting: list[torch.optim.Optimizer], engines: list[ZeroEngine]
) -> list[tuple[list[nn.Module], list[torch.optim.Optimizer]]]:
    """Divides models and their waiting optimizers into sets without common parameters.

    Args:
        models: the prepared models, in order.
        waiting: the optimizers that are not yet in an engine.
        engines: the models of one of these engines stay in one set.
    """
    # A model prepared for evaluation, like any other, may be a submodule of a trained model.
    by_use = sorted(models, key=lambda model: bool(model.__dict__.get(_EVALUATED)))
    held = {model: set(model.parameters()) for model in by_use}
    whole = [
        model
        for index, model in enumerate(by_use)
        if not any(held[model] < held[other] for other in by_use)
        and not any(held[model] == held[other] for other in by_use[:index])
    ]
    sets: list[tuple[list[nn.Module], list[torch.optim.Optimizer]]] = []
    for optimizer in waiting:
        mine = [model for model in whole if _holds(optimizer, model)]
        mine += [
            other for engine in engines if set(mine) & set(engine.models) for other in engine.models if other in whole
        ]
        if not mine:
            continue
        touching = [each for each in sets if set(mine) & set(each[0])]
        members = set(mine).union(*(each[0] for each in touching))
        sets = [each for each in sets if each not in touching]
        sets.append(([m for m in whole if m in members], [*(o for each in touching for o in each[1]), optimizer]))
    return sets


def _is_frozen(model: nn.Module) -> bool:
    return not any(p.requires_grad for p in model.parameters())


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the torch optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _zero_folder(location: str | Path, index: int) -> Path:
    return Path(location) / (ZERO_FOLDER if index == 0 else f"{ZERO_FOLDER}_{index}")
