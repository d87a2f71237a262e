"""What a report is made of, as values: the page draws them, and `hf-zero report --json` prints them."""

from dataclasses import asdict, dataclass, field
from typing import Any

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a plot: points by step, finite ones only, in the order of steps.

    Attributes:
        role: "main" stands out, "beside" is drawn thin, "other" is dashed.
    """

    name: str
    points: tuple[Point, ...]
    role: str = "main"


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Values over steps.

    Attributes:
        unit: of the values; "" where they have none.
        zero: whether the axis of values begins at zero.
    """

    series: tuple[Series, ...]
    unit: str = ""
    zero: bool = False


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A row of bars: its value and, where there are such, what was planned and what something else takes.

    Attributes:
        shown: the value with its unit.
        planned, other: on the same scale; None is not known.
        notes: further columns.
    """

    name: str
    value: float
    shown: str
    planned: float | None = None
    other: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A table of bars on one scale.

    Attributes:
        columns: heads: of the names, of the values, and of the further columns.
    """

    columns: tuple[str, ...]
    rows: tuple[Bar, ...]


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One row of a timeline: spans as (name, start, end) in seconds, and those in which training stood still."""

    name: str
    spans: tuple[tuple[str, float, float], ...]
    waits: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timeline:
    seconds: float
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A figure with the sentence over it.

    Attributes:
        key: its name in JSON and its anchor.
        sentence: what one sees.
        note: how it was measured, and what it leaves out.
    """

    key: str
    title: str
    sentence: str
    body: tuple[Plot | Bars | Timeline | Table, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run at one look.

    Attributes:
        state: how it ended, in a sentence.
        answers: (question, answer, more) at the head.
        found: what went wrong or was unusual, in sentences.
        facts: what was run.
        missing: what the folder does not tell, in sentences.
    """

    title: str
    folder: str
    state: str
    answers: tuple[tuple[str, str, str], ...]
    found: tuple[str, ...]
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...]
    missing: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
