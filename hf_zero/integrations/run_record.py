"""The settings of an unmodified script's run, and what was built with them."""

from dataclasses import dataclass

from ..config import ConfigError, ZeroConfig
from ..config.zero import differences


@dataclass(kw_only=True)
class RunRecord:
    """Shared by all Accelerators of a run.

    Attributes:
        config: the config given to `hf_zero.run --zero`.
        accelerators: number of Accelerators built.
        engines: number of engines built.
        models: number of prepared models, with and without an optimizer.
    """

    config: ZeroConfig
    accelerators: int = 0
    engines: int = 0
    models: int = 0

    def refuse_other(self, config: ZeroConfig) -> None:
        """Raises `ConfigError` if the script itself sets up hf_zero with settings different from the run's."""
        if config != self.config:
            raise ConfigError(
                "hf_zero: one run got two different configs: `--zero` of hf_zero.run, and the script's own (its --zero, "
                f"ZeroPlugin or ZeroCallback), have {'; '.join(differences(self.config, config))}. Pass only one of them, "
                "or make them equal."
            )
