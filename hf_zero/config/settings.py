"""The settings of `ZeroConfig` as keyword arguments are typed, for editors and type checkers: `ZeroPlugin(stage=2, ...)`.

`tests/config/test_config.py` holds them to the fields of the config, which say what each means.
"""

from typing import Literal, TypedDict

from .parts import CheckpointConfig, CommConfig, OffloadConfig, OuterConfig


class OuterSettings(TypedDict, total=False):
    """Fields of `OuterConfig`."""

    lr: float
    momentum: float


class OffloadSettings(TypedDict, total=False):
    """Fields of `OffloadConfig`."""

    optimizer: str
    params: str
    activations: str
    ratio: float
    nvme_path: str | None
    speculate_bytes: int | str


class CommSettings(TypedDict, total=False):
    """Fields of `CommConfig`."""

    shard_group_size: int | Literal["auto"]
    node_size: int | Literal["auto"]
    secondary_shard: str
    weights: str
    gradients: str
    block_numel: int
    error_feedback: bool
    sync_every: int
    outer: OuterSettings | OuterConfig
    timeout_s: float | Literal["auto"]
    late_s: float | Literal["auto"]
    gather_timeout_s: float


class CheckpointSettings(TypedDict, total=False):
    """Fields of `CheckpointConfig`."""

    layout: str
    full_every: int
    on_failure: str
    async_save: bool
    snapshot_bytes: int | str
    resume: str


class ZeroSettings(TypedDict, total=False):
    """Fields of `ZeroConfig`."""

    stage: int | str
    bucket_bytes: int | str
    grad_accumulation: str
    param_dtype: str
    rounding: str
    moments: str
    reduce_dtype: str
    split_parameters: bool | Literal["auto"]
    overlap_param_gather: bool
    broadcast_buffers: bool
    check_replicas_every: int
    nonfinite: str
    nonfinite_limit: int
    out_of_memory: str
    report: bool | str
    kernels: str
    gather_dtype: str
    prefetch_units: int
    reshard_after_forward: bool | Literal["auto"]
    persist_below_numel: int
    unit_modules: tuple[str, ...] | str
    unit_bytes: int | str
    offload: OffloadSettings | OffloadConfig
    comm: CommSettings | CommConfig
    checkpoint: CheckpointSettings | CheckpointConfig
