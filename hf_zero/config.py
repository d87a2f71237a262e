"""Everything a user may say to hf_zero, as frozen dataclasses read from YAML, a dict or a flag, and checked at once.

There is no learning rate, batch size, clipping threshold or scheduler here: those have one source, the training
arguments or the script itself.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

AUTO = "auto"
DTYPES = ("float32", "bfloat16", "float16")
_BYTES_PER_UNIT = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


class ConfigError(ValueError):
    """A setting that cannot be honoured: names the field, the value, and what is allowed."""


def _refuse(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"hf_zero config: `{name}` is {value!r}; allowed: {allowed}.")


def _one_of(name: str, value: Any, allowed: tuple) -> None:
    if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
        raise _refuse(name, value, ", ".join(str(a) for a in allowed))


_SAID_ELSEWHERE = (
    "lr",
    "learning_rate",
    "batch_size",
    "train_batch_size",
    "max_grad_norm",
    "gradient_clipping",
    "scheduler",
)
"""Keys that people bring from other engines' files; they have one source, and it is not this one."""


def _unknown(key: str, prefix: str, known: list[str]) -> ConfigError:
    if any(key == name or key.endswith(f"_{name}") for name in _SAID_ELSEWHERE):
        hint = "it is said in the training arguments or the script, and only there"
    else:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"the nearest known one is `{prefix}{near[0]}`" if near else "nothing known is near it"
    return ConfigError(f"hf_zero config: unknown key `{prefix}{key}`; {hint}. Known: {', '.join(known)}.")


def _not_built(name: str, value: Any, instead: str) -> ConfigError:
    return ConfigError(f"hf_zero config: `{name}: {value}` is not built yet in this version; {instead}.")


def parse_bytes(name: str, value: Any) -> int:
    """`16777216`, `"16MiB"` or `"16 MB"` → bytes. Raises `ConfigError` for anything else, zero and negatives too."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        number = value.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = value.strip().lower()[len(number) :].strip() or "b"
        if number.replace(".", "", 1).isdigit() and unit in _BYTES_PER_UNIT and float(number) > 0:
            return int(float(number) * _BYTES_PER_UNIT[unit])
    raise _refuse(name, value, "a number of bytes above 0, or text such as '16MiB'")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where a shard's state lives; `none` is the training device."""

    optimizer: str = "none"
    """Optimizer state, masters and the reduced gradient: `cpu` is host memory, where the step then runs, too; `nvme` keeps
    state and masters in files below `nvme_path`, and steps a bucket at a time."""
    params: str = "none"
    """Stage 3: this rank's shard of the parameters, frozen ones too: `cpu` is host memory, `nvme` files below `nvme_path`. A
    layer is fetched from there for its forward and for its backward."""
    activations: str = "none"
    """What a training forward saves for its backward: `cpu` copies it to host memory behind the forward, and back ahead of
    the backward."""
    ratio: float = 1.0
    """The part of the state that `optimizer` moves away: the buckets whose gradients arrive first, until they hold it."""
    nvme_path: str | None = None
    """`nvme`: a folder on a local disk, on every host; it is looked for when the engine is built."""
    speculate_bytes: int | str = AUTO
    """`cpu`: host memory that a rank may take for copies of state on which buckets are stepped during backward; 0 steps all
    of them in `optimizer.step()`. `auto` is half of what state leaves free beside an accelerator, and 0 on the CPU."""
    threads: int | str = AUTO
    """`cpu`: CPU threads of the steps that run beside training. `auto`: a rank's part of the host's cores beside an
    accelerator, and torch's own number where training is on the CPU."""
    delay: int = 0
    """`cpu`: 1 ends each step behind the next forward and backward, which read parameters that are one step old. Not exact."""
    delay_warmup: int = 40
    """Steps at the start that are taken in their time all the same."""
    window: int = 2
    """`nvme`: buckets that are on their way from or to the disk while another is stepped."""

    def __post_init__(self):
        for name in ("optimizer", "params", "activations"):
            _one_of(f"offload.{name}", getattr(self, name), ("none", "cpu", "nvme"))
        if self.nvme_path is not None and (not isinstance(self.nvme_path, str) or not self.nvme_path):
            raise _refuse("offload.nvme_path", self.nvme_path, "the path of a folder")
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
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise _refuse("offload.window", self.window, "a whole number from 1")
        if self.speculate_bytes != AUTO and (self.speculate_bytes != 0 or isinstance(self.speculate_bytes, bool)):
            object.__setattr__(self, "speculate_bytes", parse_bytes("offload.speculate_bytes", self.speculate_bytes))
            if self.optimizer != "cpu":
                raise ConfigError(
                    f"hf_zero config: `offload.speculate_bytes` is of `offload.optimizer: cpu` (optimizer is {self.optimizer}): "
                    "copies of state in host memory. Set that, or leave it out."
                )
        if self.threads != AUTO:
            if isinstance(self.threads, bool) or not isinstance(self.threads, int) or self.threads < 1:
                raise _refuse("offload.threads", self.threads, "auto, or a whole number from 1")
            if self.optimizer != "cpu":
                raise ConfigError(
                    f"hf_zero config: `offload.threads` is of `offload.optimizer: cpu` (optimizer is {self.optimizer}): of steps "
                    "beside training. Set that, or leave it out."
                )
        self._check_delay()
        if self.params == "nvme" and (self.delay or self.speculate_bytes not in (AUTO, 0)):
            name = "delay" if self.delay else "speculate_bytes"
            raise ConfigError(
                f"hf_zero config: `offload.{name}: {getattr(self, name)}` steps on copies of masters in host memory, and with "
                "`offload.params: nvme` masters are in the parameters' files. Set `offload.params: cpu`, or leave it out."
            )
        if self.activations == "nvme":
            raise _not_built("offload.activations", "nvme", "use cpu: host memory, or recompute them (checkpointing)")
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float) or not 0 < self.ratio <= 1:
            raise _refuse("offload.ratio", self.ratio, "a number above 0, up to 1")
        if self.ratio != 1 and not self.moves_state:
            raise ConfigError(
                f"hf_zero config: `offload.ratio` is {self.ratio}, the part of the state that moves, and nothing moves with "
                "`offload.optimizer: none`. Set that to cpu or nvme, or leave the ratio out."
            )

    def _check_delay(self) -> None:
        _one_of("offload.delay", self.delay, (0, 1))
        if isinstance(self.delay_warmup, bool) or not isinstance(self.delay_warmup, int) or self.delay_warmup < 0:
            raise _refuse("offload.delay_warmup", self.delay_warmup, "a whole number from 0")
        if not self.delay:
            if self.delay_warmup != type(self).delay_warmup:
                raise ConfigError(
                    f"hf_zero config: `offload.delay_warmup` is {self.delay_warmup}, and nothing is delayed with `offload.delay: "
                    "0`. Set that to 1, or leave the warm-up out."
                )
            return
        if self.optimizer != "cpu" or self.ratio != 1:
            raise ConfigError(
                f"hf_zero config: `offload.delay: 1` needs all of the state in host memory (optimizer is {self.optimizer}, ratio "
                f"is {self.ratio}). Set `offload.optimizer: cpu` and `offload.ratio: 1.0`, or leave the delay out."
            )
        if self.speculate_bytes not in (AUTO, 0):
            raise ConfigError(
                f"hf_zero config: `offload.delay: 1` ends steps late and `offload.speculate_bytes: {self.speculate_bytes}` "
                "begins them early. Leave one of the two out."
            )

    @property
    def moves_state(self) -> bool:
        """Whether optimizer state lives elsewhere than on the training device."""
        return self.optimizer != "none"

    @property
    def moves_params(self) -> bool:
        """Whether shards of parameters live elsewhere than on the training device."""
        return self.params != "none"


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """How bytes travel between ranks."""

    shard_group_size: int | str = AUTO
    """Ranks that share one copy of the state; `auto` is the whole world. Neighbours, so that they may be those of one node."""
    node_size: int | str = AUTO
    """Neighbouring ranks that are on one node; `auto` is what the launcher says."""
    secondary_shard: str = "none"
    """Stage 3: `node` keeps a part of what a forward has gathered on each rank of a node until the step, so that the backward's
    gathers stay inside the node."""
    weights: str = "none"
    """Parameters travel as they are (`none`), or as `int8` in blocks, at stages 1 to 3."""
    gradients: str = "none"
    """Likewise gradients, in `int8` or `int4`."""
    block_numel: int = 256
    """Elements that share a scale in a quantised tensor."""
    error_feedback: bool = True
    """What quantising loses of a gradient is kept, and sent with the next one."""
    timeout_s: float = 1800.0
    """Seconds after which a collective that a peer never joined is an error that names it."""
    gather_timeout_s: float = 120.0
    """Seconds that ranks wait in a `state_dict()` or `gathered` of stage 3 for ranks that do not come."""

    def __post_init__(self):
        for name, least in (("shard_group_size", 2), ("node_size", 1)):
            value = getattr(self, name)
            if value != AUTO and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise _refuse(f"comm.{name}", value, f"auto, a whole number from {least}")
        _one_of("comm.secondary_shard", self.secondary_shard, ("none", "node"))
        _one_of("comm.weights", self.weights, ("none", "int8"))
        _one_of("comm.gradients", self.gradients, ("none", "int8", "int4"))
        _one_of("comm.block_numel", self.block_numel, tuple(2**power for power in range(5, 13)))
        _one_of("comm.error_feedback", self.error_feedback, (True, False))
        if self.shard_group_size != AUTO and self.gradients != "none":
            raise ConfigError(
                f"hf_zero config: `comm.gradients: {self.gradients}` with `comm.shard_group_size: {self.shard_group_size}`: the "
                "all-reduce between shard groups is not quantised. Leave one of them out; `comm.weights: int8` goes with both."
            )
        for name in ("timeout_s", "gather_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise _refuse(f"comm.{name}", value, "a number of seconds above 0")

    @property
    def quantises(self) -> bool:
        """Whether weights or gradients travel in blocks of integers."""
        return self.weights != "none" or self.gradients != "none"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How checkpoints are written."""

    layout: str = "hf"
    """`hf`: all ranks write into the files that `from_pretrained` reads. `sharded`: each rank writes its part of the model to
    a file of its own, on a disk of its own host if need be; `hf-zero consolidate` makes a model folder of it."""
    full_every: int = 0
    """Steps after which a checkpoint of layout `hf` is written and kept, whatever `save_total_limit` says; those between
    are `sharded`. 0: all have `layout`, and none is kept for good."""
    on_failure: str = "stop"
    """What a save that fails (a full disk) does to training: `stop` it with the reason, or `continue` with a warning."""
    async_save: bool = True
    """Trainer's checkpoints are written behind training. The next save and the end wait for it."""
    snapshot_bytes: int | str = AUTO
    """Host memory that a rank may take to copy what is not written yet when the next optimizer step would change it; what
    does not fit is written before that step. `auto` is half of what is free, and nothing where `offload.optimizer` is nvme."""

    def __post_init__(self):
        _one_of("checkpoint.layout", self.layout, ("hf", "sharded"))
        if isinstance(self.full_every, bool) or not isinstance(self.full_every, int) or self.full_every < 0:
            raise _refuse("checkpoint.full_every", self.full_every, "a whole number of steps, 0 for none")
        _one_of("checkpoint.on_failure", self.on_failure, ("stop", "continue"))
        _one_of("checkpoint.async_save", self.async_save, (True, False))
        if self.snapshot_bytes != AUTO:
            object.__setattr__(self, "snapshot_bytes", parse_bytes("checkpoint.snapshot_bytes", self.snapshot_bytes))


_NESTED = {"offload": OffloadConfig, "comm": CommConfig, "checkpoint": CheckpointConfig}


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
        reduce_dtype: dtype in which gradients travel; `auto` is each parameter's dtype.
        split_parameters: whether a parameter may be cut, so that ranks have parts of it. `auto` cuts for element-wise
            optimizers and deals whole parameters to the ranks for those that need them (Muon, Adafactor), as a trial step of
            the optimizer shows; true and false are for one that cannot be tried.
        overlap_param_gather: let the parameter all-gathers of stages 1 and 2 run on behind the step; the first read of
            a parameter through its module waits for it.
        broadcast_buffers: rank 0's buffers (batch-norm statistics) before each training forward, as DDP.
        check_nonfinite: refuse to step with a NaN or infinite gradient.
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
    reduce_dtype: str = AUTO
    split_parameters: bool | str = AUTO
    overlap_param_gather: bool = True
    broadcast_buffers: bool = True
    check_nonfinite: bool = True
    prefetch_units: int = field(default=1, metadata={"stage": 3})
    reshard_after_forward: bool | str = field(default=True, metadata={"stage": 3})
    persist_below_numel: int = field(default=0, metadata={"stage": 3})
    unit_modules: tuple[str, ...] | str = field(default=AUTO, metadata={"stage": 3})
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self):
        _one_of("stage", self.stage, (0, 1, 2, 3))
        if self.bucket_bytes != AUTO:
            object.__setattr__(self, "bucket_bytes", parse_bytes("bucket_bytes", self.bucket_bytes))
        if isinstance(self.grad_buffers, bool) or not isinstance(self.grad_buffers, int) or self.grad_buffers < 1:
            raise _refuse("grad_buffers", self.grad_buffers, "a whole number from 1")
        _one_of("grad_accumulation", self.grad_accumulation, (AUTO, "local", "sharded"))
        if self.grad_accumulation == "sharded" and self.stage < 2:
            raise ConfigError(
                f"hf_zero config: `grad_accumulation: sharded` needs stage 2 (stage is {self.stage}): below it a rank "
                "keeps whole gradients. Use `local` or `auto`, or set `stage: 2`."
            )
        for name in ("param_dtype", "reduce_dtype"):
            _one_of(name, getattr(self, name), (AUTO, *DTYPES))
        for name in ("prefetch_units", "persist_below_numel"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise _refuse(name, value, "a whole number from 0")
        _one_of("rounding", self.rounding, ("nearest", "stochastic"))
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
        _one_of("split_parameters", self.split_parameters, (True, False, AUTO))
        _one_of("reshard_after_forward", self.reshard_after_forward, (True, False, AUTO))
        if self.unit_modules != AUTO:
            object.__setattr__(self, "unit_modules", _class_names("unit_modules", self.unit_modules))
        for name in ("overlap_param_gather", "broadcast_buffers", "check_nonfinite"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true, false")
        for name, kind in _NESTED.items():
            if not isinstance(getattr(self, name), kind):
                raise _refuse(name, getattr(self, name), f"a mapping of {', '.join(_names(kind))}")
        self._refuse_settings_of_shards()
        self._refuse_settings_of_stage_3()

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
        for name in ("weights", "gradients"):
            value = getattr(self.comm, name)
            if self.stage == 0 and value != "none":
                raise ConfigError(
                    f"hf_zero config: `comm.{name}: {value}` is of stages 1 to 3, where {name} travel by shards (stage is "
                    "0, which all-reduces whole gradients and sends no weights). Set `stage: 1`, or leave it at none."
                )

    @property
    def steps_by_bucket(self) -> bool:
        """True when an optimizer never has all of a rank's parameters before it."""
        offload = self.offload
        in_files = offload.optimizer == "nvme" or (offload.optimizer == "cpu" and offload.params == "nvme")
        return in_files or self.rounding == "stochastic"

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
            raise _refuse(
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
        raise _refuse("config", value, "a stage number, a YAML path, a mapping or a ZeroConfig")

    def to_dict(self) -> dict[str, Any]:
        """The nested plain dict that `from_dict` reads back to an equal config."""
        return dataclasses.asdict(self)


def _class_names(name: str, value: Any) -> tuple[str, ...]:
    """`"GPT2Block"`, or a list of such → a tuple."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not names or not all(isinstance(n, str) and n.isidentifier() for n in names):
        raise _refuse(name, value, "auto, a class name such as GPT2Block, or a list of class names")
    return names


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
                raise _refuse(name.strip(), value, f"nothing: `{step}` has a value already")
        if not equals:
            raise _refuse("config", text, "settings as name=value, separated by commas")
        place[leaf] = yaml.safe_load(value)
    return settings


def _names(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]


def _build(kind: type, settings: Mapping[str, Any], prefix: str):
    nested = _NESTED if kind is ZeroConfig else {}
    arguments = {}
    for name, value in settings.items():
        if name not in _names(kind):
            raise _unknown(str(name), prefix, _names(kind))
        if name in nested and isinstance(value, Mapping):
            value = _build(nested[name], value, f"{name}.")
        arguments[name] = value
    return kind(**arguments)
