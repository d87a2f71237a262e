"""Rules to translate one key of another engine's config."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias


class Fate(str, Enum):
    """The three lists to which a key may belong."""

    MAPPED = "mapped"
    NOT_NEEDED = "not needed"
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True)
class Translation:
    """The translation of a key with its value.

    Attributes:
        said: the setting here, why none is needed, or what to do instead.
        settings: dotted names of settings here, and their values.
    """

    fate: Fate
    said: str
    settings: Mapping[str, Any] = field(default_factory=dict)


Rule: TypeAlias = Callable[[Any, Mapping[Any, Any]], Translation]
"""Called with the value of a key and the section around the key."""

Table: TypeAlias = Mapping[str, Rule]
"""Dotted path of a key → its rule."""


def is_off(value: Any) -> bool:
    """Whether a value disables a feature, or leaves it at its default."""
    if isinstance(value, Mapping):
        return not value or is_off(value.get("enabled", True))
    return value is None or value is False or value in ("auto", "none", "no", "false", "False", "NO", "None", "", [], 0)


def mapped(settings: Mapping[str, Any], note: str = "") -> Translation:
    said = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return Translation(Fate.MAPPED, said + (f"; {note}" if note else ""), settings)


def unneeded(why: str) -> Translation:
    return Translation(Fate.NOT_NEEDED, why)


def unsupported(instead: str) -> Translation:
    return Translation(Fate.NOT_SUPPORTED, instead)


def never(why: str) -> Rule:
    """Returns a rule for an unneeded key."""
    return lambda value, section: unneeded(why)


def instead(what: str) -> Rule:
    """Returns a rule which names a replacement for an unsupported key. If the key is off, nothing is needed."""
    return lambda value, section: unneeded("off, or left at its default") if is_off(value) else unsupported(what)


def same(name: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Returns a rule for a setting with the same meaning and the same value in hf_zero."""

    def rule(value: Any, section: Mapping[Any, Any]) -> Translation:
        if value is None or value == "auto":
            return unneeded(f"`{name}` is left at its default")
        return mapped({name: convert(value)})

    return rule


def one_of(values: Mapping[Any, Mapping[str, Any]], otherwise: str, off: str = "off, or left at its default") -> Rule:
    """Returns a rule which maps a few values to settings; text in any case. A value mapped to {} needs nothing.

    Args:
        otherwise: what to do about any other value.
        off: why a value that is off needs nothing.
    """

    def rule(value: Any, section: Mapping[Any, Any]) -> Translation:
        known = value.upper() if isinstance(value, str) else value
        for each, settings in values.items():
            if type(each) is type(known) and each == known:
                return mapped(settings) if settings else unneeded(off)
        return unneeded(off) if is_off(value) else unsupported(otherwise)

    return rule


def switch(settings: Mapping[str, Any], off: str = "off, or left at its default") -> Rule:
    return lambda value, section: unneeded(off) if is_off(value) else mapped(settings)


def whole(value: Any) -> Any:
    """Converts 1e5, which JSON reads as a float, to an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
