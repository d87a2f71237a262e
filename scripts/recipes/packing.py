"""Texts → blocks of equal length, which leave no token of a batch to padding."""

from itertools import chain

from datasets import DatasetDict
from transformers import PreTrainedTokenizerBase

from .errors import RecipeError


def pack(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase, block_size: int) -> DatasetDict:
    """Tokenize the column `text`, join the texts of a mapping batch, and cut them into blocks; the rest is dropped."""

    def cut(rows):
        tokens = list(chain.from_iterable(tokenizer(rows["text"], verbose=False)["input_ids"]))
        whole = len(tokens) - len(tokens) % block_size
        blocks = [tokens[start : start + block_size] for start in range(0, whole, block_size)]
        return {"input_ids": blocks, "labels": blocks}

    packed = splits.map(cut, batched=True, remove_columns=splits["train"].column_names, desc="Packing into blocks")
    for split, blocks in packed.items():
        if len(blocks) == 0:
            raise RecipeError(
                f"The {split} text is shorter than one block of {block_size} tokens, so there is nothing to learn from or "
                "to measure. Give more text, or a smaller --block_size."
            )
    return packed
