"""What a collective is called: its kind, and what it serves."""

from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a collective is for, as it stands in the ledger and in errors: its kind and the bucket it serves.

    `channel` keeps messages of different buckets apart where the transport can: ranks that gather different buckets then
    wait for each other, and are named at the time limit, instead of taking one bucket for another.

    Attributes:
        holds: the module or the parameters that the bucket holds, in words.
    """

    kind: str
    subject: str
    channel: int = 0
    holds: str = field(default="", compare=False)

    @cached_property
    def _words(self) -> str:
        return f"{self.kind} of {self.subject}"

    def __str__(self) -> str:
        return self._words
