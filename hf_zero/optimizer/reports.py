"""How many buckets are stepped early, and how many by kernels."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EarlyReport:
    """Buckets that are stepped while backward goes on, of all of them.

    Attributes:
        kept, forgotten: early steps of a bucket so far that `optimizer.step()` took over, and that it took again.
        hindrance: why some buckets are not stepped early whatever memory there is; None where nothing stands in the way.
    """

    buckets: int
    all_buckets: int
    kept: int
    forgotten: int
    hindrance: str | None


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Buckets that kernels step, of all of them.

    Attributes:
        hindrances: why others are left to their optimizers' own steps, each reason once.
    """

    buckets: int
    all_buckets: int
    hindrances: tuple[str, ...]
