"""Whether ranks gather the same parameters in the same order, which a backend of devices cannot tell.

NCCL's collectives have no tags. Ranks that gather different layers of equal size at a time, since their forwards took different
branches, would get each other's values in silence. So each rank keeps a checksum of the gathers that it has started, and the
ranks compare them whenever they agree on something, at the latest at the end of each backward.
"""

import zlib


class GatherOrder:
    """The gathers that this rank has started, as a number.

    Args:
        ranks: those that gather together.
    """

    def __init__(self, ranks: tuple[int, ...]):
        self.ranks = frozenset(ranks)
        self.checksum = 0

    def note(self, what: str) -> None:
        """Counts a gather in; `what` is the same on all ranks."""
        self.checksum = zlib.crc32(what.encode(), self.checksum)
