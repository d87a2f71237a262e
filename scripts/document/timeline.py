"""Draws what computes and what travels during a step, by the rules in which the engine starts and awaits collectives.

The durations are chosen. The order follows from the rules: a collective starts when its input is there and the one before it
has ended, and computation waits for what it needs.
"""

from dataclasses import dataclass, field

from .svg import BLUE, GREEN, GREY, ORANGE, Picture

_LAYERS = 4
_FORWARD, _BACKWARD, _STEP, _NORM = 2.0, 4.0, 0.8, 1.3
_REDUCE, _GATHER = 3.0, 1.6
_PREFETCH = 1


@dataclass
class Lane:
    """One queue: pieces of work, each begun when the one before has ended and `after` has come."""

    pieces: list[tuple[float, float, str, str]] = field(default_factory=list)
    free: float = 0.0

    def add(self, name: str, length: float, colour: str, *, after: float = 0.0) -> float:
        """The time at which the piece ends."""
        start = max(self.free, after)
        self.pieces.append((start, length, name, colour))
        self.free = start + length
        return self.free


def stage_2() -> tuple[Lane, Lane]:
    """A bucket a layer: reduced behind backward, gathered behind the step for the next forward."""
    compute, link = Lane(), Lane()
    for layer in range(_LAYERS):
        compute.add(f"F{layer}", _FORWARD, BLUE)
    reduced = 0.0
    for layer in reversed(range(_LAYERS)):
        full = compute.add(f"B{layer}", _BACKWARD, BLUE)
        reduced = link.add(f"RS{layer}", _REDUCE, ORANGE, after=full)
    normed = link.add("norm", _NORM, GREY, after=reduced)
    stepped = compute.add("step", _STEP * _LAYERS, GREEN, after=normed)
    gathered = [link.add(f"AG{layer}", _GATHER, ORANGE, after=stepped) for layer in range(_LAYERS)]
    for layer in range(_LAYERS):
        compute.add(f"F{layer}", _FORWARD, BLUE, after=gathered[layer])
    return compute, link


def stage_3() -> tuple[Lane, Lane]:
    """A layer is gathered ahead of its forward and its backward; the last ones stay gathered in between."""
    compute, link = Lane(), Lane()
    kept = range(_LAYERS - 1 - _PREFETCH, _LAYERS)
    gathered = {0: link.add("AG0", _GATHER, ORANGE)}
    for layer in range(_LAYERS):
        began = max(compute.free, gathered[layer])
        if layer + _PREFETCH < _LAYERS:
            ahead = layer + _PREFETCH
            gathered[ahead] = link.add(f"AG{ahead}", _GATHER, ORANGE, after=began)
        compute.add(f"F{layer}", _FORWARD, BLUE, after=gathered[layer])
    again = {layer: 0.0 for layer in kept}
    reduced = 0.0
    for layer in reversed(range(_LAYERS)):
        began = max(compute.free, again[layer])
        ahead = layer - _PREFETCH
        if ahead >= 0 and ahead not in again:
            again[ahead] = link.add(f"AG{ahead}", _GATHER, ORANGE, after=began)
        full = compute.add(f"B{layer}", _BACKWARD, BLUE, after=again[layer])
        reduced = link.add(f"RS{layer}", _REDUCE, ORANGE, after=full)
    normed = link.add("norm", _NORM, GREY, after=reduced)
    stepped = compute.add("step", _STEP * _LAYERS, GREEN, after=normed)
    first = link.add("AG0", _GATHER, ORANGE, after=stepped)
    compute.add("F0", _FORWARD, BLUE, after=first)
    return compute, link


def draw() -> str:
    """Both stages, one below the other, each with its two lanes."""
    lanes = {"Stage 2": stage_2(), "Stage 3": stage_3()}
    picture = Picture(960, 290, "Computation and communication of a step")
    left, scale = 130, 800 / max(lane.free for pair in lanes.values() for lane in pair)
    for place, (title, pair) in enumerate(lanes.items()):
        top = 40 + 110 * place
        picture.words(20, top - 10, title, size=14, bold=True)
        for row, (name, lane) in enumerate(zip(("computation", "communication"), pair)):
            y = top + 36 * row
            picture.words(20, y + 20, name)
            picture.line([(left, y + 30), (left + 800, y + 30)])
            for start, length, label, colour in lane.pieces:
                picture.box(left + start * scale, y, length * scale, 30, colour)
                middle = left + (start + length / 2) * scale
                picture.words(middle, y + 20, label, size=10, anchor="middle", colour="white")
    picture.words(
        20,
        256,
        "F, B: forward and backward of a layer. RS: reduce-scatter of its gradients. AG: all-gather of its parameters.",
    )
    picture.words(20, 275, "The order is the engine's; the durations are chosen for the picture.", colour=GREY)
    return picture.text()
