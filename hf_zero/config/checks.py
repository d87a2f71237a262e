"""What a setting may be, and how one that may not is refused: by name, value, and what is allowed."""

import dataclasses
import difflib
import math
import re
import reprlib
from typing import Any, Final, get_args

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
_MOST = 2**31 - 1
_MOST_BYTES = 2**63 - 1
_MOST_SECONDS = 2_000_000
_MOST_SHOWN = 160
_LONGEST_PATH = 4096


class ConfigError(ValueError):
    """A setting that cannot be honoured: names the field, the value, and what is allowed."""


class _Shown(reprlib.Repr):
    """`repr` of the beginning of a value, in little time however large or deep the value is."""

    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 100, 100

    def repr_int(self, value: int, level: int) -> str:
        # Python refuses to write integers of thousands of digits.
        digits = int(value.bit_length() * math.log10(2)) + 1
        return repr(value) if digits < 40 else f"a whole number of about {digits} digits"

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[:40]) if len(value) <= 40 else f"{value[:40]!r}..."


def shown(value: Any) -> str:
    """A value as an error shows it: Python's `repr`, cut where it would be long."""
    return cut(_Shown().repr(value))


def cut(text: str) -> str:
    """The beginning of a text, for errors that quote it; what cannot be printed is escaped."""
    text = text[: _MOST_SHOWN + 1]
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def plain(value: Any) -> Any:
    """A number of numpy's, or one of a subclass of Python's numbers and text, as Python's own; anything else as it is."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return str.__str__(value) if isinstance(value, str) else value


def to_python_numbers(config: Any) -> None:
    """Numbers of numpy's, of subclasses and in quotes become Python's own in a config's fields."""
    for field in dataclasses.fields(config):
        object.__setattr__(config, field.name, _unquoted(plain(getattr(config, field.name)), field.type))


def _unquoted(value: Any, kind: Any) -> Any:
    """`"2"` of a field of numbers, or `"true"` of a switch, as YAML reads it without the quotes."""
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
    if not any(type(value) is type(a) and value == a for a in allowed):
        if type(value) is str:
            refuse_cut(f"{name}: {value}")
        raise refuse(name, value, ", ".join(str(a) for a in allowed))


def whole_number(name: str, value: Any, least: int, *, most: int = _MOST, also: tuple = (), what: str = "") -> None:
    """Refuses all but an integer from `least`, or one of the words in `also`.

    Args:
        most: the largest one.
        what: what the number counts, in words.
    """
    if type(value) is str and value in also:
        return
    if type(value) is not int or not least <= value <= most:
        raise refuse(name, value, f"{', '.join((*also, ''))}a whole number{what} from {least} to {most}")


def seconds(name: str, value: Any, *, also: tuple = ()) -> None:
    """Refuses all but a time that timers can be set to, or one of the words in `also`."""
    if type(value) is str and value in also:
        return
    if type(value) not in (int, float) or not 0.001 <= value <= _MOST_SECONDS:
        raise refuse(name, value, f"{', '.join((*also, ''))}a number of seconds from 0.001 to {_MOST_SECONDS}")


def number(name: str, value: Any, holds: Any, allowed: str) -> None:
    """Refuses all but a number for which `holds` is true."""
    if type(value) not in (int, float) or not holds(value):
        raise refuse(name, value, allowed)


def path_of_folder(name: str, value: Any) -> None:
    """Refuses what no folder can be called."""
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
)
"""Keys that people bring from other engines' files; they have one source, and it is not this one."""


def unknown_key(key: Any, prefix: str, known: list[str], meant: str | None = None) -> ConfigError:
    """Args:
    meant: what the key is where it comes from, in words.
    """
    is_word = isinstance(key, str) and len(key) <= 64
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5) if is_word else []
    if meant is not None:
        hint = meant
    elif is_word and any(key == name or key.endswith(f"_{name}") for name in _SAID_ELSEWHERE):
        hint = "it is said in the training arguments or the script, and only there"
    elif near:
        hint = f"the nearest known one is `{prefix}{near[0]}`"
    else:
        hint = "nothing known is near it"
    name = f"`{prefix}{key}`" if is_word and key.isprintable() else shown(key)
    # A near one is all that a reader needs.
    others = "" if near and near[0] in hint else f" Known: {', '.join(known)}."
    return ConfigError(f"hf_zero config: unknown key {name}; {hint}.{others}")


CUT: Final = {
    "comm.peer_memory": "Leave it out: parameters travel through the process group, with the same losses",
    "checkpoint.replicate": "Leave it out: `checkpoint.resume: auto` goes on from the newest good checkpoint of output_dir",
    "checkpoint.replicate_every": "Leave it out, and save more often: checkpoints are written behind training",
    "comm.weights: auto": "Set int8 where links are slow (`hf-zero doctor` measures them), or leave it out",
    "comm.gradients: auto": "Set int8 where links are slow (`hf-zero doctor` measures them), or leave it out",
    "comm.weights: fp8": "Use int8: the same bytes, and less is lost",
    "comm.gradients: fp8": "Use int8: the same bytes, and less is lost",
    "comm.communicators": "Leave it out: on an accelerator gathers have a communicator of their own",
    "grad_buffers": "Leave it out: three buckets of gradients are on their way; `bucket_bytes` says how large they are",
    "check_nonfinite": "Leave it out; `nonfinite: ignore` steps with NaN and infinite gradients, as `check_nonfinite: false` did",
    "nonfinite: rewind": "Set `nonfinite: skip`, or stop and resume from a checkpoint",
    "offload.delay": "Leave it out: `offload.speculate_bytes` steps buckets during backward, to the same bits",
    "offload.delay_warmup": "Leave it out: no step is delayed",
    "offload.numa": "Leave it out: host steps run on the node of the rank's accelerator; `numactl` confines a process to another",
    "offload.threads": "Leave it out: ranks share the host's cores; on the CPU, set OMP_NUM_THREADS",
    "offload.window": "Leave it out: two buckets are read or written while another is stepped",
    "snapshot_every": "Leave it out: `nonfinite: skip` keeps no snapshots",
}
"""Settings, and values of settings (`name: value`), that were taken out, and what to do in place of each."""


CUT_NAMES: Final = {
    "ZeroAccelerator": "Use `Accelerator(parallelism_config=ZeroPlugin(...))`, or `plugin.attach(accelerator)` before prepare",
    "hf-zero card": "`hf-zero push` writes the model card, as Trainer's `push_to_hub` does",
}
"""Commands and public names that were taken out, and what to do in place of each."""


def cut_name(name: str) -> str:
    """The sentences that refuse a command or a public name that was taken out."""
    return f"hf_zero: `{name}` was taken out. {CUT_NAMES[name]}."


def refuse_cut(name: str) -> None:
    """Raises `ConfigError` for a setting that was taken out, or for `name: value` of a value that was."""
    if name in CUT:
        raise ConfigError(f"hf_zero config: the setting `{name}` was taken out of hf_zero. {CUT[name]}.")


def not_built(name: str, value: Any, instead: str) -> ConfigError:
    return ConfigError(f"hf_zero config: `{name}: {value}` is not built yet in this version; {instead}.")


def parse_bytes(name: str, value: Any, least: int = 1) -> int:
    """`16777216`, `5e8`, `"16MiB"` or `"16 MB"` → bytes. Raises `ConfigError` for anything else, less than `least` too."""
    value = plain(value)
    number, unit = value, "b"
    if type(value) is str:
        words = _BYTES_IN_WORDS.fullmatch(value.strip().lower())
        if words is not None:
            number, unit = (int(words[1]) if words[1].isdigit() else float(words[1])), words[2] or "b"
    if type(number) in (int, float) and unit in _BYTES_PER_UNIT:
        nbytes = number * _BYTES_PER_UNIT[unit]
        if least <= nbytes <= _MOST_BYTES and (unit != "b" or nbytes == int(nbytes)):
            return int(nbytes)
    raise refuse(name, value, f"a number of bytes {'above 0' if least else 'or 0'}, or text such as '16MiB'")


def class_names(name: str, value: Any) -> tuple[str, ...]:
    """`"GPT2Block"`, or a list of such → a tuple."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not names or not all(isinstance(n, str) and n.isidentifier() for n in names):
        raise refuse(name, value, "auto, a class name such as GPT2Block, or a list of class names")
    return names
