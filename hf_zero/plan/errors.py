"""What a planner refuses."""

from ..config import ConfigError


class PlanError(ConfigError):
    """A plan that cannot be made: a model, a batch or a machine that is not understood."""
