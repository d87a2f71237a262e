"""Bars for what may take long: on the main rank, on a terminal, and where nobody has turned bars off."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE_S = 1.0
"""What takes less shows no bar."""


@contextmanager
def progress_bar(
    what: str, nbytes: int | None = None, *, is_main: bool, done_bytes: int = 0
) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes of each part that is done. The bar goes when the work ends.

    Args:
        what: is done, in words.
        nbytes: in all; None where that is not known.
        done_bytes: before this begins.
    """
    # Here, not above: importing hf_zero does not take the time that the Hub's client takes.
    from huggingface_hub.utils import tqdm

    with tqdm(
        desc=f"hf_zero: {what}",
        total=nbytes,
        initial=done_bytes,
        unit="B",
        unit_scale=True,
        leave=False,
        delay=_PATIENCE_S,
        # None: only on a terminal.
        disable=None if is_main else True,
    ) as bar:
        yield bar.update
