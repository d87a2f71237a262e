"""The model card of a training run, made of its facts."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..checkpoint.files import CheckpointError, refuse_links, shown
from ..integrations.run_facts import CardFacts

# ---- A model card of a training run: README.md, and the losses as a picture beside it ----

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
"""Characters; of a longer file the beginning tells."""


def write_card(folder: Path, facts: CardFacts, *, name: str, metadata: Mapping[str, Any] | None = None) -> bool:
    """Writes the card to a folder, unless the folder has a foreign one. Returns whether it was written.

    Without matplotlib, which the extra `hf-zero[card]` brings, there is no picture, and the card says so.

    Args:
        name: the card's heading.
        metadata: further fields of the card's front matter, such as language, license, tags, datasets, base_model.
    """
    path = folder / CARD_NAME
    refuse_links(folder, [path, folder / PLOT_NAME])
    for written in (path, folder / PLOT_NAME):
        if written.exists() and not written.is_file():
            raise CheckpointError(
                f"hf_zero: {written} is no plain file, so no card can be written there. Take it away."
            )
    if path.is_file() and not is_our_card(path):
        return False
    drawn = bool(facts.losses) and find_spec("matplotlib") is not None
    if drawn:
        _draw(facts, folder / PLOT_NAME)
    path.write_text(render(facts, name=name, metadata=metadata or {}, drawn=drawn), encoding="utf-8")
    return True


def is_our_card(path: Path) -> bool:
    """Whether a README.md is such a card, with its mark still in the text."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return OURS in file.read(_LARGEST_CARD)


def render(facts: CardFacts, *, name: str, metadata: Mapping[str, Any], drawn: bool) -> str:
    """The card's text.

    Args:
        drawn: whether the picture of the losses lies beside it.
    """
    fields = {"library_name": "transformers", "base_model": facts.base_model, **metadata}
    fields["tags"] = list(dict.fromkeys([*(fields.get("tags") or ()), "hf-zero"]))
    card = ModelCard.from_template(
        ModelCardData(**fields),
        template_path=str(TEMPLATE),
        ours=OURS,
        title=_cell(name),
        parent=fields["base_model"] and _cell(fields["base_model"]),
        sections=[(title, _rows(getattr(facts, field))) for field, title in _SECTIONS],
        losses=_thinned(facts.losses),
        plot=PLOT_NAME if drawn else None,
    )
    return str(card).rstrip() + "\n"


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(_cell(name), _cell(value)) for name, value in values.items() if value is not None and value != ""]


def _cell(value: object) -> str:
    """Escapes a value for one cell of a table: no markup, and no terminal codes."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = shown(" ".join(str(value).split()), _LONGEST_CELL).replace("&", "&amp;").replace("<", "&lt;")
    return text.replace("|", "\\|").replace("[", "\\[").replace("`", "\\`")


def _thinned(losses: tuple[tuple[int, float], ...]) -> list[tuple[int, str]]:
    """At most ten of them, the first and the last among them."""
    if len(losses) > _LOSSES_SHOWN:
        last = len(losses) - 1
        losses = tuple(losses[round(n * last / (_LOSSES_SHOWN - 1))] for n in range(_LOSSES_SHOWN))
    return [(step, f"{loss:.4f}" if abs(loss) < 1e6 else _cell(loss)) for step, loss in losses]


def _draw(facts: CardFacts, path: Path) -> None:
    # Without pyplot, which keeps figures and a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*facts.losses), label="training")
    if facts.eval_losses:
        axes.plot(*zip(*facts.eval_losses), marker="o", label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100, metadata={"Software": None})
