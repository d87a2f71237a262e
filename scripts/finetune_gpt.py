"""Train or fine-tune a GPT-like model on text, with a stock Trainer on a ZeRO engine.

    accelerate launch scripts/finetune_gpt.py --zero 2
    accelerate launch scripts/finetune_gpt.py --zero configs/zero2.yaml --model_name_or_path openai-community/gpt2 \
        --dataset_name wikitext/wikitext-2-raw-v1 --block_size 1024 --bf16 --output_dir outputs/wikitext

Without a dataset it learns the source of a few packages of the standard library; without a model it trains a small one
from scratch. Without `--zero` it runs under stock DDP.
"""

import math
from dataclasses import dataclass

import finetuning
from datasets import DatasetDict
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    default_data_collator,
    set_seed,
)
from transformers.hf_argparser import HfArg

from hf_zero import ZeroTrainingArguments, init

DEFAULTS = {"output_dir": "outputs/gpt", "logging_steps": 20, "save_total_limit": 1}
FROM_SCRATCH = {"learning_rate": 2e-3, "num_train_epochs": 1, "warmup_steps": 20}


@dataclass
class TextArguments(finetuning.DataArguments):
    """Which text is learned. Without any of these: the source of Python's standard library."""

    block_size: int = HfArg(default=128, help="The text is packed into blocks of so many tokens.")


def load_text(data: TextArguments) -> DatasetDict:
    """`train` and `validation`, with the single column `text`."""
    if not (data.dataset_name or data.train_file):
        return finetuning.sources()
    splits = finetuning.load_splits(data, plain_text=True)
    [column] = finetuning.find_columns(splits, "--text_column", data.text_column, finetuning.TEXT_NAMES)
    splits = splits.select_columns(column)
    return splits if column == "text" else splits.rename_column(column, "text")


def small_gpt(block_size: int) -> GPT2Config:
    """About a million parameters: reads a few hundred thousand tokens on a CPU in a minute or two."""
    return GPT2Config(n_embd=128, n_layer=2, n_head=4, n_positions=block_size)


def load_model(
    model_args: finetuning.ModelArguments, tokenizer: PreTrainedTokenizerBase, block_size: int
) -> PreTrainedModel:
    """The pretrained model, or one from scratch with the tokenizer's vocabulary."""
    if not model_args.model_name_or_path:
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = finetuning.config_from_scratch(model_args, small_gpt(block_size), vocab_size=len(tokenizer), **ends)
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    positions = getattr(model.config, "max_position_embeddings", block_size)
    if block_size > positions:
        raise finetuning.RecipeError(
            f"--block_size is {block_size}, but this model has {positions} positions; allowed: 1 to {positions}. Give a "
            "smaller block size."
        )
    return model


@finetuning.one_paragraph()
@finetuning.ranks_together()
def main():
    model_args, data_args, training_args = finetuning.parse_arguments(
        finetuning.ModelArguments, TextArguments, ZeroTrainingArguments, defaults=DEFAULTS, from_scratch=FROM_SCRATCH
    )
    finetuning.check_writable(training_args.output_dir)
    checkpoint = finetuning.checkpoint_to_resume(training_args.resume_from_checkpoint, training_args.output_dir)
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="loading the data"):
        splits = load_text(data_args)
    tokenizer = finetuning.load_or_train(
        model_args,
        finetuning.train_for_language_modeling,
        splits["train"]["text"],
        training_args.output_dir,
        resuming=checkpoint is not None,
    )
    # At stage 3 the pretrained weights stay in their files until each rank reads its shard.
    with init(training_args.parallelism_config):
        model = load_model(model_args, tokenizer, data_args.block_size)
    with training_args.main_process_first(desc="packing the text"):
        blocks = finetuning.pack(splits, tokenizer, data_args.block_size)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=finetuning.at_most(blocks["train"], data_args.max_train_samples, training_args.seed),
        eval_dataset=finetuning.at_most(blocks["validation"], data_args.max_eval_samples, training_args.seed),
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )

    def evaluated(metrics: dict[str, float]) -> dict[str, float]:
        return {"eval_loss": metrics["eval_loss"], "perplexity": math.exp(metrics["eval_loss"])}

    speed = {"rate": "train_tokens_per_second", "rows": data_args.block_size}
    finetuning.run_trainer("GPT language modeling", trainer, checkpoint, evaluated, **speed)


if __name__ == "__main__":
    main()
