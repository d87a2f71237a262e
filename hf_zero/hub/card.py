"""The model card of a training run: README.md, and a picture of the losses next to README.md."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, metadata_load
from transformers import logging
from yaml import YAMLError

from ..checkpoint.faults import CheckpointError, shown
from ..checkpoint.files import refuse_links, replace_file
from ..integrations.drawing import INK, add_legend, new_axes, write_png
from ..integrations.run_facts import CardFacts, is_hub_name

logger = logging.get_logger(__name__)

CARD_NAME = "README.md"
PLOT_NAME = "loss.png"
TEMPLATE = Path(__file__).with_name("card_template.md")

OURS = "<!-- Made by hf_zero from the files of the run. A later push makes it anew unless this line is gone. -->"

_SECTIONS = (
    ("model", "Model"),
    ("data", "Data"),
    ("metrics", "Metrics"),
    ("hyperparameters", "Hyper-parameters"),
    ("zero", "ZeRO set-up"),
    ("hardware", "Hardware"),
    ("measured", "Measured"),
    ("versions", "Versions"),
)
_LOSSES_SHOWN = 10
_LONGEST_CELL = 1000
_LARGEST_CARD = 2**24
"""In characters. Only the beginning of a longer file is read."""


def write_card(folder: Path, facts: CardFacts, *, name: str, metadata: Mapping[str, Any] | None = None) -> bool:
    """Writes the card to a folder, except over a card written by somebody else. Returns whether a card was written.

    The draft card that peft writes next to adapters is replaced, but peft's fields of the front matter are kept.

    Without matplotlib (the extra `hf-zero[card]`) the card has no picture, and says so.

    Args:
        name: the card's heading.
        metadata: further fields of the card's front matter, such as language, license, tags, datasets, base_model.
    """
    path = folder / CARD_NAME
    refuse_links(folder, [path, folder / PLOT_NAME])
    for written in (path, folder / PLOT_NAME):
        if written.exists() and not written.is_file():
            raise CheckpointError(
                f"hf_zero: {written} is not a regular file, so no card can be written there. Remove it."
            )
    metadata = dict(metadata or {})
    if path.is_file():
        if not is_our_card(path) and not _is_draft_of_peft(path):
            return False
        of_peft = _fields_of_peft(path)
        metadata = {**of_peft, **metadata, "tags": [*metadata.get("tags", ()), *of_peft.get("tags", ())]}
    drawn = bool(facts.losses) and find_spec("matplotlib") is not None and _draw(facts, folder / PLOT_NAME)
    replace_file(path, render(facts, name=name, metadata=metadata, drawn=drawn))
    return True


def is_our_card(path: Path) -> bool:
    """Whether a README.md is a card of ours. Our mark in the text must still be present."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return OURS in file.read(_LARGEST_CARD)


def _is_draft_of_peft(path: Path) -> bool:
    """Whether a README.md is the template written by peft, without text added by a person."""
    front, _, text = path.read_text(encoding="utf-8", errors="replace")[:_LARGEST_CARD].lstrip().partition("\n---\n")
    template = ModelCard.from_template(ModelCardData()).text.strip()
    if not re.search(r"^library_name: peft$", front, re.MULTILINE) or not text.strip().startswith(template):
        return False
    added = text.strip().removeprefix(template).splitlines()
    return all(not line or line.startswith(("#", "- ", "The following `bitsandbytes`")) for line in added)


def _fields_of_peft(path: Path) -> dict[str, Any]:
    """Returns peft's fields of a card's front matter, without local paths."""
    try:
        fields = metadata_load(path) or {}
    except (ValueError, YAMLError):
        # Somebody edited a generated card and broke its front matter. The new card has valid front matter.
        return {}
    if fields.get("library_name") != "peft":
        return {}
    base_model = fields.get("base_model")
    kept = {name: fields[name] for name in ("library_name", "pipeline_tag") if fields.get(name)}
    if is_hub_name(base_model):
        kept["base_model"] = base_model
    tags = [str(tag) for tag in fields.get("tags") or ()]
    of_base = "base_model:"
    kept["tags"] = [tag for tag in tags if not tag.startswith(of_base) or is_hub_name(tag.rpartition(":")[2])]
    return kept


def render(facts: CardFacts, *, name: str, metadata: Mapping[str, Any], drawn: bool) -> str:
    """Returns the card's text.

    Args:
        drawn: whether the folder of the card also has the picture of the losses.
    """
    fields = {"library_name": "transformers", "base_model": facts.base_model, **metadata}
    fields["tags"] = list(dict.fromkeys([*(fields.get("tags") or ()), "hf-zero"]))
    card = ModelCard.from_template(
        ModelCardData(**fields),
        template_path=str(TEMPLATE),
        ours=OURS,
        title=_cell(name),
        parent=fields["base_model"] and _cell(fields["base_model"]),
        dataset=_cell(facts.data["dataset"]) if facts.data.get("dataset") else None,
        sections=[(title, _rows(getattr(facts, field))) for field, title in _SECTIONS],
        losses=_thinned(facts.losses),
        plot=PLOT_NAME if drawn else None,
    )
    return str(card).rstrip() + "\n"


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(_cell(name), _cell(value)) for name, value in values.items() if value is not None and value != ""]


# Letters and digits. Underscores and periods only if no renderer reads them as emphasis or as a web address.
_PLAIN = re.compile(r"(?:[^\W_]|(?<=[^\W_])_(?=[^\W_])|(?<=\d)\.(?=\d)|[ ,()%-]|\+(?!\+))*")
_OUTSIDE_CODE = re.compile(r"( *[|`][|` ]*)")


def _cell(value: object) -> str:
    """Shows a value in one line, so escaped that no renderer reads markup and no terminal a command."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = shown(" ".join(str(value).split()), _LONGEST_CELL)
    if _PLAIN.fullmatch(text):
        return text
    # Nothing in a code span is markup or a link. Escapes are not enough: some renderers look for addresses after they have
    # replaced escapes. Only a backtick ends a code span, and only a pipe ends a table cell.
    inside, outside = _OUTSIDE_CODE.split(text)[::2], _OUTSIDE_CODE.findall(text)
    codes = [f"`{part}`" if part else "" for part in inside]
    entities = [part.replace("|", "&#124;").replace("`", "&#96;") for part in outside]
    return "".join(code + entity for code, entity in zip(codes, [*entities, ""]))


def _thinned(losses: tuple[tuple[int, float], ...]) -> list[tuple[int, str]]:
    """Returns at most ten of the losses, including the first and the last."""
    if len(losses) > _LOSSES_SHOWN:
        last = len(losses) - 1
        losses = tuple(losses[round(n * last / (_LOSSES_SHOWN - 1))] for n in range(_LOSSES_SHOWN))
    return [(step, f"{loss:.4f}" if abs(loss) < 1e6 else _cell(loss)) for step, loss in losses]


def _draw(facts: CardFacts, path: Path) -> bool:
    """Returns whether a picture was written."""
    try:
        figure, axes = new_axes(7, 4)
    except ValueError as error:
        why = str(error).partition(";")[0]
        # A notebook exports MPLBACKEND to commands in other environments, without the package of this backend.
        logger.warning(
            f"hf_zero: the card has no picture, because matplotlib rejects MPLBACKEND ({why}). Unset MPLBACKEND."
        )
        return False
    # A line through one point is invisible, so each point of a short curve gets a dot.
    axes.plot(*zip(*facts.losses), marker="o" if len(facts.losses) < _LOSSES_SHOWN else None, label="training")
    if facts.eval_losses:
        axes.plot(*zip(*facts.eval_losses), marker="o", label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3, color=INK)
    add_legend(axes)
    write_png(figure, path, dpi=100)
    return True
