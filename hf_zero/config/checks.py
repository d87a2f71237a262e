"""What a setting may be, and how one that may not is refused: by name, value, and what is allowed."""

import difflib
from typing import Any

AUTO = "auto"
DTYPES = ("float32", "bfloat16", "float16")
_BYTES_PER_UNIT = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


class ConfigError(ValueError):
    """A setting that cannot be honoured: names the field, the value, and what is allowed."""


def refuse(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"hf_zero config: `{name}` is {value!r}; allowed: {allowed}.")


def one_of(name: str, value: Any, allowed: tuple) -> None:
    if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
        raise refuse(name, value, ", ".join(str(a) for a in allowed))


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


def unknown_key(key: str, prefix: str, known: list[str]) -> ConfigError:
    if any(key == name or key.endswith(f"_{name}") for name in _SAID_ELSEWHERE):
        hint = "it is said in the training arguments or the script, and only there"
    else:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"the nearest known one is `{prefix}{near[0]}`" if near else "nothing known is near it"
    return ConfigError(f"hf_zero config: unknown key `{prefix}{key}`; {hint}. Known: {', '.join(known)}.")


def not_built(name: str, value: Any, instead: str) -> ConfigError:
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
    raise refuse(name, value, "a number of bytes above 0, or text such as '16MiB'")


def class_names(name: str, value: Any) -> tuple[str, ...]:
    """`"GPT2Block"`, or a list of such → a tuple."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not names or not all(isinstance(n, str) and n.isidentifier() for n in names):
        raise refuse(name, value, "auto, a class name such as GPT2Block, or a list of class names")
    return names
