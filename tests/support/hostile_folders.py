"""Manipulated checkpoints with corrected checksums, and all commands for such folders."""

import json
import os
import struct
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from unittest import mock

import xxhash
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_zero.checkpoint.hashes import record_of
from hf_zero.cli.app import app
from hf_zero.extras import is_installed
from hf_zero.hub.upload import HubError
from hf_zero.integrations.run_facts import card_facts

MANIFEST = "zero/manifest.json"


def resign(checkpoint: Path, change: Callable[[dict], object] = lambda content: None, folder: str = "zero") -> None:
    """Changes a manifest, and corrects all checksums for the present files."""
    path = checkpoint / folder / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(path)
    content = json.loads(path.read_text())
    for name in content["files"]:
        if (checkpoint / name).is_file():
            record = record_of(checkpoint / name)
            content["files"][name] = [record.size, record.chunk_bytes, "".join(record.xxh3)]
            if content["format_version"] < 9:
                without_chunk_bytes(content["files"][name])
    change(content)
    content.pop("xxh3", None)
    digest = xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
    path.write_text(json.dumps({**content, "xxh3": digest}, indent=1))


def without_chunk_bytes(record: list) -> None:
    """Converts the record of a file to formats before 9, whose chunks all have 256 KiB."""
    assert record.pop(1) == 256 * 2**10


def as_format_8(content: dict) -> None:
    for record in content["files"].values():
        without_chunk_bytes(record)
    content["format_version"] = 8


def list_rows(content: dict, *, by_number: bool = True) -> None:
    """Converts a manifest to format 6, which lists each row of each rank, and the boxes of each file.

    Args:
        by_number: gives the residual of each rank a kind with its number, as that format has it. Each has to be on one rank.
    """
    as_format_8(content)
    rows, boxes, kinds = [], {}, {name: dict.fromkeys(kinds) for name, kinds in content["kinds"].items()}
    for kind, name, dtype, box, first, step, start, cut, numel, stop in content["rows"]:
        whole, ranges = (None, None) if box is None else content["boxes"][box]
        for index, (begin, end) in enumerate(pairwise([start, *range(cut, stop, numel or 1), stop])):
            file = f"rank-{first + index * step:05d}-of-{content['world_size']:05d}.safetensors"
            own, at = kind, begin
            if by_number and kind.endswith(".*"):
                own, at = f"{kind[:-1]}{begin // (end - begin)}", 0
                kinds[name][own] = None
            rows.append([own, name, at, at + end - begin, file, f"{own}/{name}", dtype])
            if box is not None:
                boxes.setdefault(file, {})[name] = [whole[1:], ranges[1:]] if own != kind else [whole, ranges]
    content.update(format_version=6, rows=rows, boxes=boxes)
    if not by_number:
        return
    content["kinds"] = {name: [kind for kind in found if not kind.endswith(".*")] for name, found in kinds.items()}
    for name, shapes in list(content["own_shapes"].items()):
        shapes.pop("residual.*", None)
        if not shapes:
            del content["own_shapes"][name]


def as_before_ids(checkpoint: Path) -> None:
    """Converts a checkpoint to format 4, whose parts have no ID of their save."""
    for path in (checkpoint / "zero").glob("rank-*.safetensors"):
        with_header(path, lambda header: header.pop("__metadata__"))

    def change(content: dict) -> None:
        list_rows(content)
        content["format_version"] = 4
        assert content.pop("save") and content.pop("boxes") == {}

    resign(checkpoint, change)


def with_header(path: Path, change: Callable[[dict], object]) -> None:
    """Changes the header of a safetensors file, and leaves its values unchanged."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def cast(path: Path, dtype) -> None:
    """Writes all tensors of a safetensors file in another dtype."""
    save_file({name: value.to(dtype) for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


def by_command(*words: object) -> tuple[int, str]:
    """Returns exit status and all output of `hf-zero`, which may only end by an exit. Uploads are suppressed."""

    def arrived(folder: Path, *_args: object, **_kwargs: object):
        raise HubError(f"hf_zero: {len(os.listdir(folder))} files would be sent.")

    stays = mock.patch("hf_zero.hub.push.push_folder", arrived) if is_installed("hub") else nullcontext()
    with stays, mock.patch.dict(os.environ, {"HF_TOKEN": "hf_" + "x" * 20}):
        result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.output.replace("\n", "").isprintable(), result.output
    return result.exit_code, result.output


def make_card(folder: Path) -> bool:
    """Writes a folder's card as a push does; returns whether the card was written."""
    from hf_zero.hub.card import write_card

    return write_card(folder, card_facts(folder), name=folder.resolve().name)


def commands(folder: Path, out: Path) -> dict[str, tuple[object, ...]]:
    """Returns each command for reading a folder."""
    found = {
        "verify": ("verify", folder),
        "inspect": ("inspect", folder),
        "consolidate": ("consolidate", folder, out),
    }
    return found | ({"push": ("push", folder, "me/model")} if is_installed("hub") else {})


def every_command(folder: Path, out: Path) -> dict[str, tuple[object, ...]]:
    """Returns all commands for a folder or a config, and again with `--json` if the JSON contains names from the folder."""
    config = folder / "config.json"
    found = commands(folder, out) | {
        "report": ("report", folder, "--output", out.with_name("page.html")),
        "convert": ("convert", folder, out),
        "migrate": ("migrate", config),
        "plan": ("plan", config, "--seq", "16"),
        "doctor": ("doctor", "--quick", "--folder", folder / "no\x1b[2J"),
    }
    extra = {"report": "report", "convert": "foreign", "migrate": "foreign", "plan": "planner", "doctor": "diagnose"}
    found = {name: words for name, words in found.items() if name not in extra or is_installed(extra[name])}
    of_names = found.keys() & {"verify", "inspect", "report", "migrate", "doctor"}
    return found | {f"{name} --json": (*found[name], "--json") for name in of_names}
