"""`hf-zero doctor`: finds faults of this machine and its settings which break training or slow training down."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .disk import disk
from .environment import environment
from .finding import Finding
from .gpus import devices, tensor_parallelism
from .limits import limits
from .links import links
from .software import compiler, versions


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The doctor's findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong; hints do not count."""
        return not self.faults

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "bad"]

    def to_json(self) -> str:
        """Returns one document: whether nothing is wrong, and the findings."""
        return json.dumps({"good": self.is_good, "findings": [asdict(finding) for finding in self.findings]}, indent=2)


def doctor(
    folder: str | Path = ".", processes: int | None = None, *, tp_size: int = 1, measure: bool = True
) -> Diagnosis:
    """Checks versions, devices, limits, conflicting settings, the speed of a disk, and the links between newly started ranks.

    Call this function in one process, not on each rank.

    Args:
        folder: folder whose disk is measured; the one for checkpoints or offloaded state.
        processes: number of ranks to start for the links; by default one for each GPU, or two copies of the model.
        tp_size: number of ranks that will hold one copy of the model together, as `parallel_config` loads it.
        measure: False skips the disk and the links, which need some seconds.

    Raises:
        ConfigError: `tp_size` does not divide the number of ranks.
    """
    return Diagnosis(findings=tuple(_look(Path(folder), processes, tp_size, measure)))


def _look(folder: Path, processes: int | None, tp_size: int, measure: bool) -> Iterator[Finding]:
    yield from versions()
    yield from compiler()
    yield from devices()
    yield from limits()
    yield from environment()
    if tp_size > 1:
        yield from tensor_parallelism(tp_size)
    if measure:
        yield from disk(folder)
        yield from links(processes, tp_size)
