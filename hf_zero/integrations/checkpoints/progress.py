"""Bars for what may take long: on the main rank, on a terminal, and where nobody has turned bars off."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_PATIENCE_S = 1.0
"""What takes less shows no bar."""
_EVERY_S = 0.1
"""Between two looks of a bar."""


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
    with _bar(what, nbytes, is_main=is_main, done_bytes=done_bytes) as bar:
        yield bar.update


@contextmanager
def progress_of(what: str, *, is_main: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A function to call with the bytes that are done and the bytes in all. The bar begins anew where fewer are done."""
    with ExitStack() as stack:
        bar: Any = None

        def show(done_bytes: int, total_bytes: int) -> None:
            nonlocal bar
            if bar is None or done_bytes < bar.n:
                stack.close()
                bar = stack.enter_context(_bar(what, total_bytes, is_main=is_main))
            bar.update(done_bytes - bar.n)

        yield show


def _bar(what: str, nbytes: int | None, *, is_main: bool, done_bytes: int = 0) -> Any:
    # Here, not above: importing hf_zero does not take the time that the Hub's client takes.
    from huggingface_hub.utils import tqdm

    return tqdm(
        desc=f"hf_zero: {what}",
        total=nbytes,
        initial=done_bytes,
        unit="B",
        unit_scale=True,
        leave=False,
        delay=_PATIENCE_S,
        mininterval=_EVERY_S,
        # None: only on a terminal.
        disable=None if is_main and _are_wanted() else True,
    )


def _are_wanted() -> bool:
    """Whether `transformers.utils.logging.disable_progress_bar` has not been called. The Hub's own switch its bars heed."""
    logging = sys.modules.get("transformers.utils.logging")
    return logging is None or logging.is_progress_bar_enabled()
