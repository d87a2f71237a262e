"""The sections `offload`, `comm` and `checkpoint` of the settings."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

from .checks import (
    AUTO,
    ConfigError,
    is_auto,
    not_built,
    number,
    one_of,
    parse_bytes,
    path_of_folder,
    refuse,
    seconds,
    to_python_numbers,
    whole_number,
)

# ---- The settings that stand below a key of their own: `offload`, `comm`, `comm.outer`, `checkpoint` ----


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where a shard's state lives; `none` is the training device."""

    optimizer: str = "none"
    """Where optimizer state, masters and reduced gradients are. `cpu`: host memory, where the step runs. `nvme`: state and
    masters in files below `nvme_path`, stepped one bucket at a time."""
    params: str = "none"
    """Stage 3: where this rank's shard of the parameters is, frozen ones included. `cpu`: host memory; `nvme`: files below
    `nvme_path`."""
    activations: str = "none"
    """`cpu` keeps what a training forward saves in host memory until backward; `nvme` is not built yet."""
    ratio: float = 1.0
    """Part of the state that `optimizer` moves; buckets whose gradients arrive first move first."""
    nvme_path: str | None = None
    """For `nvme`: an existing, writable folder on a local disk of every host."""
    speculate_bytes: int | str = AUTO
    """Bytes per rank for copies of state, with which buckets are stepped during backward: memory with `cpu`, disk with `nvme`.
    0: none. `auto`: half of what state leaves free beside an accelerator; 0 on the CPU, and for `optimizer: cpu` with `params:
    nvme`."""

    def __post_init__(self):
        to_python_numbers(self)
        for name in ("optimizer", "params", "activations"):
            one_of(f"offload.{name}", getattr(self, name), ("none", "cpu", "nvme"))
        if self.nvme_path is not None:
            path_of_folder("offload.nvme_path", self.nvme_path)
        in_files = [name for name in ("optimizer", "params") if getattr(self, name) == "nvme"]
        if in_files and self.nvme_path is None:
            raise ConfigError(
                f"hf_zero config: `offload.{in_files[0]}: nvme` needs `offload.nvme_path`: a folder on a local NVMe disk."
            )
        if not in_files and self.nvme_path is not None:
            raise ConfigError(
                "hf_zero config: `offload.nvme_path` is of `offload.optimizer: nvme` and `offload.params: nvme` (optimizer is "
                f"{self.optimizer}, params is {self.params}). Set one of those, or leave the path out."
            )
        # 0 goes with every place of state, since it asks for nothing. By type as well: False equals 0.
        is_said = type(self.speculate_bytes) is not int or self.speculate_bytes != 0
        if is_said and not is_auto(self.speculate_bytes):
            object.__setattr__(self, "speculate_bytes", parse_bytes("offload.speculate_bytes", self.speculate_bytes))
            if not self.moves_state:
                raise ConfigError(
                    "hf_zero config: `offload.speculate_bytes` is of `offload.optimizer: cpu` and `nvme` (optimizer is "
                    f"{self.optimizer}): copies of state in host memory or in files. Set one of those, or leave it out."
                )
        if self.activations == "nvme":
            raise not_built("offload.activations", "nvme", "use cpu: host memory, or recompute them (checkpointing)")
        number("offload.ratio", self.ratio, lambda ratio: 0 < ratio <= 1, "a number above 0, up to 1")
        if self.ratio != 1 and not self.moves_state:
            raise ConfigError(
                f"hf_zero config: `offload.ratio` is {self.ratio}, the part of the state that moves, and nothing moves with "
                "`offload.optimizer: none`. Set that to cpu or nvme, or leave the ratio out."
            )

    @property
    def files_folder(self) -> Path:
        """`nvme_path`, without which nothing is kept in files."""
        if self.nvme_path is None:
            raise AssertionError(
                "hf_zero: bug: files are needed without an `offload.nvme_path`. Open an issue with this traceback."
            )
        return Path(self.nvme_path)

    @property
    def moves_state(self) -> bool:
        """Whether optimizer state lives elsewhere than on the training device."""
        return self.optimizer != "none"

    @property
    def moves_params(self) -> bool:
        """Whether shards of parameters live elsewhere than on the training device."""
        return self.params != "none"


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """The optimizer of outer steps: SGD with Nesterov's momentum, on the way that models have gone since the last one."""

    lr: float = 0.7
    """1.0 without momentum is the plain mean of the models."""
    momentum: float = 0.9
    """0 keeps no state."""

    def __post_init__(self):
        to_python_numbers(self)
        number("comm.outer.lr", self.lr, lambda lr: 0 < lr <= 2, "a number above 0, up to 2")
        number("comm.outer.momentum", self.momentum, lambda momentum: 0 <= momentum < 1, "a number from 0, below 1")


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """How bytes travel between ranks."""

    shard_group_size: int | Literal["auto"] = AUTO
    """Neighbouring ranks that share one copy of the state. `auto`: all ranks; with `sync_every`, those of a node, or 1 on a
    single node."""
    node_size: int | Literal["auto"] = AUTO
    """Neighbouring ranks on one node; `auto` asks the launcher."""
    secondary_shard: str = "none"
    """Stage 3: `node` keeps gathered parameters in parts on a node's ranks until the step, so that backward gathers inside the
    node."""
    weights: str = "none"
    """`int8` sends parameters in blocks of 256 with one scale each, at stages 1 to 3."""
    gradients: str = "none"
    """`int8`, `int4`: likewise for gradients. The quantisation error is sent with the next gradients."""
    sync_every: int = 1
    """Steps that each shard group takes alone before an outer step joins the models (DiLoCo). Links between groups carry
    1/sync_every of the bytes. Not exact. 1: no outer steps."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    """`sync_every`: learning rate and momentum of the outer steps."""
    timeout_s: float | Literal["auto"] = AUTO
    """Limit for a collective that a rank never joins; the error names the rank. `auto`: the process group's (Trainer's
    `ddp_timeout`, or `timeout` of `InitProcessGroupKwargs` or `init_process_group`)."""
    late_s: float | Literal["auto"] = AUTO
    """Limit for a rank that is late at a training collective, a save, or stage 3's `state_dict()` or `gathered`; the error says
    where each rank is. `auto`: 120, or 600 on accelerators, at most `timeout_s`. 0: only `timeout_s` applies."""

    @property
    def limit_s(self) -> float:
        """Returns `timeout_s` in seconds, once the process group has resolved `auto`; see `Groups.create`."""
        if self.timeout_s == AUTO:
            raise AssertionError(
                "hf_zero: bug: `comm.timeout_s: auto` was read before it was resolved. Open an "
                "issue with this traceback."
            )
        return float(self.timeout_s)

    @property
    def meeting_timeout_s(self) -> float:
        """Seconds that ranks wait where they meet for whole parameters, as at any collective."""
        return self.limit_s if self.late_s == 0 else float(self.late_s)

    def __post_init__(self):
        to_python_numbers(self)
        # First: the least group size below depends on `sync_every`, which may still be anything.
        self._check_outer()
        for name, least in (("shard_group_size", 2 if self.sync_every == 1 else 1), ("node_size", 1)):
            whole_number(f"comm.{name}", getattr(self, name), least, also=(AUTO,))
        one_of("comm.secondary_shard", self.secondary_shard, ("none", "node"))
        one_of("comm.weights", self.weights, ("none", "int8"))
        one_of("comm.gradients", self.gradients, ("none", "int8", "int4"))
        seconds("comm.timeout_s", self.timeout_s, also=(AUTO,))
        # By type as well: False equals 0, and would switch the limit off.
        if type(self.late_s) not in (int, float) or self.late_s != 0:
            seconds("comm.late_s", self.late_s, also=(AUTO,))

    def _check_outer(self) -> None:
        whole_number("comm.sync_every", self.sync_every, 1, what=" of steps,")
        if not isinstance(self.outer, OuterConfig):
            raise refuse("comm.outer", self.outer, "a mapping of lr, momentum")
        if self.sync_every == 1 and self.outer != OuterConfig():
            raise ConfigError(
                "hf_zero config: `comm.outer` is of outer steps, and with `comm.sync_every: 1` there are none. Set "
                "`comm.sync_every` to 16, say, or leave it out."
            )
        if self.sync_every > 1 and self.gradients != "none":
            raise ConfigError(
                f"hf_zero config: `comm.gradients: {self.gradients}` with `comm.sync_every: {self.sync_every}`: gradients stay "
                "inside a shard group then, where links are fast. Leave one of them out."
            )

    @property
    def quantises(self) -> bool:
        """Whether weights or gradients travel in blocks of codes."""
        return self.weights != "none" or self.gradients != "none"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How checkpoints are written."""

    layout: str = "hf"
    """`hf`: all ranks write the files that `from_pretrained` reads. `sharded`: each rank writes its part, if need be to its
    host's own disk; `hf-zero consolidate` makes a model folder."""
    full_every: int = 0
    """At this interval a checkpoint of layout `hf` is written and kept whatever `save_total_limit` says; others are
    `sharded`."""
    on_failure: str = "stop"
    """After a failed save (a full disk), `stop` ends training; `continue` warns."""
    async_save: bool = True
    """Writes Trainer's checkpoints during training, from copies in up to half of the free host memory."""
    resume: str = "asked"
    """`asked`: Trainer resumes where `resume_from_checkpoint` says so. `auto`: from the newest good checkpoint of `output_dir`,
    if there is one, with its rows per step."""
    on_signal: str = "none"
    """On SIGTERM or SIGUSR1 to any rank, all ranks finish the step, save and end. `auto` saves in Trainer's `output_dir`, or in
    `checkpoints` of the Accelerator's `project_dir`. In a plain loop, a path with `{step}` names the folder."""

    def __post_init__(self):
        to_python_numbers(self)
        one_of("checkpoint.resume", self.resume, ("asked", AUTO))
        path_of_folder("checkpoint.on_signal", self.on_signal)
        if self.on_signal not in ("none", AUTO) and "{step}" not in self.on_signal:
            raise refuse(
                "checkpoint.on_signal", self.on_signal, "none, auto, the path of a folder that has {step} in it"
            )
        one_of("checkpoint.layout", self.layout, ("hf", "sharded"))
        whole_number("checkpoint.full_every", self.full_every, 0, what=" of steps, 0 for none,")
        one_of("checkpoint.on_failure", self.on_failure, ("stop", "continue"))
        one_of("checkpoint.async_save", self.async_save, (True, False))


# The settings of `ZeroConfig` as keyword arguments are typed, for editors and type checkers: `ZeroPlugin(stage=2, ...)`.
#
# `tests/config/test_config.py` holds them to the fields of the config, which say what each means.


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
    sync_every: int
    outer: OuterSettings | OuterConfig
    timeout_s: float | Literal["auto"]
    late_s: float | Literal["auto"]


class CheckpointSettings(TypedDict, total=False):
    """Fields of `CheckpointConfig`."""

    layout: str
    full_every: int
    on_failure: str
    async_save: bool
    resume: str
    on_signal: str


class ZeroSettings(TypedDict, total=False):
    """Fields of `ZeroConfig`."""

    stage: int | str
    bucket_bytes: int | str
    grad_accumulation: str
    param_dtype: str
    rounding: str
    moments: str
    reduce_dtype: str
    broadcast_buffers: bool
    check_replicas_every: int
    nonfinite: str
    out_of_memory: str
    report: bool | str
    kernels: str
    gather_dtype: str
    prefetch_units: int
    reshard_after_forward: bool | Literal["auto"]
    unit_modules: tuple[str, ...] | str
    unit_bytes: int | str
    offload: OffloadSettings | OffloadConfig
    comm: CommSettings | CommConfig
    checkpoint: CheckpointSettings | CheckpointConfig
