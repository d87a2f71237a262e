"""`hf-zero migrate`: translates configs of other engines."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoint.faults import shown
from ..config import ConfigError
from ..extras import extra
from .output import LONGEST_LINE, Json, said_plainly, say, say_json


def migrate(
    source: Annotated[Path, typer.Argument(help="DeepSpeed's JSON file, an accelerate config, or an FSDP config.")],
    write: Annotated[Path | None, typer.Option(help="Write the config of hf_zero to this new YAML file.")] = None,
    as_json: Json = False,
) -> None:
    """Translates a config of DeepSpeed, accelerate or FSDP, and lists each key as mapped, not needed or not supported."""
    with said_plainly():
        found = extra("foreign", "migrate")(source)
        if write is not None:
            try:
                # Mode "x" does not follow links.
                with write.open("x", encoding="utf-8") as file:
                    file.write(found.yaml)
            except FileExistsError as error:
                raise ConfigError(f"hf_zero: {write} already exists. Name a new file.") from error
    if as_json:
        lists = {
            name: [asdict(key) for key in getattr(found, name)] for name in ("mapped", "not_needed", "not_supported")
        }
        say_json(
            {"source": found.source, "yaml": found.yaml, "config": found.config.to_dict(), "written": write, **lists}
        )
        return
    _say_list("mapped", found.mapped)
    _say_list("not needed", found.not_needed)
    _say_list("not supported", found.not_supported)
    say(f"# converted from a config of {found.source}" + (f", written to {write}" if write is not None else ""))
    for line in found.yaml.splitlines():
        say(line)


def _say_list(name: str, keys: Sequence[Any]) -> None:
    if keys:
        say(f"{name}:")
    for key in keys:
        say(shown(f"  {key.key}: {key.said}", LONGEST_LINE))
