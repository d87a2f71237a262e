"""Draws the folders of the package and which of them import which, read from the code."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .imports import PACKAGE, imports_of
from .svg import BLUE, DARK, GREY, PALE, Picture

_LEAST_FOLDERS = 3
_CELL, _LEFT = 26, 160
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


def pictures() -> dict[str, partial[str]]:
    """File of each picture → what draws it."""
    return {f"docs/pictures/rooms_of_{folder.name}.svg": partial(draw, folder) for folder in divided_folders()}


def draw(folder: Path) -> str:
    """A table of rooms against rooms, with a dot where the row imports the column: red where that makes a circle."""
    rooms = rooms_of(folder)
    # Room for the longest name, which runs upwards.
    top = 90 + 6 * max(len(room.name) for room in rooms)
    width, height = _LEFT + _CELL * len(rooms) + 40, top + _CELL * len(rooms) + 20
    picture = Picture(max(width, 560), height, f"Rooms of {folder.name} and their imports")
    picture.words(20, 28, f"{folder.name}/: who imports whom", size=15, bold=True)
    picture.words(20, 48, "A dot: the room in the row imports the room in the column.", colour=GREY)
    picture.words(20, 66, "Below the diagonal: imports go up the list, and never in circles.", colour=GREY)
    for place, room in enumerate(rooms):
        x, y = _LEFT + _CELL * place, top + _CELL * place
        picture.words(20, y + 18, f"{room.name}/" if room.is_folder else f"{room.name}.py", bold=room.is_folder)
        picture.turned(x + 17, top - 8, room.name)
        for other in range(len(rooms)):
            picture.box(_LEFT + _CELL * other, y, _CELL, _CELL, GREY if other == place else PALE)
        for other, imported in enumerate(rooms):
            if imported.name in room.imports:
                picture.dot(_LEFT + _CELL * (other + 0.5), y + _CELL / 2, BLUE if other < place else _RED)
    picture.line([(_LEFT, top), (_LEFT + _CELL * len(rooms), top + _CELL * len(rooms))], colour=DARK)
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
