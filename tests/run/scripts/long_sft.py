"""Fine-tunes a small model on long rows with TRL's SFTTrainer, as a user of TRL writes it: `long_sft.py OUT.json FOLDER`."""

import json
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = 60


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, WORDS)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def rows() -> Dataset:
    generator = torch.Generator().manual_seed(0)

    def words(least: int, most: int) -> str:
        count = int(torch.randint(least, most, (1,), generator=generator))
        return " ".join(f"w{number}" for number in torch.randint(2, WORDS, (count,), generator=generator).tolist())

    # Long prompts without a label, and short completions: most ranks' tokens have none.
    return Dataset.from_list([{"prompt": words(5, 40), "completion": " " + words(2, 12)} for _ in range(48)])


def main(out: str, folder: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    )
    arguments = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        pad_to_multiple_of=2,
        max_length=64,
        max_steps=5,
        logging_steps=1,
        learning_rate=1e-2,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    data = rows()
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(6)),
        processing_class=tokenizer(),
    )
    trainer.train()
    found = {"history": trainer.state.log_history, "evaluated": trainer.evaluate()}
    if trainer.is_world_process_zero():
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
