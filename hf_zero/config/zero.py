"""All settings together, read from YAML, a dict or a flag."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

from .checks import (
    AUTO,
    DTYPES,
    ConfigError,
    class_names,
    duration,
    is_auto,
    meaning_elsewhere,
    not_built,
    number,
    one_of,
    parse_bytes,
    path_of_folder,
    plain,
    read_yaml,
    refuse,
    refuse_cut,
    refuse_files_of_others,
    seconds,
    settings_of,
    shown,
    to_python_numbers,
    unknown_key,
    whole_number,
)

_MOST_MINUTES = 30_000
"""Three weeks, longer than any launcher lets a run continue."""

# ---- The sections of settings: `offload`, `comm`, `comm.outer`, `checkpoint` ----


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The memory of a shard's state; `none` is the training device."""

    optimizer: str = "none"
    """Memory of optimizer state and masters. `cpu`: host memory; `nvme`: files below `nvme_path`, read and written one bucket at
    a time. The step runs on a GPU with room for the gradients, else on the host."""
    params: str = "none"
    """Stage 3: memory of this rank's shard of the parameters, including frozen ones. `cpu`: host memory; `nvme`: files below
    `nvme_path`."""
    activations: str = "none"
    """`cpu` keeps the activations of a training forward in host memory until backward; `nvme` is not built yet."""
    ratio: float = 1.0
    """Fraction of the state that `optimizer` moves. Buckets whose gradients are ready first are moved first."""
    nvme_path: str | None = None
    """For `nvme`: an existing, writable folder on a local disk of every host."""

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
                "hf_zero config: `offload.nvme_path` needs `offload.optimizer: nvme` or `offload.params: nvme` (optimizer is "
                f"{self.optimizer}, params is {self.params}). Set one of these, or remove the path."
            )
        if self.activations == "nvme":
            raise not_built(
                "offload.activations", "nvme", "use cpu (host memory), or recompute them (activation checkpointing)"
            )
        number("offload.ratio", self.ratio, lambda ratio: 0 < ratio <= 1, "a number above 0, up to 1")
        if self.ratio != 1 and not self.moves_state:
            raise ConfigError(
                f"hf_zero config: `offload.ratio` is {self.ratio}, the offloaded fraction of the state, but "
                "`offload.optimizer: none` offloads nothing. Set `offload.optimizer` to cpu or nvme, or remove the ratio."
            )

    @property
    def files_folder(self) -> Path:
        """`nvme_path` as a path. Only called if something is stored in files."""
        if self.nvme_path is None:
            raise AssertionError(
                "hf_zero: bug: files are needed without an `offload.nvme_path`. Open an issue with this traceback."
            )
        return Path(self.nvme_path)

    @property
    def moves_state(self) -> bool:
        """Whether optimizer state is stored outside of the training device's memory."""
        return self.optimizer != "none"

    @property
    def moves_params(self) -> bool:
        """Whether parameter shards are stored outside of the training device's memory."""
        return self.params != "none"


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """The optimizer of outer steps: SGD with Nesterov momentum, on the models' change since the last outer step."""

    lr: float = 0.7
    """1.0 without momentum results in the plain mean of the models."""
    momentum: float = 0.9
    """0 keeps no state."""

    def __post_init__(self):
        to_python_numbers(self)
        number("comm.outer.lr", self.lr, lambda lr: 0 < lr <= 2, "a number above 0, up to 2")
        number("comm.outer.momentum", self.momentum, lambda momentum: 0 <= momentum < 1, "a number from 0, below 1")


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Communication between ranks."""

    shard_group_size: int | Literal["auto"] = AUTO
    """Number of neighboring ranks that share one copy of the state. `auto`: all ranks; with `sync_every`, the ranks of a node, or
    1 on a single node."""
    node_size: int | Literal["auto"] = AUTO
    """Number of neighboring ranks on one node; `auto` asks the launcher."""
    secondary_shard: str = "none"
    """Stage 3: `node` keeps gathered parameters sharded over a node's ranks until the step, so that backward gathers inside the
    node."""
    weights: str = "none"
    """`int8` sends parameters in blocks of 256 with one scale each, at stages 1 to 3."""
    gradients: str = "none"
    """`int8` sends gradients in such blocks. The quantization error is sent with the next gradients."""
    sync_every: int = 1
    """Number of steps that each shard group makes on its own before an outer step joins the models (DiLoCo). Links between groups
    carry 1/sync_every of the bytes. Losses differ from DDP's. 1: no outer steps."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    """With `sync_every`: learning rate and momentum of the outer steps."""
    timeout_s: float | Literal["auto"] = AUTO
    """Time limit of a collective that a rank never joins; the error names the rank. `auto`: the process group's (Trainer's
    `ddp_timeout`, or `timeout` of `InitProcessGroupKwargs` or `init_process_group`)."""
    late_s: float | Literal["auto"] = AUTO
    """Time limit for a rank that is late for a training collective, a save, or stage 3's `state_dict()` or `gathered`; the error
    shows where each rank is. `auto`: 120, or 600 on accelerators, at most `timeout_s`. 0: only `timeout_s` applies."""

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
        """Time limit, in seconds, of the barrier before a gather of whole parameters, the same as for any collective."""
        return self.limit_s if self.late_s == 0 else float(self.late_s)

    def __post_init__(self):
        to_python_numbers(self)
        # Check this first: the smallest group size below depends on `sync_every`, which may still have any value.
        self._check_outer()
        for name, least in (("shard_group_size", 2 if self.sync_every == 1 else 1), ("node_size", 1)):
            whole_number(f"comm.{name}", getattr(self, name), least, also=(AUTO,))
        one_of("comm.secondary_shard", self.secondary_shard, ("none", "node"))
        one_of("comm.weights", self.weights, ("none", "int8"))
        one_of("comm.gradients", self.gradients, ("none", "int8"))
        seconds("comm.timeout_s", self.timeout_s, also=(AUTO,))
        # Compare the type as well: False equals 0, and would disable the limit.
        if type(self.late_s) not in (int, float) or self.late_s != 0:
            seconds("comm.late_s", self.late_s, also=(AUTO,))

    def _check_outer(self) -> None:
        whole_number("comm.sync_every", self.sync_every, 1, what=" of steps,")
        if not isinstance(self.outer, OuterConfig):
            raise refuse("comm.outer", self.outer, "a mapping of lr, momentum")
        if self.sync_every == 1 and self.outer != OuterConfig():
            raise ConfigError(
                "hf_zero config: `comm.outer` configures outer steps, and `comm.sync_every: 1` has none. Set `comm.sync_every` "
                "to 16, for example, or remove `comm.outer`."
            )
        if self.sync_every > 1 and self.gradients != "none":
            raise ConfigError(
                f"hf_zero config: `comm.gradients: {self.gradients}` cannot be combined with `comm.sync_every: "
                f"{self.sync_every}`: gradients then stay inside a shard group, where links are fast. Remove one of the two."
            )

    @property
    def quantizes(self) -> bool:
        """Whether weights or gradients are sent as blocks of codes."""
        return self.weights != "none" or self.gradients != "none"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How checkpoints are written."""

    layout: str = "hf"
    """`hf`: all ranks write the files that `from_pretrained` reads. `sharded`: each rank writes its part, to its host's own disk
    if the disk is not shared; `hf-zero consolidate` makes a model folder."""
    full_every: int = 0
    """Interval in steps at which a checkpoint of layout `hf` is written, and kept regardless of `save_total_limit`; all others
    are `sharded`."""
    on_failure: str = "stop"
    """After a failed save (a full disk), `stop` ends training; `continue` warns."""
    async_save: bool = True
    """Writes Trainer's checkpoints during training, from copies in up to half of the free host memory."""
    resume: str = "asked"
    """`asked`: Trainer resumes if `resume_from_checkpoint` is set. `auto`: from the newest good checkpoint of `output_dir`, if
    there is one, with its number of samples per step."""
    on_signal: str = "none"
    """On SIGTERM or SIGUSR1 to any rank, all ranks finish the step, save and exit. `auto` saves in Trainer's `output_dir`, or in
    `checkpoints` of the Accelerator's `project_dir`. In a plain loop, set a path with `{step}`."""
    every_minutes: float = 0.0
    """A crash costs at most this many minutes of training and one step: the run saves before more time has passed since the last
    save, to the folder of `on_signal`. 0 saves only at steps."""
    budget: str = "none"
    """The job's time limit, such as `3h40m`. The run saves and exits before the limit, with status 143, as after SIGTERM."""

    def __post_init__(self):
        to_python_numbers(self)
        allowed = f"0, or a number of minutes from 0.01 to {_MOST_MINUTES}"
        number("checkpoint.every_minutes", self.every_minutes, lambda m: m == 0 or 0.01 <= m <= _MOST_MINUTES, allowed)
        duration("checkpoint.budget", self.budget)
        one_of("checkpoint.resume", self.resume, ("asked", AUTO))
        path_of_folder("checkpoint.on_signal", self.on_signal)
        if self.on_signal not in ("none", AUTO) and "{step}" not in self.on_signal:
            raise refuse(
                "checkpoint.on_signal", self.on_signal, "none, auto, or the path of a folder with {step} in the path"
            )
        one_of("checkpoint.layout", self.layout, ("hf", "sharded"))
        whole_number("checkpoint.full_every", self.full_every, 0, what=" of steps, 0 for none,")
        one_of("checkpoint.on_failure", self.on_failure, ("stop", "continue"))
        one_of("checkpoint.async_save", self.async_save, (True, False))

    @property
    def budget_s(self) -> float | None:
        """`budget` in seconds; None without one."""
        return duration("checkpoint.budget", self.budget)

    @property
    def is_timed(self) -> bool:
        """Whether the run saves or ends at certain times."""
        return self.every_minutes > 0 or self.budget != "none"


# Types for the settings of `ZeroConfig` as keyword arguments, for editors and type checkers: `ZeroPlugin(stage=2, ...)`.
#
# `tests/config/test_config.py` compares them with the fields of the config, where each setting is explained.


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
    every_minutes: float
    budget: str


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


_NESTED: dict[str, type] = {"offload": OffloadConfig, "comm": CommConfig, "checkpoint": CheckpointConfig}


# ---- All settings together ----

_SWITCHES = ("true", "false", "yes", "no", "on", "off", "none", "auto")
_NESTED_IN_COMM: dict[str, type] = {"outer": OuterConfig}


@dataclass(frozen=True, kw_only=True, repr=False)
class ZeroConfig:
    """The settings of an engine. Every field has a default suited to BERT- and GPT-class fine-tuning.

    Args:
        stage: 0 shards nothing, like DDP; 1 shards the optimizer state; 2 also gradients; 3 also parameters. `auto`: accelerate
            and Trainer choose the fastest stage that fits in the free memory, and choose `offload`, `bucket_bytes` and
            `prefetch_units` unless they are set.
        bucket_bytes: bytes of gradients, in the reduce dtype, that are reduced together; `auto` depends on model, ranks and
            device.
        grad_accumulation: `local` keeps whole gradients between micro-batches and reduces once per step, in DDP's order of
            addition. `sharded` reduces each micro-batch, at stages 2 and 3. `auto`: local at stages 0 and 1, else sharded.
        param_dtype: dtype of parameters in forward and backward; `auto` keeps the model's. With a 16-bit dtype, the shard also
            keeps an fp32 master. float16 needs loss scaling, which accelerate and Trainer do.
        gather_dtype: dtype in which stage 3 gathers float32 parameters; shards, checkpoints and `gathered` stay float32.
            `auto`: bfloat16 under bf16 mixed precision unless `param_dtype` is set; else float32.
        rounding: how a bfloat16 parameter is rounded from its float32 update: `nearest` rounds a master that the shard keeps;
            `stochastic` rounds at random, in proportion to the distance, and keeps no master.
        moments: `8bit` stores the optimizer's moments in blocks of 256 8-bit codes with one scale each, and steps one bucket at
            a time.
        reduce_dtype: dtype in which gradients are sent; `auto`: each parameter's dtype.
        broadcast_buffers: sends rank 0's buffers (batch-norm statistics) before each training forward, like DDP.
        check_replicas_every: interval in steps at which ranks compare checksums: of the copies of parameters and optimizer
            state at all steps since the last comparison, of each rank's own copy between two updates, and of the last step's
            messages, gradients and gathered layers. A difference ends the run.
        nonfinite: on NaN or infinite gradients, `stop` ends the run before the step; `skip` drops the step on all ranks, up to
            ten in a row; `ignore` does not check.
        out_of_memory: when a forward or backward runs out of memory, `stop` ends the run; `halve` repeats the step in twice as
            many micro-batches on all ranks, at stages 0 to 2, with Trainer or `hf_zero.Rescue`.
        report: logs the run on rank 0 and writes a page at its end; `true`: in Trainer's `output_dir`, or accelerate's
            `logging_dir` or `project_dir`.
        kernels: fused kernels for gradient norms and for AdamW, Adam, SGD and Lion. `auto`: if triton runs on the training
            device; `always`: also without triton, as plain torch operations.
        prefetch_units: number of units (layers) that stage 3 gathers ahead of the one in use.
        reshard_after_forward: `true` drops a unit's gathered parameters after its forward and gathers them again for backward.
            `false` keeps them until the step, with stage 2's memory and traffic. `auto` keeps them if they need less than a
            quarter of the free memory.
        unit_modules: classes of modules that stage 3 gathers one at a time; `auto` finds the layers.
        unit_bytes: stage 3 gathers consecutive layers together until they have this size; 0 gathers each separately. `auto`:
            16 MiB on accelerators, 1 MiB on the CPU, 0 with `unit_modules`.
    """

    stage: int = 2
    bucket_bytes: int | str = AUTO
    grad_accumulation: str = AUTO
    param_dtype: str = AUTO
    rounding: str = "nearest"
    moments: str = "32bit"
    reduce_dtype: str = AUTO
    broadcast_buffers: bool = True
    check_replicas_every: int = 0
    nonfinite: str = "stop"
    out_of_memory: str = "stop"
    report: bool | str = False
    kernels: str = AUTO
    gather_dtype: str = field(default=AUTO, metadata={"stage": 3})
    prefetch_units: int = field(default=1, metadata={"stage": 3})
    reshard_after_forward: bool | Literal["auto"] = field(default=True, metadata={"stage": 3})
    unit_modules: tuple[str, ...] | str = field(default=AUTO, metadata={"stage": 3})
    unit_bytes: int | str = field(default=AUTO, metadata={"stage": 3})
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self):
        # Convert first: the checks below accept only Python's own types, and would refuse numpy's numbers and `"2"`.
        to_python_numbers(self)
        if is_auto(self.stage):
            self._check_as_any_stage()
            return
        for name, kind in _NESTED.items():
            if not isinstance(getattr(self, name), kind):
                keys = _names(kind)
                raise refuse(
                    name, getattr(self, name), f"a mapping of {', '.join(keys)}; as text: {name}.{keys[0]}=..."
                )
        # Sections are checked first, because the checks from here on read their fields.
        one_of("stage", self.stage, (0, 1, 2, 3, AUTO))
        if not is_auto(self.bucket_bytes):
            object.__setattr__(self, "bucket_bytes", parse_bytes("bucket_bytes", self.bucket_bytes))
        if not is_auto(self.unit_bytes):
            object.__setattr__(self, "unit_bytes", parse_bytes("unit_bytes", self.unit_bytes, least=0))
        one_of("grad_accumulation", self.grad_accumulation, (AUTO, "local", "sharded"))
        if self.grad_accumulation == "sharded" and self.stage < 2:
            raise ConfigError(
                f"hf_zero config: `grad_accumulation: sharded` needs stage 2 (stage is {self.stage}): below it a rank "
                "keeps whole gradients between micro-batches. Use `local` or `auto`, or set `stage: 2`."
            )
        for name in ("param_dtype", "reduce_dtype"):
            one_of(name, getattr(self, name), (AUTO, *DTYPES))
        self._check_gather_dtype()
        whole_number("check_replicas_every", self.check_replicas_every, 0, what=" of steps, 0 for never,")
        whole_number("prefetch_units", self.prefetch_units, 0)
        one_of("rounding", self.rounding, ("nearest", "stochastic"))
        for name in ("optimizer", "params"):
            value = getattr(self.offload, name)
            if self.rounding == "stochastic" and value != "none":
                raise ConfigError(
                    f"hf_zero config: `rounding: stochastic` keeps no master for `offload.{name}: {value}` to offload. Leave "
                    f"`rounding` at nearest, or `offload.{name}` at none."
                )
        if self.rounding == "stochastic" and self.comm.weights != "none":
            raise ConfigError(
                f"hf_zero config: `comm.weights: {self.comm.weights}` rounds values of fp32 masters, but `rounding: "
                "stochastic` keeps no masters. Remove one of the two."
            )
        one_of("kernels", self.kernels, (AUTO, "always", "never"))
        self._check_report()
        one_of("reshard_after_forward", self.reshard_after_forward, (True, False, AUTO))
        if not is_auto(self.unit_modules):
            object.__setattr__(self, "unit_modules", class_names("unit_modules", self.unit_modules))
        if not isinstance(self.broadcast_buffers, bool):
            raise refuse("broadcast_buffers", self.broadcast_buffers, "true, false")
        one_of("moments", self.moments, ("32bit", "8bit"))
        self._check_nonfinite()
        self._check_out_of_memory()
        self._refuse_settings_of_shards()
        self._refuse_settings_with_outer_steps()
        self._refuse_settings_of_stage_3()

    def _check_report(self) -> None:
        if isinstance(self.report, bool):
            return
        if type(self.report) is str and self.report.strip().lower() in _SWITCHES:
            raise refuse("report", self.report, "true or false without quotes, or the path of a folder")
        path_of_folder("report", self.report)

    def _check_out_of_memory(self) -> None:
        one_of("out_of_memory", self.out_of_memory, ("stop", "halve"))
        hindrances: dict[str, tuple[Any, Any, str]] = {
            "comm.gradients": (
                self.comm.gradients,
                "none",
                "quantization errors of earlier gradients would be lost",
            ),
            "comm.sync_every": (
                self.comm.sync_every,
                1,
                "groups of ranks that step separately would not halve together",
            ),
        }
        if self.out_of_memory == "halve" and self.stage == 3:
            raise ConfigError(
                "hf_zero config: `out_of_memory: halve` cannot be combined with `stage: 3`: the other ranks wait in gathers "
                "for the rank that failed. Set `stage: 2`, or use activation checkpointing."
            )
        for name, (value, without, reason) in hindrances.items():
            if self.out_of_memory == "halve" and value != without:
                raise ConfigError(
                    f"hf_zero config: `out_of_memory: halve` cannot be combined with `{name}: {value}`: {reason}. Remove one "
                    "of the two."
                )

    def _check_nonfinite(self) -> None:
        one_of("nonfinite", self.nonfinite, ("stop", "skip", "ignore"))
        if self.nonfinite == "skip" and self.comm.sync_every > 1:
            raise ConfigError(
                f"hf_zero config: `nonfinite: skip` cannot be combined with `comm.sync_every: {self.comm.sync_every}`: groups "
                "of ranks that step separately would not skip together. Remove one of the two."
            )

    def _check_as_any_stage(self) -> None:
        """Checks a config with `stage: auto` as stage 3, or as stage 2 with `out_of_memory: halve`, which stage 3 refuses."""
        checked = dataclasses.replace(self, stage=2 if self.out_of_memory == "halve" else 3)
        for field_ in dataclasses.fields(self):
            if field_.name != "stage":
                # Copy the checked values: texts became numbers there, and equal settings have to compare equal.
                object.__setattr__(self, field_.name, getattr(checked, field_.name))

    def _check_gather_dtype(self) -> None:
        one_of("gather_dtype", self.gather_dtype, (AUTO, "float32", "bfloat16"))
        if self.gather_dtype != AUTO and self.param_dtype not in (AUTO, "float32"):
            raise ConfigError(
                f"hf_zero config: `gather_dtype: {self.gather_dtype}` needs float32 parameters, but `param_dtype: "
                f"{self.param_dtype}` leaves none. Remove one of the two."
            )

    def _refuse_settings_of_stage_3(self) -> None:
        for field_ in dataclasses.fields(self):
            if field_.metadata.get("stage") == 3 and self.stage < 3 and getattr(self, field_.name) != field_.default:
                raise ConfigError(
                    f"hf_zero config: `{field_.name}` needs stage 3, which shards parameters (stage is {self.stage}). Set "
                    "`stage: 3`, or remove it."
                )
        if self.offload.moves_params and self.stage < 3:
            raise ConfigError(
                f"hf_zero config: `offload.params: {self.offload.params}` needs stage 3, but `stage` is {self.stage}, which "
                "keeps whole parameters on the training device. Set `stage: 3`, or remove it; `offload.optimizer` works at "
                "every stage."
            )

    def _refuse_settings_of_shards(self) -> None:
        if self.stage == 0 and self.comm.shard_group_size != AUTO:
            raise ConfigError(
                f"hf_zero config: `comm.shard_group_size: {self.comm.shard_group_size}` needs stages 1 to 3: stage 0 shards "
                "nothing. Set `stage: 1`, or leave it at auto."
            )
        if self.comm.secondary_shard != "none" and (self.stage < 3 or self.reshard_after_forward is False):
            raise ConfigError(
                f"hf_zero config: `comm.secondary_shard: {self.comm.secondary_shard}` needs the gathers of stage 3 in "
                f"backward, but there are none (stage is {self.stage}, reshard_after_forward {self.reshard_after_forward}). "
                "Remove it."
            )
        for name in ("weights", "gradients"):
            value = getattr(self.comm, name)
            if self.stage == 0 and value != "none":
                raise ConfigError(
                    f"hf_zero config: `comm.{name}: {value}` needs stages 1 to 3, which send shards of {name} (stage is 0, "
                    "which all-reduces whole gradients and sends no weights). Set `stage: 1`, or leave it at none."
                )

    def _refuse_settings_with_outer_steps(self) -> None:
        if self.comm.sync_every == 1:
            return
        others: dict[str, int | str] = {}
        if self.rounding != "nearest":
            others["rounding"] = self.rounding
        if self.param_dtype == "float16":
            others["param_dtype"] = self.param_dtype
        for name, value in others.items():
            raise ConfigError(
                f"hf_zero config: `{name}: {value}` cannot be combined with `comm.sync_every: {self.comm.sync_every}`: outer "
                "steps need the current masters of all groups at the same step. Remove one of the two."
            )

    @property
    def is_open(self) -> bool:
        """Whether the stage is still to be chosen (`stage: auto`). Engines refuse such a config."""
        return is_auto(self.stage)

    @property
    def may_shard_parameters(self) -> bool:
        """Whether the stage is 3, or may become 3."""
        return self.is_open or self.stage == 3

    @property
    def steps_by_bucket(self) -> bool:
        """Whether an optimizer steps one bucket at a time, so a rank's parameters are never all in memory."""
        offload = self.offload
        in_files = offload.optimizer == "nvme" or (offload.optimizer == "cpu" and offload.params == "nvme")
        return in_files or self.rounding == "stochastic" or self.quantizes_moments

    @property
    def quantizes_moments(self) -> bool:
        """Whether moments are kept in 8-bit blocks."""
        return self.moments == "8bit"

    @property
    def accumulates_locally(self) -> bool:
        """Whether whole gradients are kept between micro-batches."""
        return self.grad_accumulation == "local" or (self.grad_accumulation == AUTO and self.stage < 2)

    def get_device_mesh(self, *_args: object) -> None:
        """Refuses a config as accelerate's `parallelism_config`."""
        raise ConfigError("hf_zero: parallelism_config is a ZeroConfig. Pass a ZeroPlugin: ZeroPlugin(config).")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "ZeroConfig":
        """Builds a config from a nested mapping, such as parsed YAML. Errors for unknown keys name the most similar key."""
        if not isinstance(settings, Mapping):
            raise refuse("config", settings, f"a mapping of {', '.join(_names(cls))}")
        refuse_files_of_others(settings, "this mapping")
        return _build(cls, settings, "")

    @classmethod
    def from_yaml(cls, path: str | Path) -> "ZeroConfig":
        """Reads a YAML file. An empty file results in the defaults."""
        path = Path(path)
        settings = read_yaml(path)
        if settings is not None and not isinstance(settings, Mapping):
            raise ConfigError(
                f"hf_zero config: {path} holds {type(settings).__name__}, not a mapping such as `stage: 2`."
            )
        refuse_files_of_others(settings or {}, path.name)
        return cls.from_dict(settings or {})

    @classmethod
    def from_flag(cls, text: str, name: str = "config") -> "ZeroConfig":
        """Parses a command-line value: a stage (`2`), settings (`stage=2,grad_accumulation=local`) or a YAML path.

        Args:
            name: name of the value in error messages.
        """
        text = text.strip()
        if re.fullmatch(r"[+-]?[0-9]{1,9}", text):
            return cls(stage=int(text))
        if text == AUTO:
            return cls.from_dict({"stage": AUTO})
        is_path = Path(text).suffix.lower() in (".yaml", ".yml", ".json")
        first = re.split(r"[.=\s]", text, maxsplit=1)[0]
        # Settings may contain a path, such as `report=runs/log.json`, and a path may contain `=`. The first word decides.
        if is_path and not ("=" in text and first in _names(cls)):
            return cls.from_yaml(text)
        if "=" not in text:
            raise refuse(name, text, f"{_FLAGS}{_meant(text)}")
        return cls.from_dict(settings_of(text))

    @classmethod
    def of(cls, value: "ConfigLike", name: str = "config") -> "ZeroConfig":
        """Builds a config from any supported form: stage number, YAML path, flag text, mapping, config, or None.

        Args:
            name: name of the value in error messages.
        """
        try:
            return cls._of(plain(value), name)
        except ConfigError as error:
            if name == "config" or name in str(error):
                raise
            # Suppress the first error, because the traceback would show the same sentence twice.
            raise ConfigError(re.sub(r"^hf_zero( config)?:", rf"\g<0> in {name},", str(error))) from None

    @classmethod
    def _of(cls, value: Any, name: str) -> "ZeroConfig":
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if isinstance(value, Path):
            return cls.from_yaml(value)
        if isinstance(value, str):
            return cls.from_flag(value, name)
        if type(value) is int:
            return cls(stage=value)
        if isinstance(value, type):
            raise ConfigError(f"hf_zero: {name} is the class {value.__name__}. Pass an object: {value.__name__}(...).")
        raise refuse(name, value, "a stage number, a YAML path, a mapping or a ZeroConfig")

    def __repr__(self) -> str:
        return f"{type(self).__name__}.from_dict({self.changes()})"

    def changes(self) -> dict[str, Any]:
        """Returns the stage and all changed fields. `from_dict` builds an equal config from the result."""
        return {"stage": self.stage, **_changes(self)}

    def to_dict(self) -> dict[str, Any]:
        """Returns a nested dict of plain values. `from_dict` builds an equal config from the dict."""
        return dataclasses.asdict(self)


ConfigLike: TypeAlias = ZeroConfig | Mapping[str, Any] | str | Path | int | None
"""Types accepted by `ZeroConfig.of`."""

_FLAGS = "a stage (0, 1, 2, 3, auto), settings such as stage=2,grad_accumulation=local, a .yaml path"
_SPELLED = {"zero": 0, "one": 1, "two": 2, "three": 3}
_OF_FSDP = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "no_shard": 0, "ddp": 0, "none": 0}


def _meant(text: str) -> str:
    """Guesses the stage for a text such as `two`, `zero2`, `stage-2` or FSDP's `full_shard`."""
    text = text.lower()
    found = re.fullmatch(r"(?:zero|stage|z)?[-_ ]?([0-3])", text)
    stage = (_SPELLED | _OF_FSDP).get(text, found[1] if found else None)
    return "" if stage is None else f". For stage {stage}, write {stage}"


def _names(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]


def _build(kind: type, settings: Mapping[str, Any], prefix: str):
    sections: dict[type, dict[str, type]] = {ZeroConfig: _NESTED, CommConfig: _NESTED_IN_COMM}
    nested = sections.get(kind, {})
    arguments = {}
    for name, value in settings.items():
        if not isinstance(name, str) or name not in _names(kind):
            refuse_cut(f"{prefix}{name}")
            raise unknown_key(name, prefix, _names(kind), meaning_elsewhere(name))
        if name in nested and isinstance(value, Mapping):
            value = _build(nested[name], value, f"{prefix}{name}.")
        arguments[name] = value
    return kind(**arguments)


def _changes(config: Any) -> dict[str, Any]:
    found = {}
    for field_ in dataclasses.fields(config):
        value, default = getattr(config, field_.name), field_.default
        if dataclasses.is_dataclass(value):
            # List only the differing fields of a section, because otherwise one change would list all its fields.
            value, default = _changes(value), {}
        if value != default:
            found[field_.name] = value
    return found


def changed(config: ZeroConfig) -> dict[str, Any]:
    """Returns the stage, and the settings with other values than their defaults, under dotted names."""
    return {"stage": config.stage} | {name: value for name, value in by_name(config).items() if value != _USUAL[name]}


def by_name(config: ZeroConfig) -> dict[str, Any]:
    """Returns all settings under dotted names, such as `comm.late_s`."""
    return dict(_flat(config, ""))


def differences(first: ZeroConfig, second: ZeroConfig) -> list[str]:
    """Describes the fields in which two configs differ: "`stage` 1, and this one 2"."""
    return [
        f"`{name}` {shown(value)}, and this one {shown(other)}"
        for (name, value), other in zip(_flat(first, ""), (value for _, value in _flat(second, "")))
        if value != other
    ]


def _flat(config: Any, prefix: str) -> list[tuple[str, Any]]:
    found = []
    for field_ in dataclasses.fields(config):
        value = getattr(config, field_.name)
        is_section = dataclasses.is_dataclass(value)
        found += _flat(value, f"{prefix}{field_.name}.") if is_section else [(f"{prefix}{field_.name}", value)]
    return found


_USUAL = by_name(ZeroConfig())
"""Maps dotted names of settings to their defaults."""
