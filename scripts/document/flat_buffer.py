"""Draws one bucket as the layout makes it: slots, padding, shards, and one rank's rows."""

from hf_zero.layout.shards import rows_of_shard
from hf_zero.layout.slots import ParameterSpec, plan_buckets

from .svg import BLUE, DARK, GREEN, GREY, ORANGE, PALE, Picture

_WIDTH = 36
_RANKS = 4
_SHOWN_RANK = 1
_LAYER = {
    "ln_1.weight": _WIDTH,
    "ln_1.bias": _WIDTH,
    "attn.c_attn.weight": 3 * _WIDTH * _WIDTH,
    "attn.c_attn.bias": 3 * _WIDTH,
    "attn.c_proj.weight": _WIDTH * _WIDTH,
    "attn.c_proj.bias": _WIDTH,
    "ln_2.weight": _WIDTH,
    "ln_2.bias": _WIDTH,
    "mlp.c_fc.weight": 4 * _WIDTH * _WIDTH,
    "mlp.c_fc.bias": 4 * _WIDTH,
    "mlp.c_proj.weight": 4 * _WIDTH * _WIDTH,
    "mlp.c_proj.bias": _WIDTH,
}
_LEFT, _LONG = 20, 820


def draw() -> str:
    """The bucket as one row, the shards below it, and the rows that one rank's optimizer holds."""
    specs = [ParameterSpec(name=name, numel=numel, key="fp32") for name, numel in _LAYER.items()]
    [bucket] = plan_buckets(specs, bucket_numel=10**6, shards=_RANKS)
    scale = _LONG / bucket.numel
    picture = Picture(860, 320, "A bucket: slots, padding, shards")
    picture.words(
        _LEFT,
        26,
        f"One bucket: a GPT-2 layer {_WIDTH} wide, {bucket.numel} elements, {_RANKS} ranks",
        size=15,
        bold=True,
    )
    picture.words(_LEFT, 52, "slots, in the order in which gradients arrive (the last parameter first)")
    for place, slot in enumerate(bucket.slots):
        x, width = _LEFT + slot.interval.start * scale, slot.interval.numel * scale
        picture.box(x, 60, width, 44, BLUE if place % 2 else ORANGE)
        if width > 7 * len(slot.name):
            picture.words(x + width / 2, 86, slot.name, size=11, anchor="middle", colour="white")
    for gap in bucket.padding:
        picture.box(_LEFT + gap.start * scale, 60, gap.numel * scale, 44, PALE, line=GREY)
    last = bucket.padding[-1]
    picture.words(
        _LEFT + _LONG,
        120,
        f"padding: {sum(gap.numel for gap in bucket.padding)}, at the end {last.numel}",
        size=11,
        anchor="end",
    )
    picture.words(_LEFT, 148, "shards: an equal part for each rank")
    for rank in range(_RANKS):
        shard = bucket.shard(rank)
        picture.box(
            _LEFT + shard.start * scale, 156, shard.numel * scale, 30, GREEN if rank == _SHOWN_RANK else PALE, line=DARK
        )
        middle = _LEFT + (shard.start + shard.numel / 2) * scale
        picture.words(middle, 176, f"rank {rank}: {shard.start} to {shard.stop}", size=11, anchor="middle")
    _draw_rows(picture, bucket)
    return picture.text()


def _draw_rows(picture: Picture, bucket) -> None:
    shard = bucket.shard(_SHOWN_RANK)
    zoom, old = _LONG / shard.numel, _LONG / bucket.numel
    for at, end in ((shard.start, _LEFT), (shard.stop, _LEFT + _LONG)):
        picture.line([(_LEFT + at * old, 186), (end, 226)], dashed=True)
    picture.words(
        _LEFT, 218, f"what the optimizer of rank {_SHOWN_RANK} holds: a view of each parameter's part in its shard"
    )
    for place, row in enumerate(rows_of_shard(bucket, _SHOWN_RANK)):
        x, width = _LEFT + row.in_shard.start * zoom, row.in_shard.numel * zoom
        picture.box(x, 226, width, 44, BLUE if place % 2 else ORANGE)
        part = f"{row.name}[{row.in_parameter.start}:{row.in_parameter.stop}]"
        if width > 6 * len(part):
            picture.words(x + width / 2, 252, part, size=11, anchor="middle", colour="white")
    picture.words(
        _LEFT, 292, "The parameter, its gradient and its state are cut at the same elements.", size=11, colour=GREY
    )
