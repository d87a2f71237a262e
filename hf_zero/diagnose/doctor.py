"""Looks at this machine and its settings, and says what would keep training from working or make it slow."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .checks.compiler import compiler
from .checks.devices import devices
from .checks.disk import disk
from .checks.environment import environment
from .checks.limits import limits
from .checks.links import links
from .checks.tensor_parallelism import tensor_parallelism
from .checks.versions import versions
from .finding import Finding


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the doctor has found, in the order in which it looked."""

    findings: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong; hints are no faults."""
        return not self.faults

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "bad"]

    def to_json(self) -> str:
        """One document: whether all is good, and the findings."""
        return json.dumps({"good": self.is_good, "findings": [asdict(finding) for finding in self.findings]}, indent=2)


def doctor(
    folder: str | Path = ".", processes: int | None = None, *, tp_size: int = 1, measure: bool = True
) -> Diagnosis:
    """Versions, devices, limits, settings in conflict, the disk's speed, and the links between ranks that it starts itself.

    Call it in one process, not in each rank.

    Args:
        folder: whose disk is measured; checkpoints or offloaded state are to be written there.
        processes: ranks to start for the links; by default one a GPU, or two copies of the model.
        tp_size: ranks that will hold one copy of the model together, as `parallel_config` loads it.
        measure: False leaves the disk and the links out, which take seconds.

    Raises:
        ConfigError: `tp_size` does not divide the ranks.
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
