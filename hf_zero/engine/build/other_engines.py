"""Refuses models that DDP, FSDP or DeepSpeed have wrapped already, or another `ZeroEngine` trains."""

from torch import nn

from ...config import ConfigError
from ...engine_reference import engine_attached_to

_WRAPPERS = {
    "DistributedDataParallel": "DDP averages its gradients",
    "DataParallel": (
        "DataParallel copies it to the GPUs of this one process, as Trainer does for `python train.py` where it sees several; "
        "start a process for each GPU (torchrun, accelerate launch) or let it see one (CUDA_VISIBLE_DEVICES=0)"
    ),
    "FullyShardedDataParallel": "FSDP shards it",
    "FSDPModule": "FSDP (`fully_shard`) shards it",
    "DeepSpeedEngine": "DeepSpeed trains it",
}


def refuse_other_engines(model: nn.Module) -> None:
    """Raises `ConfigError` for a model that another engine has wrapped or sharded, whole or in part."""
    for name, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS]
        if kinds:
            what = repr(name) if name else "the model"
            raise ConfigError(
                f"hf_zero: {what} is of class {type(module).__name__}: {_WRAPPERS[kinds[0]]}. Two engines cannot own one model. "
                "Give hf_zero the plain model, which a wrapper has as `module`, before anything wraps it."
            )


def refuse_second_engine(model: nn.Module) -> None:
    """Raises `ValueError` for a model of which a live `ZeroEngine` has parameters in its buckets."""
    for name, parameter in model.named_parameters():
        engine = engine_attached_to(parameter)
        if engine is not None and (engine.trains(parameter) or parameter in engine.sharded.unit_of):
            raise ValueError(
                f"hf_zero: {name!r} is in the buckets of another ZeroEngine, and two cannot reduce its gradient. Call close() of "
                "that engine on all ranks (hf_zero.engine_of(model).close() finds it), and then build this one with a new "
                "optimizer; or give each engine a model of its own."
            )
