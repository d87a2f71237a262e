"""What a planner refuses."""

from collections.abc import Mapping
from typing import Any

from ..config import ConfigError


class PlanError(ConfigError):
    """A plan that cannot be made: a model, a batch or a machine that is not understood."""


class NothingFitsError(PlanError):
    """Every set-up is too large.

    Attributes:
        least: the settings of the one that needs least.
    """

    def __init__(self, message: str, least: Mapping[str, Any]):
        super().__init__(message)
        self.least = least
