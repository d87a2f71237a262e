"""Tiny random models and made-up samples for `--small`, in place of a model and a data set of the Hub. No network.

At full size, a recipe uses nothing from this file: copy the recipe, and delete its `--small` branch.
"""

import itertools
import random
import tempfile

import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
CONFIGS = {
    "bert": {**SIZE, "max_position_embeddings": 64},
    "modernbert": {**SIZE, "max_position_embeddings": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama": {**SIZE, "num_key_value_heads": 1, "max_position_embeddings": 64},
    "qwen3": {**SIZE, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64},
}
ENCODERS = ("bert", "modernbert")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CHAT = "{% for m in messages %}{{ m.role + ' : ' + m.content + ' [SEP] ' }}{% endfor %}"

COLORS = ["red", "blue", "green", "black", "white", "brown"]
ANIMALS = ["fox", "cat", "dog", "horse", "bird", "mouse"]
CITIES = ["Paris", "Lima", "Oslo", "Rome"]
PEOPLE = ["Ada Lovelace", "Alan Turing", "Grace Hopper", "Emmy Noether"]
PRAISE = ["warm", "funny", "bright", "touching"]
BLAME = ["dull", "slow", "clumsy", "tired"]
OTHER = "a the film is and in lives met what color describe user assistant : . yes no"
WORDS = sorted(set(" ".join([*COLORS, *ANIMALS, *CITIES, *PEOPLE, *PRAISE, *BLAME, OTHER]).split()))

_folders = []  # Each is removed when the process ends.


def model(kind: str) -> str:
    """A folder with a random model of a kind in `CONFIGS` (about 30,000 parameters) and a tokenizer that knows `WORDS`."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    if kind in ENCODERS:
        names |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=64, **names)
    tokenizer.chat_template = CHAT
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    ids |= {"cls_token_id": 2, "sep_token_id": 3} if kind == "modernbert" else {}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **CONFIGS[kind], **ids)
    torch.manual_seed(0)
    network = (AutoModel if kind in ENCODERS else AutoModelForCausalLM).from_config(config)

    folder = tempfile.TemporaryDirectory(prefix=f"small-{kind}-")
    _folders.append(folder)
    network.save_pretrained(folder.name)
    tokenizer.save_pretrained(folder.name)
    return folder.name


def reviews() -> dict[str, Dataset]:
    """Texts with a label: 1 for words of praise, 0 for words of blame."""
    pairs = [*itertools.permutations(PRAISE, 2), *itertools.permutations(BLAME, 2)]
    rows = [{"text": f"a {a} and {b} film", "label": int(a in PRAISE)} for a, b in pairs] * 8
    random.Random(0).shuffle(rows)
    return {"train": Dataset.from_list(rows[:160]), "test": Dataset.from_list(rows[160:])}


def triplets() -> Dataset:
    """An anchor, a positive of the same color and animal, and a negative."""
    draw = random.Random(0)
    rows = []
    for color, animal in itertools.product(COLORS, ANIMALS):
        other = draw.choice([each for each in ANIMALS if each != animal])
        rows.append(
            {
                "anchor": f"what color is the {color} {animal}",
                "positive": f"a {animal} in {color}",
                "negative": f"a {other} in {color}",
            }
        )
    draw.shuffle(rows)
    return Dataset.from_list(rows)


def answers() -> Dataset:
    """Questions with a good answer."""
    return triplets().rename_columns({"anchor": "question", "positive": "answer"}).remove_columns("negative")


def entities() -> dict[str, Dataset]:
    """Tokens with tags of persons and places."""
    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    rows = []
    for person, city, color in itertools.product(PEOPLE, CITIES, COLORS):
        rows.append({"tokens": [*person.split(), "lives", "in", city], "ner_tags": [1, 2, 0, 0, 3]})
        rows.append({"tokens": ["the", color, "cat", "met", *person.split()], "ner_tags": [0, 0, 0, 0, 1, 2]})
    random.Random(0).shuffle(rows)
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=names))})
    return {
        "train": Dataset.from_list(rows[:160], features=features),
        "validation": Dataset.from_list(rows[160:], features=features),
    }


def completions() -> Dataset:
    """Prompts with a completion."""
    rows = [
        {"prompt": f"what color is the {color} {animal} :", "completion": f" the {animal} is {color} ."}
        for color, animal in itertools.product(COLORS, ANIMALS)
    ]
    return Dataset.from_list(rows * 2)


def _chat(**texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in texts.items()]


def chats() -> Dataset:
    """Conversations of one question and its answer."""
    rows = [{"messages": _chat(user=row["prompt"], assistant=row["completion"])} for row in completions()]
    return Dataset.from_list(rows)


def preferences() -> Dataset:
    """Two conversations with the same question: the chosen answer is right, the rejected one is wrong."""
    draw = random.Random(0)
    rows = []
    for row in completions():
        wrong = f" the {draw.choice(ANIMALS)} is {draw.choice(COLORS)} ."
        rows.append(
            {
                "chosen": _chat(user=row["prompt"], assistant=row["completion"]),
                "rejected": _chat(user=row["prompt"], assistant=wrong),
            }
        )
    return Dataset.from_list(rows)


def prompts() -> Dataset:
    """Prompts only."""
    return completions().remove_columns("completion")
