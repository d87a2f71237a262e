"""All settings together, read from YAML, a dict or a flag."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from .checks import (
    AUTO,
    DTYPES,
    ConfigError,
    class_names,
    is_auto,
    meaning_elsewhere,
    one_of,
    parse_bytes,
    path_of_folder,
    plain,
    read_yaml,
    refuse,
    refuse_cut,
    refuse_files_of_others,
    settings_of,
    shown,
    to_python_numbers,
    unknown_key,
    whole_number,
)
from .parts import CheckpointConfig, CommConfig, OffloadConfig, OuterConfig

_NESTED: dict[str, type] = {"offload": OffloadConfig, "comm": CommConfig, "checkpoint": CheckpointConfig}
_SWITCHES = ("true", "false", "yes", "no", "on", "off", "none", "auto")
_NESTED_IN_COMM: dict[str, type] = {"outer": OuterConfig}


@dataclass(frozen=True, kw_only=True, repr=False)
class ZeroConfig:
    """The settings of an engine. Every field has a default that suits BERT- and GPT-class fine-tuning.

    Args:
        stage: 0 shards nothing, as DDP; 1 the optimizer state; 2 also gradients; 3 also parameters. `auto`: accelerate and
            Trainer take the fastest that fits the free memory, and choose `offload`, `bucket_bytes` and `prefetch_units` where
            these are not set.
        bucket_bytes: bytes of gradients, in the reduce dtype, that are reduced together; `auto` fits model, ranks and device.
        grad_accumulation: `local` keeps whole gradients between micro-batches and reduces once a step, in DDP's order of
            addition. `sharded` reduces each micro-batch, at stages 2 and 3. `auto`: local at stages 0 and 1, else sharded.
        param_dtype: dtype of parameters in forward and backward; `auto` keeps the model's. Beside a 16-bit dtype the shard
            keeps an fp32 master. float16 needs loss scaling, which accelerate and Trainer do.
        gather_dtype: dtype in which stage 3 gathers float32 parameters; shards, checkpoints and `gathered` stay float32.
            `auto`: bfloat16 under bf16 mixed precision unless `param_dtype` is set; else float32.
        rounding: how a bfloat16 parameter is made from its float32 update: `nearest` rounds a master that the shard keeps;
            `stochastic` rounds at random, in proportion to the distance, and keeps no master.
        moments: `8bit` keeps the optimizer's moments in blocks of 256 8-bit codes with one scale each, and steps one bucket at
            a time.
        reduce_dtype: dtype in which gradients are sent; `auto`: each parameter's dtype.
        broadcast_buffers: sends rank 0's buffers (batch-norm statistics) before each training forward, as DDP.
        check_replicas_every: at this interval, ranks with copies of the same parameters or optimizer state compare checksums of
            all steps since, and end on a difference.
        nonfinite: on NaN or infinite gradients, `stop` ends the run before the step; `skip` drops the step on all ranks, up to
            ten in a row; `ignore` does not check.
        out_of_memory: when a forward or backward runs out of memory, `stop` ends the run; `halve` repeats the step in twice as
            many micro-batches on all ranks, at stages 0 to 2, with Trainer or `hf_zero.Rescue`.
        report: logs the run on rank 0 and writes a page at its end; `true`: in Trainer's `output_dir`, or accelerate's
            `logging_dir` or `project_dir`.
        kernels: fused kernels for gradient norms and for AdamW, Adam, SGD and Lion. `auto`: where triton runs on the training
            device; `always`: elsewhere too, as plain torch operations.
        prefetch_units: units (layers) that stage 3 gathers ahead of the one in use.
        reshard_after_forward: `true` drops a unit's gathered parameters after its forward and gathers them again for backward.
            `false` keeps them until the step, with stage 2's memory and traffic. `auto` keeps them if they take less than a
            quarter of the free memory.
        unit_modules: classes of modules that stage 3 gathers one at a time; `auto` finds the layers.
        unit_bytes: stage 3 gathers consecutive layers together until they have this size; 0 gathers each alone. `auto`: 16 MiB
            on accelerators, 1 MiB on the CPU, 0 with `unit_modules`.
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
        # First: the checks below take Python's own types alone, and would refuse numpy's numbers and `"2"`.
        to_python_numbers(self)
        if is_auto(self.stage):
            self._check_as_any_stage()
            return
        for name, kind in _NESTED.items():
            if not isinstance(getattr(self, name), kind):
                raise refuse(name, getattr(self, name), f"a mapping of {', '.join(_names(kind))}")
        # The sections come before: the checks from here on read their fields.
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
                    f"hf_zero config: `rounding: stochastic` keeps no master that `offload.{name}: {value}` could move, or make "
                    f"parameters of. Leave `rounding` at nearest, or `offload.{name}` at none."
                )
        if self.rounding == "stochastic" and self.comm.weights != "none":
            raise ConfigError(
                f"hf_zero config: `comm.weights: {self.comm.weights}` rounds what masters hold, and `rounding: stochastic` keeps "
                "none. Leave one of the two out."
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
        self._refuse_settings_beside_outer_steps()
        self._refuse_settings_of_stage_3()

    def _check_report(self) -> None:
        if isinstance(self.report, bool):
            return
        if type(self.report) is str and self.report.strip().lower() in _SWITCHES:
            raise refuse("report", self.report, "true and false without quotes, or the path of a folder")
        path_of_folder("report", self.report)

    def _check_out_of_memory(self) -> None:
        one_of("out_of_memory", self.out_of_memory, ("stop", "halve"))
        hindrances: dict[str, tuple[Any, Any, str]] = {
            "comm.gradients": (
                self.comm.gradients,
                "none",
                "what quantising has kept of earlier gradients would be lost",
            ),
            "comm.sync_every": (self.comm.sync_every, 1, "groups of ranks that step apart would not halve together"),
        }
        if self.out_of_memory == "halve" and self.stage == 3:
            raise ConfigError(
                "hf_zero config: `out_of_memory: halve` does not go with `stage: 3`: the other ranks wait in gathers for the "
                "rank that has failed. Set `stage: 2`, or use activation checkpointing."
            )
        for name, (value, without, reason) in hindrances.items():
            if self.out_of_memory == "halve" and value != without:
                raise ConfigError(
                    f"hf_zero config: `out_of_memory: halve` does not go with `{name}: {value}`: {reason}. Leave one of the two "
                    "out."
                )

    def _check_nonfinite(self) -> None:
        one_of("nonfinite", self.nonfinite, ("stop", "skip", "ignore"))
        if self.nonfinite == "skip" and self.comm.sync_every > 1:
            raise ConfigError(
                f"hf_zero config: `nonfinite: skip` does not go with `comm.sync_every: {self.comm.sync_every}`: groups of ranks "
                "that step apart would not skip together. Leave one of the two out."
            )

    def _check_as_any_stage(self) -> None:
        """With `stage: auto`: settings that no stage takes are refused at once; stage 3 takes all others' but halving."""
        checked = dataclasses.replace(self, stage=2 if self.out_of_memory == "halve" else 3)
        for field_ in dataclasses.fields(self):
            if field_.name != "stage":
                # The check's values: it has made bytes and numbers of texts, and this config must equal one that says them so.
                object.__setattr__(self, field_.name, getattr(checked, field_.name))

    def _check_gather_dtype(self) -> None:
        one_of("gather_dtype", self.gather_dtype, (AUTO, "float32", "bfloat16"))
        if self.gather_dtype != AUTO and self.param_dtype not in (AUTO, "float32"):
            raise ConfigError(
                f"hf_zero config: `gather_dtype: {self.gather_dtype}` is for float32 parameters, and `param_dtype: "
                f"{self.param_dtype}` leaves none. Leave one of the two out."
            )

    def _refuse_settings_of_stage_3(self) -> None:
        for field_ in dataclasses.fields(self):
            if field_.metadata.get("stage") == 3 and self.stage < 3 and getattr(self, field_.name) != field_.default:
                raise ConfigError(
                    f"hf_zero config: `{field_.name}` is of stage 3, where parameters are sharded (stage is {self.stage}). Set "
                    "`stage: 3` or leave it out."
                )
        if self.offload.moves_params and self.stage < 3:
            raise ConfigError(
                f"hf_zero config: `offload.params: {self.offload.params}` is of stage 3, and `stage` is "
                f"{self.stage}, where parameters stay whole on the training device. Set `stage: 3`, or leave it out; "
                "`offload.optimizer` moves state at every stage."
            )

    def _refuse_settings_of_shards(self) -> None:
        if self.stage == 0 and self.comm.shard_group_size != AUTO:
            raise ConfigError(
                f"hf_zero config: `comm.shard_group_size: {self.comm.shard_group_size}` is of stages 1 to 3: stage 0 "
                "shards nothing. Set `stage: 1`, or leave it at auto."
            )
        if self.comm.secondary_shard != "none" and (self.stage < 3 or self.reshard_after_forward is False):
            raise ConfigError(
                f"hf_zero config: `comm.secondary_shard: {self.comm.secondary_shard}` is for the backward's gathers of stage 3, "
                f"and there are none (stage is {self.stage}, reshard_after_forward {self.reshard_after_forward}). Leave it out."
            )
        for name in ("weights", "gradients"):
            value = getattr(self.comm, name)
            if self.stage == 0 and value != "none":
                raise ConfigError(
                    f"hf_zero config: `comm.{name}: {value}` is of stages 1 to 3, where {name} travel by shards (stage is "
                    "0, which all-reduces whole gradients and sends no weights). Set `stage: 1`, or leave it at none."
                )

    def _refuse_settings_beside_outer_steps(self) -> None:
        if self.comm.sync_every == 1:
            return
        others: dict[str, int | str] = {}
        if self.rounding != "nearest":
            others["rounding"] = self.rounding
        if self.param_dtype == "float16":
            others["param_dtype"] = self.param_dtype
        for name, value in others.items():
            raise ConfigError(
                f"hf_zero config: `{name}: {value}` does not go with `comm.sync_every: {self.comm.sync_every}`: outer steps need "
                "each rank's masters as its last step left them, in all groups at the same step. Leave one of the two out."
            )

    @property
    def is_open(self) -> bool:
        """Whether the stage is still to be chosen (`stage: auto`): engines take a config that is not open."""
        return is_auto(self.stage)

    @property
    def may_shard_parameters(self) -> bool:
        """Whether the stage is 3, or may become 3."""
        return self.is_open or self.stage == 3

    @property
    def steps_by_bucket(self) -> bool:
        """Whether an optimizer steps a bucket at a time, and never has all of a rank's parameters in memory."""
        offload = self.offload
        in_files = offload.optimizer == "nvme" or (offload.optimizer == "cpu" and offload.params == "nvme")
        return in_files or self.rounding == "stochastic" or self.quantises_moments

    @property
    def quantises_moments(self) -> bool:
        """Whether moments are kept in 8-bit blocks."""
        return self.moments == "8bit"

    @property
    def accumulates_locally(self) -> bool:
        """True when whole gradients are kept between micro-batches."""
        return self.grad_accumulation == "local" or (self.grad_accumulation == AUTO and self.stage < 2)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "ZeroConfig":
        """Builds a config from a nested mapping, as YAML gives one. Errors for unknown keys name the nearest known key."""
        if not isinstance(settings, Mapping):
            raise refuse("config", settings, f"a mapping of {', '.join(_names(cls))}")
        refuse_files_of_others(settings, "this mapping")
        return _build(cls, settings, "")

    @classmethod
    def from_yaml(cls, path: str | Path) -> "ZeroConfig":
        """The settings in a YAML file. An empty file is all defaults."""
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
        """A command-line value: a stage (`2`), settings (`stage=2,grad_accumulation=local`) or a YAML path.

        Args:
            name: what the value is called where it is said, for errors.
        """
        text = text.strip()
        if re.fullmatch(r"[+-]?[0-9]{1,9}", text):
            return cls(stage=int(text))
        if text == AUTO:
            return cls.from_dict({"stage": AUTO})
        is_path = Path(text).suffix.lower() in (".yaml", ".yml", ".json")
        first = re.split(r"[.=\s]", text, maxsplit=1)[0]
        # Settings may end in a path, as `report=runs/log.json`, and a path may have an `=` in it: the first word tells.
        if is_path and not ("=" in text and first in _names(cls)):
            return cls.from_yaml(text)
        if "=" not in text:
            raise refuse(name, text, f"{_FLAGS}{_meant(text)}")
        return cls.from_dict(settings_of(text))

    @classmethod
    def of(cls, value: "ConfigLike", name: str = "config") -> "ZeroConfig":
        """Builds a config from any form that users pass: stage number, YAML path, flag text, mapping, config, or None.

        Args:
            name: what the value is called where it is said, for errors.
        """
        try:
            return cls._of(plain(value), name)
        except ConfigError as error:
            if name == "config" or name in str(error):
                raise
            # Without the first error: the traceback would show the same sentence twice.
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
        raise refuse(name, value, "a stage number, a YAML path, a mapping or a ZeroConfig")

    def __repr__(self) -> str:
        return f"{type(self).__name__}.from_dict({self.changes()})"

    def changes(self) -> dict[str, Any]:
        """Returns the stage and all fields that differ from the defaults. `from_dict` of these is an equal config."""
        return {"stage": self.stage, **_changes(self)}

    def to_dict(self) -> dict[str, Any]:
        """The nested plain dict that `from_dict` reads back to an equal config."""
        return dataclasses.asdict(self)


ConfigLike: TypeAlias = ZeroConfig | Mapping[str, Any] | str | Path | int | None
"""What `ZeroConfig.of` takes."""

_FLAGS = "a stage (0, 1, 2, 3, auto), settings such as stage=2,grad_accumulation=local, a .yaml path"
_SPELT = ("zero", "one", "two", "three")


def _meant(text: str) -> str:
    """The stage that a text such as `two`, `zero2` or `stage-2` may be meant for."""
    text = text.lower()
    found = re.fullmatch(r"(?:zero|stage|z)?[-_ ]?([0-3])", text)
    stage = _SPELT.index(text) if text in _SPELT else found[1] if found else None
    return "" if stage is None else f". For stage {stage} say {stage}"


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
            # A section counts by what differs in it: as a whole, one change would list all its fields.
            value, default = _changes(value), {}
        if value != default:
            found[field_.name] = value
    return found


def changed(config: ZeroConfig) -> dict[str, Any]:
    """Returns the stage, and the settings that are not at their defaults, under dotted names."""
    return {"stage": config.stage} | {name: value for name, value in _flat(config, "") if value != _USUAL[name]}


def differences(first: ZeroConfig, second: ZeroConfig) -> list[str]:
    """Lists in words the fields in which two configs differ: "`stage` 1, and this one 2"."""
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


_USUAL = dict(_flat(ZeroConfig(), ""))
"""Each setting's default, under its dotted name."""
