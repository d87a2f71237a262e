"""Train or fine-tune a GPT-like model on text, with a stock Trainer on a ZeRO engine.

    accelerate launch scripts/finetune_gpt.py --zero 2
    accelerate launch scripts/finetune_gpt.py --zero configs/zero2.yaml --model_name_or_path openai-community/gpt2 \
        --dataset_name wikitext/wikitext-2-raw-v1 --block_size 1024 --bf16 --output_dir outputs/wikitext

Without a dataset it learns the source of a few packages of the standard library; without a model it trains a small one
from scratch. Without `--zero` it runs under stock DDP.
"""

import math
from dataclasses import dataclass, field

from datasets import DatasetDict
from recipes.arguments import DataArguments, ModelArguments, parse_arguments
from recipes.columns import TEXT_NAMES, find_columns
from recipes.errors import RecipeError, one_paragraph
from recipes.folders import check_writable, checkpoint_to_resume
from recipes.last_step import LogLastStep
from recipes.memory import peak_memory_bytes
from recipes.models import config_from_scratch
from recipes.packing import pack
from recipes.ranks import ranks_together
from recipes.report import report
from recipes.splits import at_most, load_splits
from recipes.stdlib_text import sources
from recipes.tokenizer import load_or_train, train_for_language_modelling
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    default_data_collator,
    set_seed,
)

from hf_zero import ZeroTrainingArguments, engine_of, init

DEFAULTS = {"output_dir": "outputs/gpt", "logging_steps": 20, "save_total_limit": 1}
FROM_SCRATCH = {"learning_rate": 2e-3, "num_train_epochs": 1, "warmup_steps": 20}


@dataclass
class TextArguments(DataArguments):
    """Which text is learned. Without any of these: the source of Python's standard library."""

    block_size: int = field(default=128, metadata={"help": "The text is packed into blocks of so many tokens."})


def load_text(data: TextArguments) -> DatasetDict:
    """`train` and `validation`, with the single column `text`."""
    if not (data.dataset_name or data.train_file):
        return sources()
    splits = load_splits(data, plain_text=True)
    [column] = find_columns(splits, "--text_column", data.text_column, TEXT_NAMES)
    splits = splits.select_columns(column)
    return splits if column == "text" else splits.rename_column(column, "text")


def small_gpt(block_size: int) -> GPT2Config:
    """About a million parameters: reads a few hundred thousand tokens on a CPU in a minute or two."""
    return GPT2Config(n_embd=128, n_layer=2, n_head=4, n_positions=block_size)


def load_model(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase, block_size: int) -> PreTrainedModel:
    """The pretrained model, or one from scratch with the tokenizer's vocabulary."""
    if not model_args.model_name_or_path:
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = config_from_scratch(model_args, small_gpt(block_size), vocab_size=len(tokenizer), **ends)
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    positions = getattr(model.config, "max_position_embeddings", block_size)
    if block_size > positions:
        raise RecipeError(
            f"--block_size is {block_size}, but this model has {positions} positions; allowed: 1 to {positions}. Give a "
            "smaller block size."
        )
    return model


@one_paragraph()
@ranks_together()
def main():
    model_args, data_args, training_args = parse_arguments(
        ModelArguments, TextArguments, ZeroTrainingArguments, defaults=DEFAULTS, from_scratch=FROM_SCRATCH
    )
    check_writable(training_args.output_dir)
    checkpoint = checkpoint_to_resume(training_args.resume_from_checkpoint, training_args.output_dir)
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="loading the data"):
        splits = load_text(data_args)
    tokenizer = load_or_train(
        model_args,
        train_for_language_modelling,
        splits["train"]["text"],
        training_args.output_dir,
        resuming=checkpoint is not None,
    )
    # At stage 3 the pretrained weights stay in their files until each rank reads its shard.
    with init(training_args.parallelism_config):
        model = load_model(model_args, tokenizer, data_args.block_size)
    with training_args.main_process_first(desc="packing the text"):
        blocks = pack(splits, tokenizer, data_args.block_size)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=at_most(blocks["train"], data_args.max_train_samples, training_args.seed),
        eval_dataset=at_most(blocks["validation"], data_args.max_eval_samples, training_args.seed),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        callbacks=[LogLastStep()],
    )

    results = {"parameters": model.num_parameters(), "processes": training_args.world_size}
    if training_args.do_train:
        trained = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        trainer.save_state()
        results |= {
            "train_loss": trained.training_loss,
            "train_seconds": trained.metrics["train_runtime"],
            "train_tokens_per_second": trained.metrics["train_samples_per_second"] * data_args.block_size,
        }
    if training_args.do_eval:
        loss = trainer.evaluate()["eval_loss"]
        results |= {"eval_loss": loss, "perplexity": math.exp(loss)}
    results["peak_memory_bytes"] = peak_memory_bytes()

    if trainer.is_world_process_zero():
        sharded = training_args.zero is not None and training_args.do_train
        report("GPT language modelling", results, training_args.output_dir, engine_of(trainer) if sharded else None)


if __name__ == "__main__":
    main()
