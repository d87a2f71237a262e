"""Errors of failed collectives."""

from collections.abc import Sequence


class CommunicationError(RuntimeError):
    """A collective failed: says which, which rank is the reason, and what the ranks were in.

    Attributes:
        culprits: the ranks that are the reason, where they are known.
    """

    def __init__(self, message: str, culprits: Sequence[int] = ()):
        super().__init__(message)
        self.culprits = tuple(culprits)


class PeerFailure(RuntimeError):
    """A message from or to one rank failed.

    Attributes:
        rank: the other rank.
    """

    def __init__(self, rank: int, what: str):
        super().__init__(f"rank {rank} {what}")
        self.rank = rank
