"""Progress bars for slow work: on the main rank, on a terminal, and unless progress bars are disabled."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..checkpoint.faults import shown

_PATIENCE_S = 1.0
"""Shorter work shows no bar."""
_EVERY_S = 0.1
"""Time between two updates of a bar."""


@contextmanager
def progress_bar(
    what: str, nbytes: int | None = None, *, is_main: bool, done_bytes: int = 0
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the bytes of each finished part. The bar disappears when the work ends.

    Args:
        what: the work, in words.
        nbytes: total bytes; None if unknown.
        is_main: whether this rank shows the bar.
        done_bytes: bytes finished before.
    """
    with _bar(what, nbytes, is_main=is_main, done_bytes=done_bytes) as bar:
        yield bar.update


@contextmanager
def progress_of(what: str, *, is_main: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with finished and total bytes. The bar starts again if the finished bytes decrease."""
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
    # Imported here because the Hub's client is slow to import.
    from huggingface_hub.utils import tqdm

    return tqdm(
        desc=f"hf_zero: {shown(what)}",
        total=nbytes,
        initial=done_bytes,
        unit="B",
        unit_scale=True,
        leave=False,
        delay=_PATIENCE_S,
        mininterval=_EVERY_S,
        # None shows the bar only on a terminal.
        disable=None if is_main and _are_wanted() else True,
    )


def _are_wanted() -> bool:
    """Whether transformers' progress bars are enabled. The Hub's tqdm follows its own switch."""
    logging = sys.modules.get("transformers.utils.logging")
    return logging is None or logging.is_progress_bar_enabled()
