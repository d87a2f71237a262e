"""The model's tokenizer: loaded, or for a model from scratch trained on its own text."""

from collections.abc import Callable, Iterable
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .arguments import ModelArguments
from .errors import RecipeError

VOCABULARY = 4096


def load_or_train(
    model: ModelArguments,
    train: Callable[[Iterable[str]], PreTrainedTokenizerFast],
    texts: Iterable[str],
    output_dir: str,
    *,
    resuming: bool,
) -> PreTrainedTokenizerBase:
    """The tokenizer that the arguments name, or one trained on `texts` and kept in `output_dir` for a resumed run.

    The first rank trains and hands the result to the others, so that no rank reads a file another is writing, and all
    have the same tokenizer even on machines that share no folder. Call it on every rank.
    """
    named = model.tokenizer_name or model.model_name_or_path
    if named:
        return AutoTokenizer.from_pretrained(named)
    if resuming:
        return _trained_before(output_dir)
    trained = [None]
    if PartialState().is_main_process:
        trained = [train(texts)]
        trained[0].save_pretrained(output_dir)
    broadcast_object_list(trained)
    return trained[0]


def _trained_before(output_dir: str) -> PreTrainedTokenizerBase:
    if not (Path(output_dir) / "tokenizer.json").is_file():
        raise RecipeError(
            f"The run to resume trained a tokenizer, but the folder {output_dir!r} holds none (tokenizer.json). Set "
            "--output_dir to that run's folder, or --tokenizer_name to a folder that has its tokenizer."
        )
    return AutoTokenizer.from_pretrained(output_dir)


def train_for_classification(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with BERT's special tokens: lower case, `[CLS] … [SEP]` around a text."""
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    tokenizer = _train_byte_pairs(texts, [*special.values()], normalizers.BertNormalizer(lowercase=True))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    tokens = {f"{role}_token": token for role, token in special.items()}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **tokens)


def train_for_language_modelling(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer as GPT-2's: it writes any text back exactly, and has one special token."""
    end_of_text = "<|endoftext|>"
    tokenizer = _train_byte_pairs(texts, [end_of_text], normalizer=None)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end_of_text, eos_token=end_of_text)


def _train_byte_pairs(
    texts: Iterable[str], special_tokens: list[str], normalizer: normalizers.Normalizer | None
) -> Tokenizer:
    """Byte-level BPE, for BERT too: a WordPiece vocabulary trained twice on one text comes out in two orders."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=normalizer is not None)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
