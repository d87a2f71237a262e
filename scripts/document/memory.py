"""Draws the bytes of state on a rank at each stage, for BERT-base, from its shapes and the engine's layout."""

from functools import cache

import torch
from transformers import BertConfig, BertModel

from hf_zero.layout.slots import BucketLayout, ParameterSpec, plan_buckets

from .svg import BLUE, GREEN, GREY, ORANGE, Picture

RANKS = 8
_BUCKET_NUMEL = 25 * 2**20 // 4
_STATE_VALUES = 2  # AdamW's exp_avg and exp_avg_sq


@cache
def bert_base(shards: int) -> tuple[BucketLayout, ...]:
    """The buckets of BERT-base in fp32."""
    with torch.device("meta"):
        model = BertModel(BertConfig())
    specs = [ParameterSpec(name=name, numel=p.numel(), key="fp32") for name, p in model.named_parameters()]
    return plan_buckets(specs, bucket_numel=_BUCKET_NUMEL, shards=shards)


def bytes_of_stage(stage: int) -> dict[str, int]:
    """Bytes of fp32 parameters, gradients and AdamW state that last on each rank between backward and step.

    Stage 1 is drawn as where micro-batches accumulate.
    """
    layouts = bert_base(RANKS)
    whole = 4 * sum(slot.interval.numel for layout in layouts for slot in layout.slots)
    shard = 4 * sum(layout.shard_numel for layout in layouts)
    return {
        "parameters": shard if stage >= 3 else whole,
        "gradients": shard if stage >= 2 else whole,
        "optimizer state": _STATE_VALUES * (shard if stage >= 1 else whole),
    }


def draw() -> str:
    """Bars of the four stages, one below the other."""
    picture = Picture(860, 268, f"State of BERT-base on each of {RANKS} ranks, by stage")
    picture.words(20, 26, f"BERT-base, fp32, AdamW, {RANKS} ranks: bytes on each rank", size=15, bold=True)
    colours = {"parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN}
    left, longest = 90, 640
    scale = longest / sum(bytes_of_stage(0).values())
    for stage in range(4):
        x, y = left, 48 + 38 * stage
        picture.words(20, y + 19, f"stage {stage}")
        held = bytes_of_stage(stage)
        for kind, nbytes in held.items():
            picture.box(x, y, nbytes * scale, 28, colours[kind])
            x += nbytes * scale
        picture.words(x + 8, y + 19, f"{sum(held.values()) / 1e9:.2f} GB")
    picture.legend(left, 218, [(colour, kind) for kind, colour in colours.items()])
    notes = (
        "Stage 1 has whole gradients where micro-batches accumulate, and is otherwise as stage 2.",
        "Gradient buckets on their way, gathered layers and activations come on top.",
    )
    for line, words in enumerate(notes):
        picture.words(left, 239 + 18 * line, words, colour=GREY)
    return picture.text()
