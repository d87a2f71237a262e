"""Translates another engine's config into a valid config of hf_zero, with a translation of each key."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..config.checks import ConfigError, cut, parse, read_yaml, shown
from ..config.zero import ZeroConfig
from .accelerate_settings import OF_ACCELERATE
from .deepspeed_settings import OF_JSON
from .fsdp_settings import OF_FSDP
from .translation import Fate, Rule, Table, Translation, unneeded, unsupported

_MOST_BYTES = 64 * 2**10
_MARKS_OF_ACCELERATE = {"compute_environment", "distributed_type", "fsdp_config", "deepspeed_config", "machine_rank"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A kind of config.

    Attributes:
        name: name of the engine.
        table: rules for its keys.
        stage: stage of hf_zero if the config specifies none.
    """

    name: str
    table: Table
    stage: int


ACCELERATE = Source(name="accelerate", table=OF_ACCELERATE, stage=0)
DEEPSPEED = Source(name="DeepSpeed", table=OF_JSON, stage=0)
FSDP = Source(
    name="FSDP", table={f"{prefix}{path}": rule for path, rule in OF_FSDP.items() for prefix in ("fsdp_", "")}, stage=3
)


@dataclass(frozen=True, kw_only=True)
class MigratedKey:
    """A key of the source.

    Attributes:
        key: dotted path.
        value: value in the source.
        said: the setting here, why none is needed, or what to do instead.
    """

    key: str
    value: Any
    said: str


@dataclass(frozen=True, kw_only=True)
class Migration:
    """The translation of another engine's config.

    Attributes:
        source: the engine of the config: DeepSpeed, FSDP or accelerate.
        config: the equivalent config.
        yaml: `config` as a file, with the settings that the source specifies.
        mapped: keys with a setting here.
        not_needed: keys that need no setting, and why.
        not_supported: keys that are not supported or unknown, and what to do instead.
    """

    source: str
    config: ZeroConfig
    yaml: str
    mapped: tuple[MigratedKey, ...]
    not_needed: tuple[MigratedKey, ...]
    not_supported: tuple[MigratedKey, ...]


def migrate(source: str | Path | Mapping[Any, Any]) -> Migration:
    """Translates a config of DeepSpeed (JSON), accelerate (YAML) or FSDP (either) into one of hf_zero.

    Args:
        source: a file, or its contents.

    Raises:
        ConfigError: the source cannot be read, or has no key of any of these engines.
    """
    where = "this mapping" if isinstance(source, Mapping) else Path(source).name
    settings = source if isinstance(source, Mapping) else _read(Path(source))
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"hf_zero: {cut(where)} holds {shown(settings)}, not a mapping of settings. migrate reads DeepSpeed's JSON, an "
            "accelerate config, or Trainer's fsdp_config."
        )
    origin = _origin(settings, where)
    base = {"stage": _own_stage(settings, origin)}
    lists: dict[Fate, list[MigratedKey]] = {fate: [] for fate in Fate}
    waiting = []
    for path, value, translation in _keys(settings, origin.table):
        if translation.fate is Fate.MAPPED:
            waiting.append((path, value, translation))
        else:
            lists[translation.fate].append(MigratedKey(key=path, value=value, said=translation.said))
    chosen: dict[str, Any] = {}
    refused: dict[int, str] = {}
    # Settings that are valid only together with another key are tried again after that key. Stages come first.
    waiting.sort(key=lambda found: "stage" not in found[2].settings)
    while waiting:
        left = []
        for path, value, translation in waiting:
            hindrance = _hindrance(base, chosen, translation)
            if hindrance is None:
                chosen |= translation.settings
                lists[Fate.MAPPED].append(MigratedKey(key=path, value=value, said=translation.said))
            else:
                refused[id(translation)] = hindrance
                left.append((path, value, translation))
        if len(left) == len(waiting):
            break
        waiting = left
    for path, _, translation in waiting:
        # Without the stage, the config would shard nothing, and no run would say so.
        if "stage" in translation.settings and "stage" not in chosen:
            raise ConfigError(
                f"hf_zero: {cut(where)}: in {path}, {refused[id(translation)].rstrip('.')}. Correct that file."
            )
    for path, value, translation in waiting:
        lists[Fate.NOT_SUPPORTED].append(MigratedKey(key=path, value=value, said=refused[id(translation)]))
    text = _as_yaml(base | chosen)
    return Migration(
        source=origin.name,
        config=_read_back(text),
        yaml=text,
        mapped=tuple(lists[Fate.MAPPED]),
        not_needed=tuple(lists[Fate.NOT_NEEDED]),
        not_supported=tuple(lists[Fate.NOT_SUPPORTED]),
    )


def _read(path: Path) -> Any:
    if path.suffix != ".json":
        return read_yaml(path)
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ConfigError(
                f"hf_zero: {cut(str(path))} is longer than {_MOST_BYTES // 2**10} KiB, so it is not a config."
            )
        return json.loads(text.decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"hf_zero: {cut(str(path))} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"hf_zero: {cut(str(path))} is not valid JSON: {cut(str(error))}.") from error


def _origin(settings: Mapping[Any, Any], where: str) -> Source:
    names = {key for key in settings if isinstance(key, str)}
    if names & _MARKS_OF_ACCELERATE:
        return ACCELERATE
    found = [source for source in (DEEPSPEED, FSDP, ACCELERATE) if names & _first_names(source.table)]
    if not found:
        raise ConfigError(
            f"hf_zero: {cut(where)} has no key of DeepSpeed's, FSDP's or accelerate's configs. migrate reads a DeepSpeed JSON "
            "file, an accelerate config, or an FSDP config."
        )
    return max(found, key=lambda source: len(names & _first_names(source.table)))


def _first_names(table: Table) -> set[str]:
    return {path.partition(".")[0] for path in table}


def _own_stage(settings: Mapping[Any, Any], origin: Source) -> int:
    """Returns the stage for a config without one."""
    section = settings.get("fsdp_config") if origin is ACCELERATE else None
    return FSDP.stage if isinstance(section, Mapping) and section else origin.stage


def _keys(settings: Mapping[Any, Any], table: Table, prefix: str = "") -> Iterator[tuple[str, Any, Translation]]:
    """Yields each key once: dotted path, value and translation."""
    for key, value in settings.items():
        path = f"{prefix}{key}"
        # A dot in a key's own name does not separate sections.
        is_plain = isinstance(key, str) and "." not in key
        rule: Rule | None = table.get(path) if is_plain else None
        is_section = is_plain and any(known.startswith(f"{path}.") for known in table)
        if rule is not None:
            yield path, value, rule(value, settings)
        elif is_section and isinstance(value, Mapping) and value:
            yield from _keys(value, table, f"{path}.")
        elif is_section and not value:
            yield path, value, unneeded("it is empty")
        elif is_section:
            yield path, value, unsupported("it is not a mapping of settings; check the file")
        else:
            yield path, value, unsupported("unknown: no key of this kind of config has this name")


def _hindrance(base: Mapping[str, Any], chosen: Mapping[str, Any], translation: Translation) -> str | None:
    """Returns how settings contradict the chosen ones; None if all agree."""
    for name, value in translation.settings.items():
        if name in chosen and chosen[name] != value:
            return f"another key sets `{name}` to {shown(chosen[name])}; here it has only one value"
    try:
        _read_back(_as_yaml({**base, **chosen, **translation.settings}))
    except (ConfigError, UnicodeError, yaml.YAMLError) as error:
        return str(error).removeprefix("hf_zero config: ")
    return None


def _as_yaml(settings: Mapping[str, Any]) -> str:
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *path, leaf = name.split(".")
        section = nested
        for step in path:
            section = section.setdefault(step, {})
        section[leaf] = value
    return yaml.safe_dump(nested, sort_keys=False, allow_unicode=False)


def _read_back(text: str) -> ZeroConfig:
    text.encode("utf-8")
    return ZeroConfig.from_dict(parse(text, "the migrated config"))
