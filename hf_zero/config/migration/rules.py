"""What becomes of one key of another engine's config: kinds of answers, for tables that list the keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias


class Fate(str, Enum):
    """Which of the three lists a key is in."""

    MAPPED = "mapped"
    NOT_NEEDED = "not needed"
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True)
class Verdict:
    """What becomes of a key with its value.

    Attributes:
        said: the setting here, why none is needed, or what to do instead.
        settings: dotted names of settings here, and their values.
    """

    fate: Fate
    said: str
    settings: Mapping[str, Any] = field(default_factory=dict)


Rule: TypeAlias = Callable[[Any, Mapping[Any, Any]], Verdict]
"""Is given a key's value and the section that the key is in."""

Table: TypeAlias = Mapping[str, Rule]
"""Dotted path of a key → its rule."""


def is_off(value: Any) -> bool:
    """Whether a value leaves a feature off, or to its default."""
    if isinstance(value, Mapping):
        return not value or is_off(value.get("enabled", True))
    return value is None or value is False or value in ("auto", "none", "no", "false", "False", "NO", "None", "", [], 0)


def mapped(settings: Mapping[str, Any], note: str = "") -> Verdict:
    said = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return Verdict(Fate.MAPPED, said + (f"; {note}" if note else ""), settings)


def unneeded(why: str) -> Verdict:
    return Verdict(Fate.NOT_NEEDED, why)


def unsupported(instead: str) -> Verdict:
    return Verdict(Fate.NOT_SUPPORTED, instead)


def never(why: str) -> Rule:
    """Needed for no value."""
    return lambda value, section: unneeded(why)


def instead(what: str) -> Rule:
    """Not there; what does the like. Left off it needs nothing."""
    return lambda value, section: unneeded("off, or left to its default") if is_off(value) else unsupported(what)


def same(name: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """A setting here with the same meaning, which takes the value."""

    def rule(value: Any, section: Mapping[Any, Any]) -> Verdict:
        if value is None or value == "auto":
            return unneeded(f"`{name}` is left to its default")
        return mapped({name: convert(value)})

    return rule


def one_of(values: Mapping[Any, Mapping[str, Any]], otherwise: str, off: str = "off, or left to its default") -> Rule:
    """The settings for a value of a few; text in any case. A value that maps to nothing needs nothing.

    Args:
        otherwise: what to do about any other value.
        off: why a value that is off needs nothing.
    """

    def rule(value: Any, section: Mapping[Any, Any]) -> Verdict:
        known = value.upper() if isinstance(value, str) else value
        for each, settings in values.items():
            if type(each) is type(known) and each == known:
                return mapped(settings) if settings else unneeded(off)
        return unneeded(off) if is_off(value) else unsupported(otherwise)

    return rule


def switch(settings: Mapping[str, Any], off: str = "off, or left to its default") -> Rule:
    """Settings for a feature that is on."""
    return lambda value, section: unneeded(off) if is_off(value) else mapped(settings)


def whole(value: Any) -> Any:
    """1e5, as JSON may have it, as a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
