"""TrainingArguments with one more flag: `--zero 2` or `--zero configs/zero2.yaml`."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from .accelerate import ZeroPlugin


@dataclass
class ZeroTrainingArguments(TrainingArguments):
    """TrainingArguments whose `zero` installs the engine in the Trainer that gets them; nothing else is needed.

    Without `zero` they are plain TrainingArguments: stock DDP, whatever HF_ZERO_CONFIG says.
    """

    zero: str | None = field(
        default=None,
        metadata={
            "help": "hf_zero: a stage (0, 1, 2, 3), a YAML file, or settings such as stage=2,grad_accumulation=local."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if self.zero is not None:
            # After super(), which resets accelerate's shared state.
            self.parallelism_config = ZeroPlugin(self.zero)

    @property
    def place_model_on_device(self) -> bool | None:
        """False at stage 3: Trainer would put the whole model on each device before it is sharded."""
        plugin = self.parallelism_config
        if isinstance(plugin, ZeroPlugin) and plugin.config.stage == 3:
            return False
        return super().place_model_on_device
