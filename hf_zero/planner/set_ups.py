"""The set-ups compared by a planner: each stage with each tier of the machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import ConfigError, ZeroConfig


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """A stage and tiers.

    Attributes:
        name: the name in tables.
        settings: settings of `ZeroConfig`, nested.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> ZeroConfig:
        return ZeroConfig.from_dict(self.settings)


_TIERS: tuple[tuple[str, Mapping[str, str], tuple[int, ...]], ...] = (
    ("", {}, (0, 1, 2, 3)),
    ("state cpu", {"optimizer": "cpu"}, (1, 2, 3)),
    ("all cpu", {"optimizer": "cpu", "params": "cpu"}, (3,)),
    ("state nvme", {"optimizer": "nvme"}, (1, 2, 3)),
    ("all nvme", {"optimizer": "nvme", "params": "nvme"}, (3,)),
)


def set_ups(kept: Mapping[str, Any], *, world_size: int, on_host: bool, nvme_path: str | None) -> list[SetUp]:
    """Lists all set-ups compatible with the user's settings.

    Args:
        kept: settings that stay unchanged, nested. A stage among them excludes all other stages.
        on_host: whether the training device is the host, so that offloading to host memory changes nothing.
        nvme_path: a folder for files; None without one.

    Raises:
        ConfigError: the kept settings contradict each other.
    """
    said = dict(kept.get("offload") or {})
    tiers_said = {name: said[name] for name in ("optimizer", "params") if said.get(name, "none") != "none"}
    found: list[SetUp] = []
    fault: ConfigError | None = None
    for words, tiers, stages in _TIERS:
        in_files = "nvme" in tiers.values()
        if tiers_said and any(tiers.get(name) != tier for name, tier in tiers_said.items()):
            continue
        if not tiers_said and (("cpu" in tiers.values() and on_host) or (in_files and nvme_path is None)):
            continue
        for stage in stages:
            if kept.get("stage", stage) != stage or (world_size == 1 and stage in (1, 2) and not tiers):
                continue
            offload = {**tiers, **said}
            if in_files:
                offload.setdefault("nvme_path", nvme_path)
            settings = {**kept, "stage": stage, **({"offload": offload} if offload else {})}
            set_up = SetUp(name=f"stage {stage}{f', {words}' if words else ''}", settings=settings)
            try:
                set_up.config  # noqa: B018
            except ConfigError as error:
                # A setting of stage 3 excludes the other stages. A setting refused by all stages is raised below.
                fault = error
                continue
            found.append(set_up)
    if not found and fault is not None:
        raise fault
    return found
