"""Shortens errors of other packages to one line, and defines the error of a push."""

_MOST_CHARACTERS = 300


class HubError(RuntimeError):
    """A push has failed: names the repository, the fault and the remedy. Never carries a token."""


def reason(error: Exception | None) -> str:
    """Returns an error's first line, with the next if the first only announces it; its class without a text."""
    said = []
    for line in str(error).strip().splitlines():
        said.append(line.strip())
        # transformers' configs name a field and a colon first, and what is wrong with its value below.
        if not said[-1].endswith(":"):
            break
    return (" ".join(said) or type(error).__name__)[:_MOST_CHARACTERS].rstrip(".")
