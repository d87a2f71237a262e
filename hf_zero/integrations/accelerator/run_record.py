"""What a run of an unmodified script asks for, and what comes of it."""

from dataclasses import dataclass

from ...config import ConfigError, ZeroConfig
from ...config.zero import differences


@dataclass(kw_only=True)
class RunRecord:
    """Shared by all Accelerators of a run.

    Attributes:
        config: what `hf_zero.run --zero` was given.
        accelerators: how many were built.
        engines: how many were built.
        models: prepared, with and without an optimizer.
    """

    config: ZeroConfig
    accelerators: int = 0
    engines: int = 0
    models: int = 0

    def refuse_other(self, config: ZeroConfig) -> None:
        """Raises `ConfigError` where the script asks for hf_zero by itself, with other settings than the run."""
        if config != self.config:
            raise ConfigError(
                "hf_zero: two configs for one run: `--zero` of hf_zero.run, and the script's own (its --zero, ZeroPlugin "
                f"or ZeroCallback), have {'; '.join(differences(self.config, config))}. Give one of them, or the "
                "same to both."
            )
