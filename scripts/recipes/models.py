"""The configuration of a model trained from scratch."""

from transformers import AutoConfig, PreTrainedConfig

from .arguments import ModelArguments
from .errors import RecipeError


def config_from_scratch(model: ModelArguments, small: PreTrainedConfig, **facts) -> PreTrainedConfig:
    """The named configuration or else the recipe's small one, changed by `--config_overrides`.

    `facts` follow from data and tokenizer (vocabulary size, labels), so they have the last word.
    """
    config = AutoConfig.from_pretrained(model.config_name) if model.config_name else small
    if model.config_overrides:
        try:
            config.update_from_string(model.config_overrides)
        except (TypeError, ValueError) as error:
            raise RecipeError(
                f"--config_overrides {model.config_overrides} does not fit {type(config).__name__}: {error}. Write "
                f"name=value pairs separated by commas; the names are: {', '.join(sorted(config.to_diff_dict()))}."
            ) from error
    config.update(facts)
    return config
