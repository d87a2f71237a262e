"""Rectangles, lines and words as SVG text, the same on every machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

BLUE, ORANGE, GREEN, GREY, DARK, PALE = "#4878a8", "#e08a3c", "#5a9e6f", "#9aa0a6", "#202124", "#f1f3f4"
_FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass
class Picture:
    """A white page of `width` x `height`, drawn from the top left corner."""

    width: int
    height: int
    title: str
    _parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, line: str = "white") -> None:
        """A filled rectangle."""
        self._parts.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{fill}' stroke='{line}'/>"
        )

    def line(self, points: Sequence[tuple[float, float]], *, colour: str = GREY, dashed: bool = False) -> None:
        """A line through points."""
        through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = " stroke-dasharray='4 3'" if dashed else ""
        self._parts.append(f"<polyline points='{through}' fill='none' stroke='{colour}'{dashes}/>")

    def dot(self, x: float, y: float, fill: str, *, radius: float = 6) -> None:
        """A filled circle."""
        self._parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius:.1f}' fill='{fill}'/>")

    def turned(self, x: float, y: float, text: str) -> None:
        """A line of text that runs upwards from `x`, `y`."""
        self._parts.append(
            f"<text transform='translate({x:.1f} {y:.1f}) rotate(-60)' {_FONT} font-size='12' fill='{DARK}'>{escape(text)}</text>"
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        anchor: str = "start",
        colour: str = DARK,
        bold: bool = False,
    ) -> None:
        """A line of text; `y` is its base line, and `anchor` says which of its ends, or its `middle`, is at `x`."""
        weight = " font-weight='bold'" if bold else ""
        self._parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' {_FONT} font-size='{size}' text-anchor='{anchor}' fill='{colour}'{weight}>"
            f"{escape(text)}</text>"
        )

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Colours and their names, side by side."""
        for colour, name in entries:
            self.box(x, y - 10, 12, 12, colour)
            self.words(x + 17, y, name)
            x += 17 + 7 * len(name) + 18

    def text(self) -> str:
        """The SVG file."""
        return "\n".join(
            [
                f"<svg xmlns='http://www.w3.org/2000/svg' width='{self.width}' height='{self.height}' "
                f"viewBox='0 0 {self.width} {self.height}' role='img'>",
                f"<title>{escape(self.title)}</title>",
                f"<rect width='{self.width}' height='{self.height}' fill='white'/>",
                *self._parts,
                "</svg>\n",
            ]
        )
