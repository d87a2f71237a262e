"""Everything a user may say to hf_zero, as frozen dataclasses read from YAML, a dict or a flag, and checked at once.

There is no learning rate, batch size, clipping threshold or scheduler here: those have one source, the training
arguments or the script itself.
"""

from .checks import AUTO, DTYPES, ConfigError, parse_bytes
from .zero import CheckpointConfig, CommConfig, ConfigLike, OffloadConfig, OuterConfig, ZeroConfig

__all__ = [
    "AUTO",
    "DTYPES",
    "CheckpointConfig",
    "CommConfig",
    "ConfigError",
    "ConfigLike",
    "OffloadConfig",
    "OuterConfig",
    "ZeroConfig",
    "parse_bytes",
]
