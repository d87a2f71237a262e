"""What an error of another package says, in a line of one of ours; and the error of a push."""

_MOST_CHARACTERS = 300


class HubError(RuntimeError):
    """A push that did not reach its end: names the repository, what is wrong, and what to do. Never carries a token."""


def reason(error: Exception | None) -> str:
    """Its first line, and the next where that only announces it; its class where it says nothing."""
    said = []
    for line in str(error).strip().splitlines():
        said.append(line.strip())
        # transformers' configs name a field and a colon first, and what is wrong with its value below.
        if not said[-1].endswith(":"):
            break
    return (" ".join(said) or type(error).__name__)[:_MOST_CHARACTERS].rstrip(".")
