"""Pictures of the documentation, drawn as SVG from the code: state by stage, a bucket, a step, and who imports whom.

python scripts/write_docs.py    # writes them
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from transformers import BertConfig, BertModel

from hf_zero.layout.slots import BucketLayout, ParameterSpec, plan_buckets, rows_of_shard

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
    """Bytes of fp32 parameters, gradients and AdamW state that last on each rank between backward and step.

    Stage 1 is drawn as where micro-batches accumulate.
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
    """Bytes of state on a rank of BERT-base: bars of the four stages, one below the other."""
    picture = Picture(860, 268, f"State of BERT-base on each of {RANKS} ranks, by stage")
    picture.words(20, 26, f"BERT-base, fp32, AdamW, {RANKS} ranks: bytes on each rank", size=15, bold=True)
    colours = {"parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN}
    left, longest = 90, 640
    scale = longest / sum(bytes_of_stage(0).values())
    for stage in range(4):
        x, y = left, 48 + 38 * stage
        picture.words(20, y + 19, f"stage {stage}")
        held = bytes_of_stage(stage)
        for kind, nbytes in held.items():
            picture.box(x, y, nbytes * scale, 28, colours[kind])
            x += nbytes * scale
        picture.words(x + 8, y + 19, f"{sum(held.values()) / 1e9:.2f} GB")
    picture.legend(left, 218, [(colour, kind) for kind, colour in colours.items()])
    notes = (
        "Stage 1 has whole gradients where micro-batches accumulate, and is otherwise as stage 2.",
        "Gradient buckets on their way, gathered layers and activations come on top.",
    )
    for line, words in enumerate(notes):
        picture.words(left, 239 + 18 * line, words, colour=GREY)
    return picture.text()


_WIDTH = 36
_RANKS = 4
_SHOWN_RANK = 1
_LAYER = {
    "ln_1.weight": _WIDTH,
    "ln_1.bias": _WIDTH,
    "attn.c_attn.weight": 3 * _WIDTH * _WIDTH,
    "attn.c_attn.bias": 3 * _WIDTH,
    "attn.c_proj.weight": _WIDTH * _WIDTH,
    "attn.c_proj.bias": _WIDTH,
    "ln_2.weight": _WIDTH,
    "ln_2.bias": _WIDTH,
    "mlp.c_fc.weight": 4 * _WIDTH * _WIDTH,
    "mlp.c_fc.bias": 4 * _WIDTH,
    "mlp.c_proj.weight": 4 * _WIDTH * _WIDTH,
    "mlp.c_proj.bias": _WIDTH,
}
_LEFT, _LONG = 20, 820


def draw_flat_buffer() -> str:
    """One bucket as the layout makes it: slots and padding, the shards below, and the rows that one rank's optimizer holds."""
    specs = [ParameterSpec(name=name, numel=numel, key="fp32") for name, numel in _LAYER.items()]
    [bucket] = plan_buckets(specs, bucket_numel=10**6, shards=_RANKS)
    scale = _LONG / bucket.numel
    picture = Picture(860, 320, "A bucket: slots, padding, shards")
    picture.words(
        _LEFT,
        26,
        f"One bucket: a GPT-2 layer {_WIDTH} wide, {bucket.numel} elements, {_RANKS} ranks",
        size=15,
        bold=True,
    )
    picture.words(_LEFT, 52, "slots, in the order in which gradients arrive (the last parameter first)")
    for place, slot in enumerate(bucket.slots):
        x, width = _LEFT + slot.interval.start * scale, slot.interval.numel * scale
        picture.box(x, 60, width, 44, BLUE if place % 2 else ORANGE)
        if width > 7 * len(slot.name):
            picture.words(x + width / 2, 86, slot.name, size=11, anchor="middle", colour="white")
    for gap in bucket.padding:
        picture.box(_LEFT + gap.start * scale, 60, gap.numel * scale, 44, PALE, line=GREY)
    last = bucket.padding[-1]
    picture.words(
        _LEFT + _LONG,
        120,
        f"padding: {sum(gap.numel for gap in bucket.padding)}, at the end {last.numel}",
        size=11,
        anchor="end",
    )
    picture.words(_LEFT, 148, "shards: an equal part for each rank")
    for rank in range(_RANKS):
        shard = bucket.shard(rank)
        picture.box(
            _LEFT + shard.start * scale, 156, shard.numel * scale, 30, GREEN if rank == _SHOWN_RANK else PALE, line=DARK
        )
        middle = _LEFT + (shard.start + shard.numel / 2) * scale
        picture.words(middle, 176, f"rank {rank}: {shard.start} to {shard.stop}", size=11, anchor="middle")
    _draw_rows(picture, bucket)
    return picture.text()


def _draw_rows(picture: Picture, bucket) -> None:
    shard = bucket.shard(_SHOWN_RANK)
    zoom, old = _LONG / shard.numel, _LONG / bucket.numel
    for at, end in ((shard.start, _LEFT), (shard.stop, _LEFT + _LONG)):
        picture.line([(_LEFT + at * old, 186), (end, 226)], dashed=True)
    picture.words(
        _LEFT, 218, f"what the optimizer of rank {_SHOWN_RANK} holds: a view of each parameter's part in its shard"
    )
    for place, row in enumerate(rows_of_shard(bucket, _SHOWN_RANK)):
        x, width = _LEFT + row.in_shard.start * zoom, row.in_shard.numel * zoom
        picture.box(x, 226, width, 44, BLUE if place % 2 else ORANGE)
        part = f"{row.name}[{row.in_parameter.start}:{row.in_parameter.stop}]"
        if width > 6 * len(part):
            picture.words(x + width / 2, 252, part, size=11, anchor="middle", colour="white")
    picture.words(
        _LEFT, 292, "The parameter, its gradient and its state are cut at the same elements.", size=11, colour=GREY
    )


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


def draw_timeline() -> str:
    """What computes and what travels during a step of stage 2 and of stage 3, in the order that the engine's rules make.

    The durations are chosen: a collective starts when its input is there and the one before it has ended, and computation waits
    for what it needs.
    """
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


PACKAGE = Path(__file__).resolve().parent.parent / "hf_zero"


def module_name(path: Path) -> str:
    """`hf_zero.engine.units` of its `__init__.py`, `hf_zero.engine.schedule` of schedule.py there."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports, at any depth of its code; `from .a import b` gives both a and a.b."""
    package = list(path.relative_to(PACKAGE.parent).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


_LEAST_FOLDERS = 3
_CELL, _NAMES = 26, 160
_RED = "#c5221f"


@dataclass(frozen=True, kw_only=True)
class Room:
    """A folder with all below it, or a file that lies beside the folders.

    Attributes:
        imports: rooms beside it that its files import, at any depth of their code.
    """

    name: str
    is_folder: bool
    imports: frozenset[str]


def rooms_of(folder: Path) -> list[Room]:
    """The rooms of a folder, each above all that import it where that can be."""
    paths: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.py")):
        if path != folder / "__init__.py":
            paths.setdefault(path.relative_to(folder).parts[0].removesuffix(".py"), []).append(path)
    rooms = {
        name: Room(
            name=name,
            is_folder=(folder / name).is_dir(),
            imports=frozenset(_imported(files, folder) & paths.keys() - {name}),
        )
        for name, files in paths.items()
    }
    return _in_order(rooms)


def divided_folders() -> list[Path]:
    """The package, and those of its folders that are divided into rooms of their own."""
    inner = [path for path in sorted(PACKAGE.iterdir()) if path.is_dir()]
    return [PACKAGE, *(path for path in inner if len(list(path.glob("*/__init__.py"))) >= _LEAST_FOLDERS)]


def rooms_pictures() -> dict[str, partial[str]]:
    """File of each picture → what draws it."""
    return {f"docs/pictures/rooms_of_{folder.name}.svg": partial(draw_rooms, folder) for folder in divided_folders()}


def draw_rooms(folder: Path) -> str:
    """A table of rooms against rooms, with a dot where the row imports the column: red where that makes a circle."""
    rooms = rooms_of(folder)
    # Room for the longest name, which runs upwards.
    top = 90 + 6 * max(len(room.name) for room in rooms)
    width, height = _NAMES + _CELL * len(rooms) + 40, top + _CELL * len(rooms) + 20
    picture = Picture(max(width, 560), height, f"Rooms of {folder.name} and their imports")
    picture.words(20, 28, f"{folder.name}/: who imports whom", size=15, bold=True)
    picture.words(20, 48, "A dot: the room in the row imports the room in the column.", colour=GREY)
    picture.words(20, 66, "Below the diagonal: imports go up the list, and never in circles.", colour=GREY)
    for place, room in enumerate(rooms):
        x, y = _NAMES + _CELL * place, top + _CELL * place
        picture.words(20, y + 18, f"{room.name}/" if room.is_folder else f"{room.name}.py", bold=room.is_folder)
        picture.turned(x + 17, top - 8, room.name)
        for other in range(len(rooms)):
            picture.box(_NAMES + _CELL * other, y, _CELL, _CELL, GREY if other == place else PALE)
        for other, imported in enumerate(rooms):
            if imported.name in room.imports:
                picture.dot(_NAMES + _CELL * (other + 0.5), y + _CELL / 2, BLUE if other < place else _RED)
    picture.line([(_NAMES, top), (_NAMES + _CELL * len(rooms), top + _CELL * len(rooms))], colour=DARK)
    return picture.text()


def _imported(files: list[Path], folder: Path) -> set[str]:
    """The first names below `folder` of all that these files import from it."""
    home = list(folder.relative_to(PACKAGE.parent).parts)
    names = [name.split(".") for file in files for name in imports_of(file)]
    return {name[len(home)] for name in names if name[: len(home)] == home and len(name) > len(home)}


def _in_order(rooms: Mapping[str, Room]) -> list[Room]:
    """By the longest chain of imports below each; those in a circle come last."""
    left, ordered = dict(rooms), []
    while left:
        free = [name for name, room in left.items() if not room.imports & left.keys()] or list(left)
        ordered += [left.pop(name) for name in sorted(free)]
    return ordered
