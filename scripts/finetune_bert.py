"""Fine-tune a BERT-like model to classify text, with a stock Trainer on a ZeRO engine.

    accelerate launch scripts/finetune_bert.py --zero 2
    accelerate launch scripts/finetune_bert.py --zero configs/zero2.yaml --model_name_or_path bert-base-uncased \
        --dataset_name glue/sst2 --bf16 --output_dir outputs/sst2

Without a dataset it learns to tell from a docstring which package of the standard library it comes from; without a
model it trains a small one from scratch. Without `--zero` it runs under stock DDP.
"""

import finetuning
import numpy as np
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

from hf_zero import ZeroTrainingArguments, init

DEFAULTS = {"output_dir": "outputs/bert", "logging_steps": 20, "per_device_eval_batch_size": 64, "save_total_limit": 1}
FROM_SCRATCH = {"learning_rate": 1e-3, "num_train_epochs": 8, "per_device_train_batch_size": 16, "warmup_steps": 40}


def small_bert(max_seq_length: int) -> BertConfig:
    """About a million parameters: learns a few thousand short texts on a CPU in a minute."""
    return BertConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=max_seq_length,
    )


def load_model(
    model_args: finetuning.ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    names: dict[str, dict],
) -> PreTrainedModel:
    """The pretrained model with a new head for these classes, or a model from scratch."""
    if model_args.model_name_or_path:
        return AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, **names)
    small = small_bert(max_seq_length)
    config = finetuning.config_from_scratch(
        model_args, small, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **names
    )
    return AutoModelForSequenceClassification.from_config(config)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of rows whose most likely class is the right one."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(axis=-1) == prediction.label_ids))}


@finetuning.one_paragraph()
@finetuning.ranks_together()
def main():
    model_args, data_args, training_args = finetuning.parse_arguments(
        finetuning.ModelArguments,
        finetuning.ClassificationArguments,
        ZeroTrainingArguments,
        defaults=DEFAULTS,
        from_scratch=FROM_SCRATCH,
    )
    finetuning.check_writable(training_args.output_dir)
    checkpoint = finetuning.checkpoint_to_resume(training_args.resume_from_checkpoint, training_args.output_dir)
    set_seed(training_args.seed)

    with training_args.main_process_first(desc="loading the data"):
        splits = finetuning.load_classification(data_args, training_args.seed)
    tokenizer = finetuning.load_or_train(
        model_args,
        finetuning.train_for_classification,
        splits["train"]["text"],
        training_args.output_dir,
        resuming=checkpoint is not None,
    )
    with training_args.main_process_first(desc="tokenizing"):
        rows = finetuning.tokenize(splits, tokenizer, data_args.max_seq_length)
    # At stage 3 the pretrained weights stay in their files until each rank reads its shard.
    with init(training_args.parallelism_config):
        model = load_model(model_args, tokenizer, data_args.max_seq_length, finetuning.class_names(splits))

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    # Classification heads accept the number of items in a batch but average over their own rows all the same, for which
    # the Trainer would multiply the logged loss, and the gradients, by the number of ranks and accumulation steps.
    trainer.model_accepts_loss_kwargs = False

    def evaluated(metrics: dict[str, float]) -> dict[str, float]:
        return {name: metrics[name] for name in ("eval_loss", "eval_accuracy")}

    finetuning.run_trainer("BERT classification", trainer, checkpoint, evaluated)


if __name__ == "__main__":
    main()
