"""`hf-zero migrate`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.format.text import shown
from ..config import ConfigError
from ..config.migration.migrate import MigratedKey
from ..config.migration.migrate import migrate as migrated
from .output import LONGEST_LINE, Json, said_plainly, say, say_json


def migrate(
    source: Annotated[Path, typer.Argument(help="DeepSpeed's JSON file, an accelerate config, or an FSDP config.")],
    write: Annotated[Path | None, typer.Option(help="Write the config here to this new YAML file.")] = None,
    as_json: Json = False,
) -> None:
    """The equal config of hf_zero, with a word on every key: mapped, not needed, or not supported and what instead."""
    with said_plainly():
        found = migrated(source)
        if write is not None:
            if write.exists():
                raise ConfigError(f"hf_zero: {write} is there already; name a new file.")
            write.write_text(found.yaml, encoding="utf-8")
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
    say(f"# of a config of {found.source}" + (f", written to {write}" if write is not None else ""))
    say(found.yaml.rstrip())


def _say_list(name: str, keys: Sequence[MigratedKey]) -> None:
    if keys:
        say(f"{name}:")
    for key in keys:
        say(shown(f"  {key.key}: {key.said}", LONGEST_LINE))
