"""Reads settings from files, dicts and flags, checks each value, and names mistakes."""

import dataclasses
import difflib
import math
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, get_args

import yaml

# ---- Checks of settings; errors name the setting, the value and the allowed values ----

AUTO: Final = "auto"
DTYPES = ("float32", "bfloat16", "float16")
_BYTES_PER_UNIT = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tib": 2**40,
    "tb": 10**12,
}
_BYTES_IN_WORDS = re.compile(r"([0-9]{1,30}(?:\.[0-9]{0,30})?(?:e[+-]?[0-9]{1,3})?) *([a-z]*)")
_DURATION = re.compile(r"(?:([0-9]{1,7})h)?(?:([0-9]{1,7})m)?(?:([0-9]{1,7})s)?")
_MOST = 2**31 - 1
_MOST_BYTES = 2**63 - 1
_MOST_SECONDS = 2_000_000
_MOST_SHOWN = 160
_LONGEST_PATH = 4096


class SpelledError(Exception):
    """An error which may quote names from files: characters with an effect on a terminal are escaped in its text."""

    def __str__(self) -> str:
        return spelled(super().__str__())


def spelled(text: str) -> str:
    """Escapes characters a terminal obeys or hides: ESC, other controls, marks of direction. Line breaks stay."""
    # str.isprintable is False for all of these characters, and for all spaces except the plain one.
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class ConfigError(SpelledError, ValueError):
    """Raised for a refused setting. The message names the setting, the value and the allowed values."""


class _Shown(reprlib.Repr):
    """`repr` of the beginning of a value, fast for any size and depth of the value."""

    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 100, 100

    def repr_int(self, value: int, level: int) -> str:
        # Python refuses to format integers of thousands of digits.
        digits = int(value.bit_length() * math.log10(2)) + 1
        return repr(value) if digits < 40 else f"a whole number of about {digits} digits"

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[:40]) if len(value) <= 40 else f"{value[:40]!r}..."


def shown(value: Any) -> str:
    """Formats a value for an error: Python's `repr`, shortened."""
    return cut(_Shown().repr(value))


def cut(text: str) -> str:
    """Returns the beginning of a text, for errors which quote the text; unprintable characters are escaped."""
    text = text[: _MOST_SHOWN + 1]
    text = spelled(text).replace("\n", "\\n")
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def plain(value: Any) -> Any:
    """Converts numbers and texts of numpy or of subclasses to Python's own; returns other values unchanged."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    # Check bool first, because bool is a subclass of int, and True would become 1.
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    # Use str's own method, because a subclass such as an enum may return its name instead of its value.
    return str.__str__(value) if isinstance(value, str) else value


def to_python_numbers(config: Any) -> None:
    """Converts numbers of numpy, of subclasses and in quotes in a config's fields to Python's own."""
    for field in dataclasses.fields(config):
        object.__setattr__(config, field.name, _unquoted(plain(getattr(config, field.name)), field.type))


def _unquoted(value: Any, kind: Any) -> Any:
    """Converts `"2"` in a field for numbers, or `"true"` in a field for switches, as YAML does without the quotes."""
    kinds = get_args(kind) or (kind,)
    if type(value) is not str or str in kinds:
        return value
    text = value.strip().lower()
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    if int in kinds and re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return int(text)
    if float in kinds and re.fullmatch(r"[+-]?[0-9]{1,18}(\.[0-9]{0,18})?(e[+-]?[0-9]{1,2})?", text):
        return float(text)
    return value


def is_auto(value: Any) -> bool:
    return type(value) is str and value == AUTO


def refuse(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"hf_zero config: `{name}` is {shown(value)}; allowed: {allowed}.")


def one_of(name: str, value: Any, allowed: tuple) -> None:
    # Compare types as well: `True` equals 1, so `stage: true` would train at stage 1.
    if not any(type(value) is type(a) and value == a for a in allowed):
        if type(value) is str:
            refuse_cut(f"{name}: {value}")
        raise refuse(name, value, ", ".join(str(a) for a in allowed))


def whole_number(name: str, value: Any, least: int, *, most: int = _MOST, also: tuple = (), what: str = "") -> None:
    """Accepts only an integer from `least` to `most`, or one of the words in `also`.

    Args:
        what: the counted things, in words, for the error.

    Raises:
        ConfigError: any other value.
    """
    if type(value) is str and value in also:
        return
    # isinstance would accept True and False as 1 and 0.
    if type(value) is not int or not least <= value <= most:
        raise refuse(name, value, f"{', '.join((*also, ''))}a whole number{what} from {least} to {most}")


def seconds(name: str, value: Any, *, also: tuple = ()) -> None:
    """Accepts only a time within the range of timers, or one of the words in `also`. Raises `ConfigError` otherwise."""
    if type(value) is str and value in also:
        return
    if type(value) not in (int, float) or not 0.001 <= value <= _MOST_SECONDS:
        raise refuse(name, value, f"{', '.join((*also, ''))}a number of seconds from 0.001 to {_MOST_SECONDS}")


def duration(name: str, value: Any) -> float | None:
    """Converts `"3h40m"`, `"220m"` or `"90s"` to seconds, and `none` to None. Raises `ConfigError` for all other values."""
    if type(value) is str and value == "none":
        return None
    parts = _DURATION.fullmatch(value.strip().lower()) if type(value) is str else None
    total = sum(int(part) * unit for part, unit in zip(parts.groups("0"), (3600, 60, 1))) if parts else 0
    if not 1 <= total <= _MOST_SECONDS:
        raise refuse(name, value, "none, or a time in hours, minutes and seconds such as 3h40m or 220m")
    return float(total)


def number(name: str, value: Any, holds: Any, allowed: str) -> None:
    """Accepts only a number for which `holds` returns true. Raises `ConfigError` otherwise."""
    if type(value) not in (int, float) or not holds(value):
        raise refuse(name, value, allowed)


def path_of_folder(name: str, value: Any) -> None:
    """Accepts only text which can name a folder. Raises `ConfigError` otherwise."""
    if type(value) is not str or not value or "\0" in value or len(value) > _LONGEST_PATH:
        raise refuse(name, value, "the path of a folder")


_SAID_ELSEWHERE = (
    "lr",
    "learning_rate",
    "batch_size",
    "train_batch_size",
    "max_grad_norm",
    "gradient_clipping",
    "scheduler",
    "optimizer",
    "optim",
    "weight_decay",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "activation_checkpointing",
    "mixed_precision",
    "bf16",
    "fp16",
    "epochs",
    "max_steps",
    "save_steps",
    "warmup_steps",
    "output_dir",
    "seed",
)
"""Keys of other engines' files which hf_zero reads from the training arguments or the script only."""


def unknown_key(key: Any, prefix: str, known: list[str], meant: str | None = None) -> ConfigError:
    """Makes the error for an unknown key, with the most similar known key.

    Args:
        meant: the key's meaning in its original config, in words.
    """
    is_word = isinstance(key, str) and len(key) <= 64
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5) if is_word else []
    if meant is not None:
        hint = meant
    elif is_word and any(key == name or key.endswith(f"_{name}") for name in _SAID_ELSEWHERE):
        hint = "set it in the training arguments or in the script"
    elif near:
        hint = f"the most similar known key is `{prefix}{near[0]}`"
    else:
        hint = "no known key is similar"
    name = f"`{prefix}{key}`" if is_word and key.isprintable() else shown(key)
    # If a similar name exists, the error does not need the list of all names.
    others = "" if near and near[0] in hint else f" Known: {', '.join(known)}."
    return ConfigError(f"hf_zero config: unknown key {name}; {hint}.{others}")


CUT: Final = {
    "comm.peer_memory": "Remove it: parameters are sent through the process group, with the same losses",
    "checkpoint.replicate": "Remove it: `checkpoint.resume: auto` resumes from the newest intact checkpoint of output_dir",
    "checkpoint.replicate_every": "Remove it and save more often: checkpoints are written while training continues",
    "checkpoint.snapshot_bytes": "Remove it: saves use up to half of the free host memory; `async_save: false` uses none",
    "comm.weights: auto": "Set int8 if links are slow (`hf-zero doctor` measures them), or remove it",
    "comm.gradients: auto": "Set int8 if links are slow (`hf-zero doctor` measures them), or remove it",
    "comm.weights: fp8": "Use int8: it sends the same number of bytes with a smaller error",
    "comm.gradients: fp8": "Use int8: it sends the same number of bytes with a smaller error",
    "comm.communicators": "Remove it: on an accelerator, gathers have their own communicator",
    "comm.block_numel": "Remove it: 256 elements share a scale",
    "comm.error_feedback": "Remove it: the quantization error of a gradient is always added to the next gradient",
    "comm.gather_timeout_s": "Set `comm.late_s`, which limits every wait for a rank",
    "grad_buffers": "Remove it: three gradient buckets are in flight; `bucket_bytes` sets their size",
    "check_nonfinite": "Remove it; `nonfinite: ignore` steps with NaN and infinite gradients, as `check_nonfinite: false` did",
    "split_parameters": "Remove it: a trial step of the optimizer shows if parameters can be split; `stage: 0` splits none",
    "persist_below_numel": "Remove it: a layer's small parameters are gathered in one message with its large ones",
    "overlap_param_gather": "Remove it: reads of a parameter wait for it; `engine_of(model).finish_parameters()` waits for all",
    "comm.gradients: int4": "Use int8; checkpoints with int4 residuals can still be resumed",
    "nonfinite_limit": "Remove it: `nonfinite: skip` ends a run after ten bad steps in a row",
    "nonfinite: rewind": "Set `nonfinite: skip`, or stop and resume from a checkpoint",
    "offload.delay": "Remove it: no step is delayed",
    "offload.delay_warmup": "Remove it: no step is delayed",
    "offload.numa": "Remove it: host steps run on the rank's accelerator's NUMA node; `numactl` binds a process to another",
    "offload.speculate_bytes": "Remove it: all buckets are stepped in `optimizer.step()`",
    "offload.threads": "Remove it: ranks share the host's cores; on the CPU, set OMP_NUM_THREADS",
    "offload.window": "Remove it: two buckets are read or written while another one is stepped",
    "snapshot_every": "Remove it: `nonfinite: skip` keeps no snapshots",
}
"""Removed settings, or values of settings (`name: value`) → the replacement."""


CUT_NAMES: Final = {
    "ZeroAccelerator": "Use `Accelerator(parallelism_config=ZeroPlugin(...))`, or `plugin.attach(accelerator)` before prepare",
    "hf-zero card": "`hf-zero push` writes the model card, as Trainer's `push_to_hub` does",
}
"""Removed commands and public names → the replacement."""


def cut_name(name: str) -> str:
    """Words the refusal of a removed command or public name."""
    return f"hf_zero: `{name}` was removed from hf_zero. {CUT_NAMES[name]}."


def refuse_cut(name: str) -> None:
    """Raises `ConfigError` for a removed setting, or for the `name: value` of a removed value."""
    if name in CUT:
        raise ConfigError(f"hf_zero config: the setting `{name}` was removed from hf_zero. {CUT[name]}.")


def not_built(name: str, value: Any, instead: str) -> ConfigError:
    return ConfigError(f"hf_zero config: `{name}: {value}` is not built yet in this version; {instead}.")


def parse_bytes(name: str, value: Any, least: int = 1) -> int:
    """`16777216`, `5e8`, `"16MiB"` or `"16 MB"` → bytes. Raises `ConfigError` for other values and for less than `least`."""
    value = plain(value)
    number, unit = value, "b"
    if type(value) is str:
        words = _BYTES_IN_WORDS.fullmatch(value.strip().lower())
        if words is not None:
            # Keep whole numbers as int, because a float is not exact beyond 2**53.
            number, unit = (int(words[1]) if words[1].isdigit() else float(words[1])), words[2] or "b"
    if type(number) in (int, float) and unit in _BYTES_PER_UNIT:
        nbytes = number * _BYTES_PER_UNIT[unit]
        # Check the range first, because `int` of an infinity or a NaN raises an error without the name of the setting.
        if least <= nbytes <= _MOST_BYTES and (unit != "b" or nbytes == int(nbytes)):
            return int(nbytes)
    raise refuse(name, value, f"a number of bytes {'above 0' if least else 'or 0'}, or text such as '16MiB'")


def class_names(name: str, value: Any) -> tuple[str, ...]:
    """Converts `"GPT2Block"`, or a list of such names, to a tuple."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not names or not all(isinstance(n, str) and n.isidentifier() for n in names):
        raise refuse(name, value, "auto, a class name such as GPT2Block, or a list of class names")
    return names


# ---- Config files of DeepSpeed, FSDP and accelerate: refused with the corresponding settings of hf_zero ----

_OF_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu")
_OF_ACCELERATE = ("compute_environment", "distributed_type", "fsdp_config", "deepspeed_config")

_VALUES = {
    ("stage",): "stage",
    ("offload_optimizer", "device"): "offload.optimizer",
    ("offload_optimizer", "ratio"): "offload.ratio",
    ("offload_optimizer", "nvme_path"): "offload.nvme_path",
    ("offload_param", "device"): "offload.params",
    ("offload_param", "nvme_path"): "offload.nvme_path",
    ("mics_shard_size",): "comm.shard_group_size",
}
"""Settings below DeepSpeed's `zero_optimization` → hf_zero's settings with the same values."""

_SWITCHES = {
    "zero_quantized_weights": "comm.weights=int8",
    "zero_quantized_gradients": "comm.gradients=int8",
    "zero_hpz_partition_size": "comm.secondary_shard=node",
}
_SAID_BY_THE_RUN = {
    "gradient_clipping": "max_grad_norm",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "bf16": "bf16",
    "fp16": "fp16",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
    "activation_checkpointing": "activation_checkpointing (gradient_checkpointing before transformers 5.23)",
}
_MEANINGS = {
    "zero": "its settings belong at the top level of a config, so remove this key",
    "hf_zero": "its settings belong at the top level of a config, so remove this key",
    "zero_optimization": "it is DeepSpeed's; here its settings belong at the top level",
    "offload_optimizer": "it is DeepSpeed's; here it is `offload.optimizer`: none, cpu or nvme",
    "offload_param": "it is DeepSpeed's; here it is `offload.params`: none, cpu or nvme",
    "reduce_bucket_size": "it is DeepSpeed's; here it is `bucket_bytes`, in bytes",
    "allgather_bucket_size": "it is DeepSpeed's; here it is `bucket_bytes`, in bytes",
    "stage3_prefetch_bucket_size": "it is DeepSpeed's; here it is `prefetch_units`, in layers",
    "stage3_param_persistence_threshold": "it is DeepSpeed's; here a layer is gathered in one message, so remove it",
    "communication_data_type": "it is DeepSpeed's; here it is `reduce_dtype`",
    "zero_quantized_weights": "it is DeepSpeed's; here it is `comm.weights: int8`",
    "zero_quantized_gradients": "it is DeepSpeed's; here it is `comm.gradients: int8`",
    "zero_hpz_partition_size": "it is DeepSpeed's; here it is `comm.secondary_shard: node`",
    "mics_shard_size": "it is DeepSpeed's; here it is `comm.shard_group_size`",
    "overlap_comm": "it is DeepSpeed's; the engine always overlaps, so remove it",
    "contiguous_gradients": "it is DeepSpeed's; here gradients are always contiguous, so remove it",
    "fsdp_sharding_strategy": "it is FSDP's; FULL_SHARD is `stage: 3`, SHARD_GRAD_OP is `stage: 2`",
    "fsdp_reshard_after_forward": "it is FSDP's; here it is `reshard_after_forward`, at `stage: 3`",
    "fsdp_transformer_layer_cls_to_wrap": "it is FSDP's; here it is `unit_modules`, and auto finds the layers",
    "fsdp_offload_params": "it is FSDP's; here it is `offload.params: cpu` with `offload.optimizer: cpu`",
}


def meaning_elsewhere(key: Any) -> str | None:
    """Explains a key of another engine's config in hf_zero's words; None for an unknown key."""
    return _MEANINGS.get(key) if isinstance(key, str) else None


def refuse_files_of_others(settings: Mapping[Any, Any], where: str) -> None:
    """Raises `ConfigError` for a config of DeepSpeed or accelerate, with the equivalent settings of hf_zero.

    Args:
        where: the name of the settings' source, for the error.
    """
    if any(key in settings for key in _OF_DEEPSPEED):
        raise ConfigError(_instead_of_deepspeed(settings, where))
    if any(key in settings for key in _OF_ACCELERATE):
        raise ConfigError(
            f"hf_zero config: {cut(where)} is a config of `accelerate launch`, not of hf_zero. Pass it to `accelerate launch "
            "--config_file`, and pass hf_zero a stage, settings such as stage=2,offload.optimizer=cpu, or a separate YAML file."
        )


def _instead_of_deepspeed(settings: Mapping[Any, Any], where: str) -> str:
    section = settings.get("zero_optimization")
    section = section if isinstance(section, Mapping) else {}
    same = _same_settings(section)
    said_by_the_run = sorted({name for key, name in _SAID_BY_THE_RUN.items() if key in settings})
    sentences = [f"hf_zero config: {cut(where)} is a config of DeepSpeed, which hf_zero does not read."]
    if same:
        sentences.append(f"The equivalent here: `{','.join(same)}`, as `--zero` or, one per line, in a YAML file.")
    if said_by_the_run:
        sentences.append(
            f"Set the other values in the training arguments or the script: {', '.join(said_by_the_run)} (without --deepspeed)."
        )
    sentences.append(
        "Bucket sizes and overlap need no settings; here their names are `bucket_bytes` and `prefetch_units`. `hf-zero "
        "migrate` converts the config and explains each key."
    )
    return " ".join(sentences)


def _same_settings(section: Mapping[Any, Any]) -> list[str]:
    same: dict[str, Any] = {}
    for path, name in _VALUES.items():
        value: Any = section
        for step in path:
            value = value.get(step) if isinstance(value, Mapping) else None
        if _is_taken_over(value):
            same.setdefault(name, value)
    switched = {key: section.get(key) for key in _SWITCHES}
    on = [_SWITCHES[key] for key, value in switched.items() if value is True or (type(value) is int and value > 1)]
    return [*(f"{name}={value}" for name, value in same.items()), *on]


def _is_taken_over(value: Any) -> bool:
    if type(value) is str:
        return value not in ("auto", "none") and value.isprintable() and len(value) < 100
    return type(value) in (int, float) and 0 <= value < 2**63


# ---- Text to settings: YAML files and command-line values ----
#
# Any text is parsed to plain Python values in mappings and lists of a few levels, or raises `ConfigError`.

_MOST_TEXT_BYTES = 64 * 2**10
_MOST_LEVELS = 8
_TOO_DEEP = f"there are more than {_MOST_LEVELS} levels"


def read_yaml(path: Path) -> Any:
    """Reads a YAML file. Raises `ConfigError` if the file cannot be read."""
    where = cut(str(path))
    try:
        if path.is_dir():
            raise ConfigError(f"hf_zero config: {where!r} is a folder. Pass the YAML file in it, or a stage number.")
        if not path.is_file():
            names = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
            # The nearest name first: a folder may have many files.
            near = [*difflib.get_close_matches(path.name, names, n=1), *names]
            near = list(dict.fromkeys(near))[:8]
            found = f"that folder holds {cut(', '.join(near))}" if near else "there is no YAML file in that folder"
            raise ConfigError(f"hf_zero config: no file {where!r}; {found}. Pass a YAML path or a stage number.")
        with path.open("rb") as file:
            # Read one byte more than the limit, to notice a longer file without reading all of it.
            text = file.read(_MOST_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"hf_zero config: {where} cannot be read ({error.strerror}). Pass the path of a YAML file, or a stage number."
        ) from error
    try:
        # Some editors start a file with a byte order mark, which would become part of the first key.
        return parse(text.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"hf_zero config: {where} is not text in UTF-8. Pass a YAML file such as one with the line `stage: 2`."
        ) from error


def parse(text: str, where: str) -> Any:
    """Parses YAML text.

    Args:
        where: the name of the text, for errors.
    """
    # Allow surrogates: Python makes them from invalid bytes on a command line, and `encode` would raise an unrelated error.
    if len(text.encode("utf-8", "surrogatepass")) > _MOST_TEXT_BYTES:
        raise ConfigError(
            f"hf_zero config: {where} is longer than {_MOST_TEXT_BYTES // 2**10} KiB; settings are a few lines of YAML."
        )
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = cut(getattr(error, "problem", None) or str(error).partition("\n")[0])
        if "\\t" in problem:
            problem += ". Indent with spaces"
        elif "mapping values are not allowed" in problem:
            problem += ". Indent all settings of one section equally"
        raise ConfigError(f"hf_zero config: {where} is not valid YAML{line}: {problem}.") from error


def settings_of(text: str) -> dict[str, Any]:
    """`stage=2,comm.timeout_s=60` → {"stage": 2, "comm": {"timeout_s": 60}}, with values parsed as YAML."""
    if len(text) > _MOST_TEXT_BYTES:
        raise refuse("config", text, "one line of settings as name=value, separated by commas")
    settings: dict[str, Any] = {}
    for part in _parts(text):
        name, equals, value = part.partition("=")
        if ";" in value and "=" in value:
            raise refuse("config", text, "settings as name=value, separated by commas")
        if not equals:
            raise refuse("config", text, "settings as name=value, separated by commas")
        name = name.strip()
        *path, leaf = name.split(".")
        section = settings
        for step in path:
            section = section.setdefault(step, {})
            if not isinstance(section, Mapping):
                raise refuse(cut(name), value, f"nothing: `{cut(step)}` has a value already")
        if leaf in section:
            raise ConfigError(
                f"hf_zero config: `{cut(name)}` is set twice, to {shown(section[leaf])} and to {shown(value)}. Set it once."
            )
        section[leaf] = parse(value, f"`{cut(name)}={cut(value)}`")
    return settings


def _parts(text: str) -> list[str]:
    """Splits text at the commas outside of brackets and quotes."""
    parts, start, depth, quote, before = [], 0, 0, "", ","
    for index, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"" and before in "=[{,:":
            # In other positions the sign is an apostrophe within a word.
            quote = sign
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        elif sign == "," and depth <= 0:
            parts.append(text[start:index])
            start = index + 1
        before = before if sign == " " else sign
    return [*parts, text[start:]]


class _Loader(yaml.SafeLoader):
    """Loads YAML's plain values: no tags, dates or aliases of collections, unique keys, and `1e3` is a number as in YAML 1.2."""

    # First of all resolvers: a time such as 3:40 is text, where YAML 1.1 would read 220.
    yaml_implicit_resolvers: ClassVar = {
        sign: [
            ("tag:yaml.org,2002:str", re.compile(r"[-+]?[0-9_]+(?::[0-9]+)+(?:\.[0-9_]*)?$")),
            *((tag, form) for tag, form in resolvers if not tag.endswith(":timestamp")),
        ]
        for sign, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str):
        super().__init__(text)
        self._level = 0

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        # Refuse here: the scanner looks far ahead, in time proportional to the square of the depth.
        if self.flow_level == _MOST_LEVELS:
            raise yaml.scanner.ScannerError(problem=_TOO_DEEP, problem_mark=self.get_mark())
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            if isinstance(self.anchors.get(event.anchor), yaml.CollectionNode):
                raise _not_taken("an alias of a mapping or list; write the mapping or list itself", event)
        elif event.tag not in (None, "!"):
            raise _not_taken("a tag; write the plain value", event)
        if self._level == _MOST_LEVELS:
            raise yaml.composer.ComposerError(problem=_TOO_DEEP, problem_mark=event.start_mark)
        self._level += 1
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {shown(key.value)} appears twice", problem_mark=key.start_mark
                )
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _not_taken(what: str, event: yaml.Event) -> yaml.YAMLError:
    return yaml.composer.ComposerError(problem=f"there is {what}", problem_mark=event.start_mark)
