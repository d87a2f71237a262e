"""A finding of the doctor."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["good", "hint", "bad", "absent"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding of the doctor, and its remedy.

    Attributes:
        status: "bad" if training would fail or be much slower than necessary; "hint" for useful information; "absent" if the
            device or library does not exist.
        advice: what to do; empty if nothing is to be done.
    """

    subject: str
    status: Status
    value: str
    advice: str = ""


def good(subject: str, value: str) -> Finding:
    return Finding(subject=subject, status="good", value=value)


def hint(subject: str, value: str, advice: str) -> Finding:
    return Finding(subject=subject, status="hint", value=value, advice=advice)


def bad(subject: str, value: str, advice: str) -> Finding:
    return Finding(subject=subject, status="bad", value=value, advice=advice)


def absent(subject: str, value: str) -> Finding:
    return Finding(subject=subject, status="absent", value=value)
