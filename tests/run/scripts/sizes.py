"""Models and data of the scripts beside this file: found in the script's own folder, as Python finds them."""

import torch
from transformers import BertConfig, BertForSequenceClassification


def tiny_bert() -> BertForSequenceClassification:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=60, max_position_embeddings=16, **size))


def data(rows: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(60, (rows, 8), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 2} for row in ids]
