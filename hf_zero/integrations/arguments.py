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
            "help": "hf_zero: a stage (0, 1, 2), a YAML file, or settings such as stage=2,grad_accumulation=local."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if self.zero is not None:
            # After super(), which resets accelerate's shared state.
            self.parallelism_config = ZeroPlugin(self.zero)
