"""Writes the parts of the documentation that are made from the code: the page of settings and the pictures.

`python scripts/write_docs.py` writes them; a test fails when one of them is not what this script makes now.
"""

from pathlib import Path

from document import configuration, flat_buffer, memory, rooms, timeline

ROOT = Path(__file__).resolve().parent.parent

MADE = {
    "docs/configuration.md": configuration.page,
    "docs/pictures/memory.svg": memory.draw,
    "docs/pictures/flat_buffer.svg": flat_buffer.draw,
    "docs/pictures/timeline.svg": timeline.draw,
    **rooms.pictures(),
}
"""The files that are made, and what makes their text. There is a picture of rooms for each folder that is divided into some."""


def main() -> None:
    for name, make in MADE.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
