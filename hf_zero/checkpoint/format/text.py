"""Text out of files that somebody else may have written, made fit to be shown."""


def shown(text: object, most: int = 200) -> str:
    """A value as one line of at most `most` characters; what a terminal would obey, or cannot print, is spelt out."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text)[: most + 1])
    return line if len(line) <= most else f"{line[: most - 1]}…"
