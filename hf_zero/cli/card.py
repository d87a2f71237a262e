"""`hf-zero card`."""

from typing import Annotated

import typer

from ..checkpoint.format.errors import CheckpointError
from .output import Folder, Json, said_plainly, say, say_json


def card(
    folder: Folder,
    name: Annotated[str | None, typer.Option(help="The card's heading; the folder's name by default.")] = None,
    as_json: Json = False,
) -> None:
    """Writes README.md and loss.png to the folder, from what its files tell. A card of another hand stays."""
    from ..integrations.hub.card import CARD_NAME, write_card
    from ..integrations.hub.card_facts import card_facts

    path = folder / CARD_NAME
    with said_plainly():
        written = write_card(folder, card_facts(folder), name=name or folder.resolve().name)
        if not written:
            raise CheckpointError(f"hf_zero: {path} is not one of ours and stays as it is.")
    if as_json:
        say_json({"card": path})
    else:
        say(str(path))
