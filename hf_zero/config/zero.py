"""All settings together, read from YAML, a dict or a flag."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .checks import AUTO, DTYPES, ConfigError, class_names, not_built, one_of, parse_bytes, refuse, unknown_key
from .parts import CheckpointConfig, CommConfig, OffloadConfig, OuterConfig

_NESTED = {"offload": OffloadConfig, "comm": CommConfig, "checkpoint": CheckpointConfig}
_NESTED_IN_COMM = {"outer": OuterConfig}


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What the engine is asked to do. Every field has a default that suits BERT- and GPT-class fine-tuning.

    Args:
        stage: 0 shards nothing (all-reduce, DDP's equal), 1 the optimizer state, 2 also the gradients, 3 also the
            parameters.
        bucket_bytes: gradients reduced together, in bytes of the reduce dtype; `auto` sizes them for the model.
        grad_buffers: how many whole-bucket gradient buffers stages 2 and 3 hold at a time before they wait for the oldest.
        grad_accumulation: `local` keeps whole gradients between micro-batches and reduces once a step, in DDP's order of
            addition; `sharded` reduces every micro-batch into the shard. `auto`: local at stages 0 and 1, sharded at 2
            and 3.
        param_dtype: dtype of the parameters in forward and backward; `auto` keeps the model's. A 16-bit one is trained
            through an fp32 master copy held by the shard; float16 needs loss scaling too, which accelerate and Trainer then do.
        rounding: how a bfloat16 parameter is made of the optimizer's float32 update: `nearest`, from a master that the shard
            keeps; `stochastic`, by chance in proportion to the distance, from the parameter itself, so that no master is kept.
        moments: `32bit` leaves the optimizer's moments as it makes them; `8bit` keeps them in blocks of 256 8-bit codes with a
            scale each between steps, and steps a bucket at a time.
        reduce_dtype: dtype in which gradients travel; `auto` is each parameter's dtype.
        split_parameters: whether a parameter may be cut, so that ranks have parts of it. `auto` cuts for element-wise
            optimizers and deals whole parameters to the ranks for those that need them (Muon, Adafactor), as a trial step of
            the optimizer shows; true and false are for one that cannot be tried.
        overlap_param_gather: let the parameter all-gathers of stages 1 and 2 run on behind the step; the first read of
            a parameter through its module waits for it.
        broadcast_buffers: rank 0's buffers (batch-norm statistics) before each training forward, as DDP.
        check_nonfinite: refuse to step with a NaN or infinite gradient.
        kernels: whether fused kernels measure gradients and step AdamW, Adam, SGD and Lion in place of torch: `auto` where triton
            runs on the training device, `never`, or `always`, which elsewhere does the same arithmetic as plain torch operations.
        prefetch_units: units (layers) that stage 3 gathers ahead of the one in use, in forward and in backward.
        reshard_after_forward: drop a unit's gathered parameters after its forward and gather them again for its backward;
            `false` keeps them until the optimizer's step, with the memory and traffic of stage 2; `auto` keeps them where
            they take less than a quarter of the free memory.
        persist_below_numel: parameters of fewer elements stay whole on each rank at stage 3.
        unit_modules: class names of the modules that stage 3 gathers one at a time; `auto` finds the model's layers.
    """

    stage: int = 2
    bucket_bytes: int | str = AUTO
    grad_buffers: int = 3
    grad_accumulation: str = AUTO
    param_dtype: str = AUTO
    rounding: str = "nearest"
    moments: str = "32bit"
    reduce_dtype: str = AUTO
    split_parameters: bool | str = AUTO
    overlap_param_gather: bool = True
    broadcast_buffers: bool = True
    check_nonfinite: bool = True
    kernels: str = AUTO
    prefetch_units: int = field(default=1, metadata={"stage": 3})
    reshard_after_forward: bool | str = field(default=True, metadata={"stage": 3})
    persist_below_numel: int = field(default=0, metadata={"stage": 3})
    unit_modules: tuple[str, ...] | str = field(default=AUTO, metadata={"stage": 3})
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self):
        one_of("stage", self.stage, (0, 1, 2, 3))
        if self.bucket_bytes != AUTO:
            object.__setattr__(self, "bucket_bytes", parse_bytes("bucket_bytes", self.bucket_bytes))
        if isinstance(self.grad_buffers, bool) or not isinstance(self.grad_buffers, int) or self.grad_buffers < 1:
            raise refuse("grad_buffers", self.grad_buffers, "a whole number from 1")
        one_of("grad_accumulation", self.grad_accumulation, (AUTO, "local", "sharded"))
        if self.grad_accumulation == "sharded" and self.stage < 2:
            raise ConfigError(
                f"hf_zero config: `grad_accumulation: sharded` needs stage 2 (stage is {self.stage}): below it a rank "
                "keeps whole gradients. Use `local` or `auto`, or set `stage: 2`."
            )
        for name in ("param_dtype", "reduce_dtype"):
            one_of(name, getattr(self, name), (AUTO, *DTYPES))
        for name in ("prefetch_units", "persist_below_numel"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise refuse(name, value, "a whole number from 0")
        one_of("rounding", self.rounding, ("nearest", "stochastic"))
        for name in ("optimizer", "params"):
            value = getattr(self.offload, name, "none")
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
        one_of("split_parameters", self.split_parameters, (True, False, AUTO))
        one_of("reshard_after_forward", self.reshard_after_forward, (True, False, AUTO))
        if self.unit_modules != AUTO:
            object.__setattr__(self, "unit_modules", class_names("unit_modules", self.unit_modules))
        for name in ("overlap_param_gather", "broadcast_buffers", "check_nonfinite"):
            if not isinstance(getattr(self, name), bool):
                raise refuse(name, getattr(self, name), "true, false")
        for name, kind in _NESTED.items():
            if not isinstance(getattr(self, name), kind):
                raise refuse(name, getattr(self, name), f"a mapping of {', '.join(_names(kind))}")
        self._check_moments()
        self._refuse_settings_of_shards()
        self._refuse_settings_beside_outer_steps()
        self._refuse_settings_of_stage_3()

    def _check_moments(self) -> None:
        one_of("moments", self.moments, ("32bit", "8bit"))
        offload = self.offload
        if not self.quantises_moments:
            return
        if offload.optimizer == "cpu" and offload.params == "nvme":
            raise not_built(
                "moments",
                f"{self.moments} with offload.optimizer: {offload.optimizer}, offload.params: {offload.params}",
                "state in host memory beside masters in files has 32-bit moments. Leave `moments` at 32bit, or set "
                "`offload.optimizer: nvme`, or `offload.params: cpu`",
            )
        if offload.optimizer == "nvme" and offload.ratio != 1:
            raise not_built(
                "moments",
                f"{self.moments} with offload.optimizer: nvme, offload.ratio: {offload.ratio}",
                "beside state in files, state on the device has 32-bit moments. Leave `moments` at 32bit, or set "
                "`offload.ratio: 1.0`, or `offload.optimizer: cpu`",
            )
        if offload.optimizer == "cpu" and (offload.delay or offload.speculate_bytes not in (AUTO, 0)):
            name = "delay" if offload.delay else "speculate_bytes"
            raise ConfigError(
                f"hf_zero config: `moments: {self.moments}` and `offload.{name}: {getattr(offload, name)}`, which steps on "
                "32-bit copies of moments. Leave one of the two out."
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
                f"hf_zero config: `offload.params: {self.offload.params}` is of stage 3, where a layer's parameters are fetched "
                f"for its forward and its backward (stage is {self.stage}: parameters stay whole on the training device). Set "
                "`stage: 3`, which also fits one rank, or leave it out; `offload.optimizer` moves state at every stage."
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
        if self.comm.peer_memory == "always" and self.hindrance_to_peer_memory is not None:
            raise ConfigError(
                f"hf_zero config: `comm.peer_memory: always` cannot be had: {self.hindrance_to_peer_memory}. Leave one of the "
                "two out, or set it to auto."
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
        offload, others = self.offload, {}
        if offload.optimizer == "nvme":
            others["offload.optimizer"] = offload.optimizer
        if offload.moves_params:
            others["offload.params"] = offload.params
        if offload.delay:
            others["offload.delay"] = offload.delay
        if self.rounding != "nearest":
            others["rounding"] = self.rounding
        if self.param_dtype == "float16":
            others["param_dtype"] = self.param_dtype
        for name, value in others.items():
            raise ConfigError(
                f"hf_zero config: `{name}: {value}` does not go with `comm.sync_every: {self.comm.sync_every}`: outer steps need "
                "each rank's masters in memory, in all groups at the same step and as it left them. Leave one of the two out; "
                "`offload.optimizer: cpu` goes with outer steps."
            )

    @property
    def hindrance_to_peer_memory(self) -> str | None:
        """Why parameters cannot be copied out of peers' memory with these settings; None where nothing stands in the way."""
        if self.stage == 0:
            return "`stage: 0` gathers no parameters"
        if self.comm.weights not in ("none", AUTO):
            return f"`comm.weights: {self.comm.weights}` sends blocks that are made anew for each gather"
        if self.comm.secondary_shard != "none":
            return f"`comm.secondary_shard: {self.comm.secondary_shard}` is for ranks on several nodes"
        if self.offload.moves_params:
            return f"`offload.params: {self.offload.params}` keeps shards where peers cannot read them"
        return None

    @property
    def steps_by_bucket(self) -> bool:
        """True when an optimizer never has all of a rank's parameters before it."""
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
        """A nested mapping, as YAML gives it. Unknown keys are errors that name the nearest known one."""
        return _build(cls, settings, "")

    @classmethod
    def from_yaml(cls, path: str | Path) -> "ZeroConfig":
        """The settings in a YAML file. An empty file is all defaults."""
        path = Path(path)
        if not path.is_file():
            near = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
            found = f"that folder holds {', '.join(near)}" if near else "there is no YAML file in that folder"
            raise ConfigError(f"hf_zero config: no file {str(path)!r}; {found}. Give a YAML path or a stage number.")
        try:
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ConfigError(f"hf_zero config: {path} is not valid YAML: {error}") from error
        if settings is not None and not isinstance(settings, Mapping):
            raise ConfigError(
                f"hf_zero config: {path} holds {type(settings).__name__}, not a mapping such as `stage: 2`."
            )
        return cls.from_dict(settings or {})

    @classmethod
    def from_flag(cls, text: str) -> "ZeroConfig":
        """A command-line value: a stage (`2`), settings (`stage=2,grad_accumulation=local`) or a YAML path."""
        text = text.strip()
        if text.lstrip("-").isdigit():
            return cls(stage=int(text))
        if Path(text).suffix.lower() in (".yaml", ".yml"):
            return cls.from_yaml(text)
        if "=" not in text:
            raise refuse(
                "config", text, "a stage (0, 1, 2, 3), settings such as stage=2,grad_accumulation=local, a .yaml path"
            )
        return cls.from_dict(_settings_of(text))

    @classmethod
    def of(cls, value: "ZeroConfig | Mapping | str | Path | int | None") -> "ZeroConfig":
        """Whatever a user hands over as a config: a stage number, YAML path, flag text, mapping, config, or None."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if isinstance(value, Path):
            return cls.from_yaml(value)
        if isinstance(value, str):
            return cls.from_flag(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(stage=value)
        raise refuse("config", value, "a stage number, a YAML path, a mapping or a ZeroConfig")

    def to_dict(self) -> dict[str, Any]:
        """The nested plain dict that `from_dict` reads back to an equal config."""
        return dataclasses.asdict(self)


def _settings_of(text: str) -> dict[str, Any]:
    """`stage=2,comm.timeout_s=60` → {"stage": 2, "comm": {"timeout_s": 60}}, values read as YAML."""
    settings: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        *path, leaf = name.strip().split(".")
        place = settings
        for step in path:
            place = place.setdefault(step, {})
            if not isinstance(place, dict):
                raise refuse(name.strip(), value, f"nothing: `{step}` has a value already")
        if not equals:
            raise refuse("config", text, "settings as name=value, separated by commas")
        place[leaf] = yaml.safe_load(value)
    return settings


def _names(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]


def _build(kind: type, settings: Mapping[str, Any], prefix: str):
    nested = {ZeroConfig: _NESTED, CommConfig: _NESTED_IN_COMM}.get(kind, {})
    arguments = {}
    for name, value in settings.items():
        if name not in _names(kind):
            raise unknown_key(str(name), prefix, _names(kind))
        if name in nested and isinstance(value, Mapping):
            value = _build(nested[name], value, f"{prefix}{name}.")
        arguments[name] = value
    return kind(**arguments)
