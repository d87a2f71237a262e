"""Pictures for the documentation, drawn as SVG from the code: state by stage, a bucket, a step, and the imports of folders.

python scripts/write_docs.py    # writes them
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from transformers import BertConfig, BertModel

from hf_zero.layout.buckets import BucketLayout, ParameterSpec, plan_buckets, rows_of_shard

BLUE, ORANGE, GREEN, GRAY, DARK, PALE = "#4878a8", "#e08a3c", "#5a9e6f", "#9aa0a6", "#202124", "#f1f3f4"
NOTE = "#5f6368"
"""Color of small print."""
_FONT = "font-family='Helvetica, Arial, sans-serif'"
_ON_DARK = f"""<style>@media (prefers-color-scheme: dark) {{
rect[fill='white'] {{ fill: #1e2129 }} [stroke='white'] {{ stroke: #1e2129 }}
[fill='{DARK}'] {{ fill: #e8eaed }} [stroke='{DARK}'] {{ stroke: {GRAY} }}
[fill='{PALE}'] {{ fill: #3c4043 }} [fill='{NOTE}'] {{ fill: {GRAY} }}
}}</style>"""
"""Colors for readers with a dark page: the ground, lines and words change, and the bars stay."""


class Picture:
    """A page of `width` x `height`, white or dark as the reader's, drawn from the top left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        size = f"width='{width}' height='{height}'"
        self._parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' {size} viewBox='0 0 {width} {height}' role='img'>",
            f"<title>{escape(title)}</title>",
            _ON_DARK,
            f"<rect {size} fill='white'/>",
        ]

    def _add(self, tag: str, style: str, **places: float) -> None:
        at = " ".join(f"{name}='{value:.1f}'" for name, value in places.items())
        self._parts.append(f"<{tag} {at} {style}/>")

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, line: str = "white") -> None:
        """Draws a filled rectangle."""
        self._add("rect", f"fill='{fill}' stroke='{line}'", x=x, y=y, width=width, height=height)

    def dot(self, x: float, y: float, fill: str) -> None:
        """Draws a filled circle."""
        self._add("circle", f"fill='{fill}'", cx=x, cy=y, r=6)

    def line(self, points: Sequence[tuple[float, float]], *, color: str = GRAY, dashed: bool = False) -> None:
        """Draws a line through points."""
        through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = " stroke-dasharray='4 3'" if dashed else ""
        self._parts.append(f"<polyline points='{through}' fill='none' stroke='{color}'{dashes}/>")

    def turned(self, x: float, y: float, text: str) -> None:
        """Draws a line of text upwards from `x`, `y`."""
        at = f"translate({x:.1f} {y:.1f}) rotate(-60)"
        self._parts.append(f"<text transform='{at}' {_FONT} font-size='12' fill='{DARK}'>{escape(text)}</text>")

    def words(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 12,
        *,
        anchor: str = "start",
        color: str = DARK,
        bold: bool = False,
    ) -> None:
        """Draws a line of text. `y` is the base line; `anchor` is the end or `middle` of the text at `x`."""
        style = f"font-size='{size}' text-anchor='{anchor}' fill='{color}'" + " font-weight='bold'" * bold
        self._parts.append(f"<text x='{x:.1f}' y='{y:.1f}' {_FONT} {style}>{escape(text)}</text>")

    def slot(self, x: float, y: float, width: float, fill: str, name: str) -> None:
        """Draws a filled rectangle with a name in white, if the rectangle is wide enough."""
        self.box(x, y, width, 44, fill)
        if width > 7 * len(name):
            self.words(x + width / 2, y + 26, name, 11, anchor="middle", color="white")

    def text(self) -> str:
        """Returns the SVG file."""
        return "\n".join([*self._parts, "</svg>\n"])


RANKS = 8
_BUCKET_NUMEL = 25 * 2**20 // 4
_STATE_VALUES = 2  # AdamW's exp_avg and exp_avg_sq


@cache
def bert_base(shards: int) -> tuple[BucketLayout, ...]:
    """The buckets of BERT-base in fp32."""
    with torch.device("meta"):
        model = BertModel(BertConfig())
    specs = [ParameterSpec(name=name, numel=p.numel(), key="fp32") for name, p in model.named_parameters()]
    return plan_buckets(specs, bucket_numel=_BUCKET_NUMEL, shards=shards)


def bytes_of_stage(stage: int) -> dict[str, int]:
    """Returns the bytes of fp32 parameters, gradients and AdamW state on each rank between backward and step.

    At stage 1, the figures include accumulated micro-batches.
    """
    layouts = bert_base(RANKS)
    whole = 4 * sum(slot.interval.numel for layout in layouts for slot in layout.slots)
    shard = 4 * sum(layout.shard_numel for layout in layouts)
    return {
        "parameters": shard if stage >= 3 else whole,
        "gradients": shard if stage >= 2 else whole,
        "optimizer state": _STATE_VALUES * (shard if stage >= 1 else whole),
    }


def draw_memory() -> str:
    """Draws the bytes of state on a rank of BERT-base: bars of the four stages, one below the other."""
    picture = Picture(860, 268, f"State of BERT-base on each of {RANKS} ranks, by stage")
    picture.words(20, 26, f"BERT-base, fp32, AdamW, {RANKS} ranks: bytes on each rank", 15, bold=True)
    colors = {"parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN}
    left, scale = 90.0, 640 / sum(bytes_of_stage(0).values())
    for stage in range(4):
        x, y, held = left, 48 + 38 * stage, bytes_of_stage(stage)
        picture.words(20, y + 19, f"stage {stage}")
        for kind, nbytes in held.items():
            picture.box(x, y, nbytes * scale, 28, colors[kind])
            x += nbytes * scale
        picture.words(x + 8, y + 19, f"{sum(held.values()) / 1e9:.2f} GB")
    x = left
    for name, color in colors.items():
        picture.box(x, 208, 12, 12, color)
        picture.words(x + 17, 218, name)
        x += 35 + 7 * len(name)
    notes = (
        "Stage 1 has whole gradients where micro-batches accumulate, and is otherwise as stage 2.",
        "Gradient buckets on their way, gathered layers and activations come on top.",
    )
    for line, words in enumerate(notes):
        picture.words(left, 239 + 18 * line, words, color=NOTE)
    return picture.text()


_WIDTH = 36
_RANKS = 4
_SHOWN_RANK = 1
_LAYER = {
    "ln_1.weight": 1,
    "ln_1.bias": 1,
    "attn.c_attn.weight": 3 * _WIDTH,
    "attn.c_attn.bias": 3,
    "attn.c_proj.weight": _WIDTH,
    "attn.c_proj.bias": 1,
    "ln_2.weight": 1,
    "ln_2.bias": 1,
    "mlp.c_fc.weight": 4 * _WIDTH,
    "mlp.c_fc.bias": 4,
    "mlp.c_proj.weight": 4 * _WIDTH,
    "mlp.c_proj.bias": 1,
}
"""GPT-2's parameters → number of elements, in widths."""
_LEFT, _LONG = 20, 820


def draw_flat_buffer() -> str:
    """Draws one bucket as laid out by the engine: slots and padding, the shards below, and the rows of one rank's optimizer."""
    specs = [ParameterSpec(name=name, numel=widths * _WIDTH, key="fp32") for name, widths in _LAYER.items()]
    [bucket] = plan_buckets(specs, bucket_numel=10**6, shards=_RANKS)
    scale = _LONG / bucket.numel
    picture = Picture(860, 320, "A bucket: slots, padding, shards")
    title = f"One bucket: a GPT-2 layer {_WIDTH} wide, {bucket.numel} elements, {_RANKS} ranks"
    picture.words(_LEFT, 26, title, 15, bold=True)
    picture.words(_LEFT, 52, "slots, in the order in which gradients arrive (the last parameter first)")
    for place, slot in enumerate(bucket.slots):
        x, width = _LEFT + slot.interval.start * scale, slot.interval.numel * scale
        picture.slot(x, 60, width, BLUE if place % 2 else ORANGE, slot.name)
    for gap in bucket.padding:
        picture.box(_LEFT + gap.start * scale, 60, gap.numel * scale, 44, PALE, line=GRAY)
    padding = f"padding: {sum(gap.numel for gap in bucket.padding)}, at the end {bucket.padding[-1].numel}"
    picture.words(_LEFT + _LONG, 120, padding, 11, anchor="end")
    picture.words(_LEFT, 148, "shards: an equal part for each rank")
    for rank in range(_RANKS):
        shard, fill = bucket.shard(rank), GREEN if rank == _SHOWN_RANK else PALE
        picture.box(_LEFT + shard.start * scale, 156, shard.numel * scale, 30, fill, line=DARK)
        middle = _LEFT + (shard.start + shard.numel / 2) * scale
        picture.words(middle, 176, f"rank {rank}: {shard.start} to {shard.stop}", 11, anchor="middle")
    shard = bucket.shard(_SHOWN_RANK)
    zoom = _LONG / shard.numel
    for at, end in ((shard.start, _LEFT), (shard.stop, _LEFT + _LONG)):
        picture.line([(_LEFT + at * scale, 186), (end, 226)], dashed=True)
    held = f"what the optimizer of rank {_SHOWN_RANK} holds: a view of each parameter's part in its shard"
    # In the middle, because the dashed lines reach down to both ends.
    picture.words(_LEFT + 0.42 * _LONG, 214, held, anchor="middle")
    for place, row in enumerate(rows_of_shard(bucket, _SHOWN_RANK)):
        x, width = _LEFT + row.in_shard.start * zoom, row.in_shard.numel * zoom
        part = f"{row.name}[{row.in_parameter.start}:{row.in_parameter.stop}]"
        picture.slot(x, 226, width, BLUE if place % 2 else ORANGE, part)
    cut = "The parameter, its gradient and its state are cut at the same elements."
    picture.words(_LEFT, 292, cut, 11, color=NOTE)
    return picture.text()


_LAYERS = 4
_FORWARD, _BACKWARD, _STEP, _NORM = 2.0, 4.0, 0.8, 1.3
_REDUCE, _GATHER = 3.0, 1.6
_PREFETCH = 1


@dataclass
class Lane:
    """One queue of work. Each item starts after the previous one has ended, and not before `after`."""

    pieces: list[tuple[float, float, str, str]] = field(default_factory=list)
    free: float = 0.0

    def add(self, name: str, length: float, color: str, *, after: float = 0.0) -> float:
        """Adds an item; returns the time of its end."""
        start = max(self.free, after)
        self.pieces.append((start, length, name, color))
        self.free = start + length
        return self.free


def stage_2() -> tuple[Lane, Lane]:
    """One bucket per layer: reduced during backward, gathered after the step for the next forward."""
    compute, link = Lane(), Lane()
    for layer in range(_LAYERS):
        compute.add(f"F{layer}", _FORWARD, BLUE)
    reduced = 0.0
    for layer in reversed(range(_LAYERS)):
        full = compute.add(f"B{layer}", _BACKWARD, BLUE)
        reduced = link.add(f"RS{layer}", _REDUCE, ORANGE, after=full)
    normed = link.add("norm", _NORM, GRAY, after=reduced)
    stepped = compute.add("step", _STEP * _LAYERS, GREEN, after=normed)
    gathered = [link.add(f"AG{layer}", _GATHER, ORANGE, after=stepped) for layer in range(_LAYERS)]
    for layer in range(_LAYERS):
        compute.add(f"F{layer}", _FORWARD, BLUE, after=gathered[layer])
    return compute, link


def stage_3() -> tuple[Lane, Lane]:
    """A layer is gathered ahead of its forward and its backward. The last layers stay gathered in between."""
    compute, link = Lane(), Lane()

    def pass_over(
        layers: Sequence[int], gathered: dict[int, float], name: str, length: float
    ) -> Iterator[tuple[int, float]]:
        """Yields each layer and the end of its computation, while the next layer is gathered."""
        for layer, ahead in zip(layers, [*layers[_PREFETCH:], *[None] * _PREFETCH]):
            if ahead is not None and ahead not in gathered:
                began = max(compute.free, gathered[layer])
                gathered[ahead] = link.add(f"AG{ahead}", _GATHER, ORANGE, after=began)
            yield layer, compute.add(f"{name}{layer}", length, BLUE, after=gathered[layer])

    list(pass_over(range(_LAYERS), {0: link.add("AG0", _GATHER, ORANGE)}, "F", _FORWARD))
    kept = dict.fromkeys(range(_LAYERS - 1 - _PREFETCH, _LAYERS), 0.0)
    reduced = 0.0
    for layer, full in pass_over(range(_LAYERS)[::-1], kept, "B", _BACKWARD):
        reduced = link.add(f"RS{layer}", _REDUCE, ORANGE, after=full)
    normed = link.add("norm", _NORM, GRAY, after=reduced)
    stepped = compute.add("step", _STEP * _LAYERS, GREEN, after=normed)
    compute.add("F0", _FORWARD, BLUE, after=link.add("AG0", _GATHER, ORANGE, after=stepped))
    return compute, link


def draw_timeline() -> str:
    """Draws computation and communication during a step of stage 2 and of stage 3, in the order of the engine's rules.

    The durations are assumptions: a collective starts when its input is ready and the previous collective has ended, and
    computation waits for its inputs.
    """
    lanes = {"Stage 2": stage_2(), "Stage 3": stage_3()}
    picture = Picture(960, 290, "Computation and communication of a step")
    left, scale = 130, 800 / max(lane.free for pair in lanes.values() for lane in pair)
    for place, (title, pair) in enumerate(lanes.items()):
        top = 40 + 110 * place
        picture.words(20, top - 10, title, 14, bold=True)
        for row, (name, lane) in enumerate(zip(("computation", "communication"), pair)):
            y = top + 36 * row
            picture.words(20, y + 20, name)
            picture.line([(left, y + 30), (left + 800, y + 30)])
            for start, length, label, color in lane.pieces:
                picture.box(left + start * scale, y, length * scale, 30, color)
                middle = left + (start + length / 2) * scale
                picture.words(middle, y + 20, label, 10, anchor="middle", color="white")
    letters = (
        "F, B: forward and backward of a layer. RS: reduce-scatter of its gradients. AG: all-gather of its parameters."
    )
    picture.words(20, 256, letters)
    picture.words(20, 275, "The order is the engine's; the durations are chosen for the picture.", color=NOTE)
    return picture.text()


PACKAGE = Path(__file__).resolve().parent.parent / "hf_zero"


def module_name(path: Path) -> str:
    """Returns `hf_zero.stage3` for its `__init__.py`, `hf_zero.stage3.unsharding` for unsharding.py there."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Yields absolute names of a file's imports, anywhere in its code. `from .a import b` yields both a and a.b."""
    package = list(path.relative_to(PACKAGE.parent).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


_CELL, _NAMES = 26, 160


def imports_of_folders() -> dict[str, set[str]]:
    """Maps each folder to the folders that its files import. A folder is listed above all that import it, if that is possible.

    A file of the package outside its folders counts as a folder.
    """
    imports: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "__init__.py":
            names = (name.split(".") for name in imports_of(path))
            found = {name[1] for name in names if name[0] == PACKAGE.name and len(name) > 1}
            imports.setdefault(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), set()).update(found)
    ordered: dict[str, set[str]] = {}
    # Sort by the number of folders each folder needs. Folders which import each other are next to each other.
    while left := {name: (found & imports.keys()) - {name} for name, found in imports.items() if name not in ordered}:
        below = {name: _reached_from(name, left) for name in left}
        fewest = min(map(len, below.values()))
        free = [name for name, reached in below.items() if len(reached) == fewest]
        ordered |= {name: left[name] for name in sorted(free)}
    return ordered


def _reached_from(name: str, imports: dict[str, set[str]]) -> set[str]:
    """Returns a folder, and all folders of `imports` below it, imported directly or through others."""
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if each in imports and each not in reached:
            reached.add(each)
            waiting += imports[each]
    return reached


def draw_folders() -> str:
    """Draws a table of folders against folders, with a dot if the row imports the column: orange if each imports the other."""
    folders = imports_of_folders()
    # Space for the longest name, which runs upwards.
    top = 90 + 6 * max(map(len, folders))
    end = _NAMES + _CELL * len(folders), top + _CELL * len(folders)
    picture = Picture(max(end[0] + 40, 640), end[1] + 20, f"Folders of {PACKAGE.name} and their imports")
    picture.words(20, 28, f"{PACKAGE.name}/: who imports whom", 15, bold=True)
    picture.words(20, 48, "A dot: the folder in the row imports the folder in the column.", color=NOTE)
    picture.words(20, 66, "Blue: up the list. Orange: folders of one layer that import each other.", color=NOTE)
    for place, (name, imports) in enumerate(folders.items()):
        x, y, is_folder = _NAMES + _CELL * place, top + _CELL * place, (PACKAGE / name).is_dir()
        picture.words(20, y + 18, f"{name}/" if is_folder else f"{name}.py", bold=is_folder)
        picture.turned(x + 17, top - 8, name)
        for other in range(len(folders)):
            picture.box(_NAMES + _CELL * other, y, _CELL, _CELL, GRAY if other == place else PALE)
        for other, imported in enumerate(folders):
            if imported in imports:
                picture.dot(_NAMES + _CELL * (other + 0.5), y + _CELL / 2, BLUE if other < place else ORANGE)
    picture.line([(_NAMES, top), end], color=DARK)
    return picture.text()
