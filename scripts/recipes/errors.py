"""Mistakes in a request, each told in one paragraph."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hf_zero import ConfigError


class RecipeError(ValueError):
    """Something the user can put right: what is wrong, which value, what is allowed and what to do."""


@contextmanager
def one_paragraph() -> Iterator[None]:
    """End the program with the message of a mistaken request alone: its traceback would only bury it."""
    try:
        yield
    except (RecipeError, ConfigError) as error:
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            # Every rank meets the same mistake. The first of a machine says it; the launcher then ends the others here.
            time.sleep(5)
        sys.exit(f"\n{error}\n")
