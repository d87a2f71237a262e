"""Writes the generated parts of the documentation: the page of settings and the pictures.

`python scripts/write_docs.py` writes them. A test fails if a file differs from this script's output.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pictures

from hf_zero import ConfigError, ZeroConfig

_INTRODUCTION = """\
# Configuration

<!-- Made by `python scripts/write_docs.py` from docstrings of hf_zero/config. -->

Settings are a YAML file, a dict, text or keyword arguments of `ZeroPlugin`. Every setting is optional:

```yaml
stage: 2
grad_accumulation: local
comm:
  timeout_s: 600
```

The same settings as text, for `--zero` and `ZeroConfig.of`: `stage=2,grad_accumulation=local,comm.timeout_s=600`.

Learning rate, batch size, clipping and scheduler stay in your script. Unknown settings and
values raise a `ConfigError`. For settings that exclude each other, see [what is refused](what-is-refused.md).
"""

_TITLES = {
    "": "Sharding, precision and overlap",
    "offload": "`offload`: state in host memory or in files",
    "comm": "`comm`: traffic between ranks",
    "comm.outer": "`comm.outer`: the optimizer of outer steps",
    "checkpoint": "`checkpoint`: how checkpoints are written",
}

_PAGES = {
    "stage": "memory-and-traffic.md",
    "bucket_bytes": "how-it-works.md#buckets",
    "grad_accumulation": "memory-and-traffic.md",
    "param_dtype": "precision.md",
    "rounding": "precision.md#stochastic-rounding",
    "moments": "precision.md#8-bit-moments",
    "reduce_dtype": "precision.md",
    "broadcast_buffers": "how-it-works.md#buffers-of-modules",
    "check_replicas_every": "troubleshooting.md#copies-of-the-parameters-have-diverged",
    "nonfinite": "gradients-and-reports.md#bad-steps",
    "out_of_memory": "memory-and-traffic.md#when-memory-runs-out",
    "report": "report.md",
    "kernels": "optimizers.md#fused-kernels",
    "prefetch_units": "stage-3.md",
    "reshard_after_forward": "memory-and-traffic.md",
    "gather_dtype": "precision.md",
    "unit_modules": "stage-3.md",
    "unit_bytes": "stage-3.md",
    "offload": "offload.md",
    "offload.activations": "offload.md#activations",
    "comm": "slow-links.md",
    "comm.sync_every": "slow-links.md#outer-steps",
    "comm.outer": "slow-links.md#outer-steps",
    "comm.shard_group_size": "slow-links.md#several-shard-groups",
    "comm.secondary_shard": "slow-links.md#several-shard-groups",
    "comm.timeout_s": "troubleshooting.md#waiting-for-a-rank",
    "comm.late_s": "troubleshooting.md#waiting-for-a-rank",
    "checkpoint": "checkpoints-and-hub.md",
    "checkpoint.on_signal": "elastic.md#preemption",
    "checkpoint.every_minutes": "elastic.md#saves-by-the-clock",
    "checkpoint.budget": "elastic.md#saves-by-the-clock",
}
"""Setting → the page with its full explanation. A setting without an entry has its section's page."""

_WORDS = {
    "report": "true, false",
    "comm.late_s": "0",
    "checkpoint.on_signal": "none, auto",
}
"""Allowed values in addition to the ones listed in the error message."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    default: Any
    text: str

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0]


def settings(config: Any = None, prefix: str = "") -> Iterator[Setting]:
    """Yields all settings in the order of their classes, each section's settings directly after its key."""
    config = ZeroConfig() if config is None else config
    texts = _argument_texts(type(config)) | _attribute_texts(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{field.name}.")
        else:
            yield Setting(name=f"{prefix}{field.name}", default=value, text=texts[field.name])


def allowed(name: str) -> str:
    """Returns the allowed values of a setting, read from the error for a forbidden value."""
    nested: Any = object()
    for key in reversed(name.split(".")):
        nested = {key: nested}
    try:
        ZeroConfig.from_dict(nested)
    except ConfigError as error:
        said = re.search(r"allowed: (.*)\.$", str(error), flags=re.DOTALL)
        assert said is not None, error
        return said[1].replace("True", "true").replace("False", "false")
    raise AssertionError(f"{name} takes any value")


def page() -> str:
    """Returns the whole page."""
    parts = [_INTRODUCTION]
    found = list(settings())
    for group, title in _TITLES.items():
        parts.append(f"## {title}\n")
        parts += [_entry(setting) for setting in found if setting.group == group]
    return "\n".join(parts)


def _entry(setting: Setting) -> str:
    default = "null" if setting.default is None else str(setting.default)
    default = default.lower() if isinstance(setting.default, bool) else default
    more = f" [More]({_page_of(setting.name)})."
    text = textwrap.fill(_sentences(setting.text) + more, width=130, break_long_words=False, break_on_hyphens=False)
    takes = allowed(setting.name)
    # Look for the word in the text before the number.
    words = _WORDS.get(setting.name, default if default in ("auto", "null") else "")
    takes = f"{words}, {takes}" if words and not re.search(rf"\b{words}\b", takes.split(" from ")[0]) else takes
    # Leave out bounds far beyond any use, and a bound already named in words.
    takes = re.sub(r"(?<=0 for never), from 0|(?<=0 for none), from 0", "", re.sub(r" to \d{8,}$", "", takes))
    return f"### `{setting.name}`\n\nDefault `{default}`. Allowed: {takes}.\n\n{text}\n"


def _page_of(name: str) -> str:
    above = name
    while above not in _PAGES:
        above = above.rpartition(".")[0]
        if not above:
            raise KeyError(f"{name} is on no page: say in _PAGES where it is explained.")
    return _PAGES[above]


def _sentences(text: str) -> str:
    text = " ".join(text.split())
    return text[0].upper() + text[1:].removesuffix(".") + "."


def _argument_texts(kind: type) -> dict[str, str]:
    """Returns the text for each field under `Args:` in the class's docstring."""
    listed = (inspect.getdoc(kind) or "").partition("Args:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", listed, flags=re.MULTILINE)
    return dict(found)


def _attribute_texts(kind: type) -> dict[str, str]:
    """Returns the docstrings directly below fields."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: below.value.value
        for field, below in zip(body.body, body.body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


ROOT = Path(__file__).resolve().parent.parent

MADE = {
    "docs/configuration.md": page,
    "docs/pictures/memory.svg": pictures.draw_memory,
    "docs/pictures/flat_buffer.svg": pictures.draw_flat_buffer,
    "docs/pictures/timeline.svg": pictures.draw_timeline,
    "docs/pictures/folders_of_hf_zero.svg": pictures.draw_folders,
}
"""Generated file → the function that makes its text."""


def main() -> None:
    for name, make in MADE.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
