"""One loss trajectory: every stage, world size, accumulation, dtype, model family and odd model follows DDP."""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cells import slow
from shared_ranks import on_shared_ranks, run_on_ranks, shared_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import (
    ELEMENTWISE,
    LENGTH,
    VOCABULARY,
    Answer,
    Job,
    Outcome,
    Unruly,
    adamw_in_two_groups,
    bert,
    bert_batch,
    checkpoint_activations,
    compare_with_ddp,
    fused_adamw,
    gpt2,
    gpt2_batch,
    llama,
    train,
)
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BloomConfig,
    BloomForCausalLM,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    FunnelConfig,
    FunnelForSequenceClassification,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from hf_zero.config import ConfigError, ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.units import find_unit_modules, group_layers, own_parameters

pytestmark = pytest.mark.timeout(180)

CLASSES = 3
IMAGE = 16

# ---- how a job is compared ----


def outcomes(job: Job, variants: list[dict], world_size: int = 2):
    """(DDP's, the engine's) for every rank and variant; asserts that the ranks end with identical parameters."""
    arguments = {"job": job, "variants": variants}
    if world_size == 2:
        by_rank = shared_ranks.run(compare_with_ddp, **arguments)
    else:
        by_rank = run_on_ranks(compare_with_ddp, world_size=world_size, **arguments)
    for variant in range(len(variants)):
        first = by_rank[0][variant][1].tensors
        for pairs in by_rank[1:]:
            outcome = pairs[variant][1]
            for name in outcome.parameter_names:
                assert np.array_equal(outcome.tensors[name], first[name]), (
                    f"{name} differs between ranks with {variants[variant]}"
                )
    return [(variants[v], *pair) for pairs in by_rank for v, pair in enumerate(pairs)]


def assert_bitwise(job: Job, variants: list[dict]) -> None:
    for settings, ddp, engine in outcomes(job, variants):
        assert engine.equals(ddp), f"{settings}: losses differ by {engine.loss_error(ddp)}"


def assert_close(job: Job, variants: list[dict], world_size: int = 2) -> None:
    for settings, ddp, engine in outcomes(job, variants, world_size):
        assert engine.loss_error(ddp) <= 1e-5, settings
        if job.max_norm is not None:
            assert engine.norm_error(ddp) <= 1e-6, settings


# ---- models of families, and batches ----

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 60,
    "num_labels": CLASSES,
}
ENCODER = {
    **SIZES,
    "max_position_embeddings": LENGTH + 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert_masked_lm() -> nn.Module:
    return BertForMaskedLM(BertConfig(**ENCODER))


def roberta() -> nn.Module:
    return RobertaForSequenceClassification(RobertaConfig(**ENCODER))


def distilbert() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 60, "num_labels": CLASSES}
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    return DistilBertForSequenceClassification(DistilBertConfig(**sizes, **no_dropout, max_position_embeddings=LENGTH))


def electra() -> nn.Module:
    return ElectraForSequenceClassification(ElectraConfig(**ENCODER, embedding_size=20))


def deberta() -> nn.Module:
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4}
    like_v3 = {"share_att_key": True, "norm_rel_ebd": "layer_norm", "pooler_hidden_size": 32}
    return DebertaV2ForSequenceClassification(DebertaV2Config(**ENCODER, **relative, **like_v3))


def albert(layers_a_group: int = 1) -> nn.Module:
    sizes = {"embedding_size": 20, "inner_group_num": layers_a_group, "classifier_dropout_prob": 0.0}
    return AlbertForSequenceClassification(AlbertConfig(**ENCODER, **sizes))


def funnel() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 60, "block_sizes": [2, 2]}
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return FunnelForSequenceClassification(FunnelConfig(**sizes, **no_dropout, num_labels=CLASSES))


def gpt_neo() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 60}
    attention = {"attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": LENGTH}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, **attention, bos_token_id=0, eos_token_id=0))


def bloom() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    return BloomForCausalLM(BloomConfig(**sizes, bos_token_id=0, eos_token_id=0))


def t5(width: int = 32, feed_forward: int = 60, decoders: int = 2) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": width, "d_kv": width // 4, "num_heads": 4, "d_ff": feed_forward}
    layers = {"num_layers": 3, "num_decoder_layers": decoders}
    return T5ForConditionalGeneration(T5Config(**sizes, **layers, dropout_rate=0.0, decoder_start_token_id=0))


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(**SIZES, image_size=IMAGE, patch_size=4))


class ResidualBlock(nn.Module):
    """As torchvision's: in-place activations, and a projection where the shape changes."""

    def __init__(self, channels: int, out_channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1:
            projection = nn.Conv2d(channels, out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(out_channels))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        identity = hidden if self.downsample is None else self.downsample(hidden)
        hidden = self.relu(self.bn1(self.conv1(hidden)))
        hidden = self.bn2(self.conv2(hidden))
        hidden += identity
        return self.relu(hidden)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 8, 1))
        self.layer2 = nn.Sequential(ResidualBlock(8, 16, 2), ResidualBlock(16, 16, 1))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Answer:
        hidden = self.layer2(self.layer1(self.stem(pixel_values)))
        return Answer(nn.functional.cross_entropy(self.fc(hidden.mean((2, 3))), labels))


class Stack(nn.Module):
    """Checkpoints around the calls of `span` layers: their hooks run again in the recomputation, unlike transformers'."""

    def __init__(self, span: int, reentrant: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 60, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.head = nn.Linear(32, CLASSES)
        self.span = span
        self.reentrant = reentrant

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        hidden = self.embed(input_ids)
        for start in range(0, len(self.layers), self.span):
            run = nn.Sequential(*self.layers[start : start + self.span])
            hidden = checkpoint(run, hidden, use_reentrant=self.reentrant)
        return Answer(nn.functional.cross_entropy(self.head(hidden.mean(1)), labels))


class FeedForward(nn.Module):
    def __init__(self, into_input: bool):
        super().__init__()
        self.wide = nn.Linear(32, 60)
        self.narrow = nn.Linear(60, 32)
        self.into_input = into_input

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        change = self.narrow(torch.tanh(self.wide(hidden)))
        if not self.into_input:
            return change  # a view: Linear computes in two dimensions
        hidden += change
        return hidden


class InPlace(nn.Module):
    """Residuals added in place: by the model into what a layer returned, or by the layer into its input."""

    def __init__(self, into_input: bool, frozen: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(FeedForward(into_input) for _ in range(3)).requires_grad_(not frozen)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            before = hidden
            hidden = layer(hidden)
            if hidden is not before:
                hidden += before
        return Answer(nn.functional.cross_entropy(self.head(hidden.mean(1)), labels))


def translations(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    source = torch.randint(2, VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": source, "labels": torch.randint(2, VOCABULARY, (size, LENGTH - 3), generator=generator)}


def images(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    pixels = torch.randn(size, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (size,), generator=generator)}


def draw_alike(model: nn.Module, _args: tuple) -> None:
    """Layers to drop: in each step others, and the same on all ranks."""
    model.forwards = getattr(model, "forwards", 0) + 1
    torch.manual_seed(model.forwards)


def wav2vec2() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 24}
    convolutions = {"conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (2, 2)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "pad_token_id": 0}
    # Nothing else draws: DDP's ranks and ours would be at other numbers.
    names = ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "activation_dropout", "final_dropout")
    still = {"mask_time_prob": 0.0, **dict.fromkeys(names, 0.0)}
    config = Wav2Vec2Config(vocab_size=VOCABULARY, layerdrop=0.5, **sizes, **convolutions, **positions, **still)
    model = Wav2Vec2ForCTC(config)
    model.register_forward_pre_hook(draw_alike)
    return model


def sounds(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    labels = torch.randint(1, VOCABULARY, (size, 5), generator=generator)
    return {"input_values": torch.randn(size, 200, generator=generator), "labels": labels}


FAMILIES = {
    name: Job(make_model=model, make_batch=batch, steps=2, max_norm=100.0)
    for name, model, batch in [
        ("bert", bert, bert_batch),
        ("roberta", roberta, bert_batch),
        ("distilbert", distilbert, bert_batch),
        ("gpt2", gpt2, gpt2_batch),
        ("t5", t5, translations),
        ("llama", llama, gpt2_batch),
        ("bert masked lm", bert_masked_lm, gpt2_batch),
        ("electra", electra, bert_batch),
        ("deberta-v2", deberta, bert_batch),
        ("gpt-neo", gpt_neo, gpt2_batch),
        ("bloom", bloom, gpt2_batch),
        ("albert", albert, bert_batch),
        ("funnel", funnel, bert_batch),
        ("vit", vit, images),
        ("resnet", ResNet, images),
    ]
} | {"wav2vec2": Job(make_model=wav2vec2, make_batch=sounds, steps=4, find_unused=True, max_norm=1e6)}


# ---- models with odd paths ----


class NoGradient(torch.autograd.Function):
    """Returns its input, whose gradient it leaves undefined."""

    @staticmethod
    def forward(_ctx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx, _gradient: torch.Tensor) -> None:
        return None


class Undefined(nn.Module):
    """Layers behind which a gradient ends undefined: always, on odd ranks, or in every other forward."""

    def __init__(self, when: str = "always", reentrant: bool | None = None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.side = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(2))
        self.large = nn.Linear(24, 2400)
        self.layer = nn.Linear(24, 24)
        self.head = nn.Linear(24, VOCABULARY)
        self.when, self.reentrant = when, reentrant
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        self.calls += 1
        rank = torch.distributed.get_rank()
        ends = {"always": True, "odd ranks": rank % 2 == 1, "odd forwards": self.calls % 2 == 1}[self.when]
        embedded = self.embed(input_ids).mean(1)
        hidden = embedded
        for layer in self.side:
            hidden = (
                layer(hidden) if self.reentrant is None else checkpoint(layer, hidden, use_reentrant=self.reentrant)
            )
        beside = hidden + self.large(hidden).view(-1, 100, 24).mean(1)
        hidden = self.layer(embedded) + (NoGradient.apply(beside) if ends else beside)
        return Answer(nn.functional.cross_entropy(self.head(hidden), labels[:, 0]))


class InSegments(nn.Module):
    """Four layers in two checkpoints: what is recomputed and what runs backward are not the same layer."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(24, VOCABULARY)
        self.reentrant = reentrant

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        hidden = self.embed(input_ids)
        for segment in (self.layers[:2], self.layers[2:]):
            hidden = checkpoint(partial(self.through, segment), hidden, use_reentrant=self.reentrant)
        return Answer(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))

    @staticmethod
    def through(segment: nn.ModuleList, hidden: torch.Tensor) -> torch.Tensor:
        for layer in segment:
            hidden = hidden + layer(hidden)
        return hidden


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(48, 150)
        self.narrow = nn.Linear(150, 48)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.narrow(torch.tanh(self.wide(hidden)))


class TwoStreams(nn.Module):
    """Goes through two lists of layers in turn, and leaves out the last layer of one of them on every other step."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 48)
        self.left = nn.ModuleList(Block() for _ in range(3))
        self.right = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(48, 3)
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        hidden = self.embed(input_ids)
        skipped = 2 if self.calls % 2 else 3
        self.calls += 1
        for index, (one, other) in enumerate(zip(self.left, self.right)):
            hidden = other(one(hidden)) if index != skipped else one(hidden)
        return Answer(nn.functional.cross_entropy(self.head(hidden.mean(1)), labels))


# ---- the matrix ----


SMALL_BUCKETS = "20KiB"
STAGES = [{"stage": stage, "bucket_bytes": SMALL_BUCKETS} for stage in (0, 1, 2, 3)]
LOCAL, LOCAL_3 = ({**STAGES[stage], "grad_accumulation": "local"} for stage in (2, 3))
# In one bucket, and with parameters that stay whole until the step.
OTHERWISE = [
    {"stage": 2, "bucket_bytes": "1GiB"},
    {**STAGES[3], "reshard_after_forward": False, "prefetch_units": 2},
]
RESHARDED, KEPT = STAGES[3], {"stage": 3, "reshard_after_forward": False}
BOTH = [RESHARDED, KEPT]
UNDEFINED = [{"stage": stage, "bucket_bytes": "3KiB"} for stage in (0, 1, 2, 3)]
IN_HOST_MEMORY = {"optimizer": "cpu", "params": "cpu"}
# Layers that are gathered together: a layer of the models below has 60 to 110 KiB.
TOGETHER, IN_PAIRS = {**STAGES[3], "unit_bytes": "1MiB"}, {"stage": 3, "unit_bytes": "120KiB"}
GROUPED = [TOGETHER, IN_PAIRS]

BERT, GPT2 = Job(make_model=bert, make_batch=bert_batch), Job()
WIDE_T5 = Job(make_model=partial(t5, 48, 90, 3), make_batch=translations, max_norm=100.0)
CHANGES = {
    "norm below the clip": {"max_norm": 100.0},
    "unfused AdamW": {"make_optimizer": adamw_in_two_groups},
    "dropout": {"model_arguments": {"dropout": 0.1}},
    "uneven last batch": {"uneven_last_batch": True},
}


def recomputed(job: Job, reentrant: bool) -> Job:
    return replace(job, prepare=partial(checkpoint_activations, kwargs={"use_reentrant": reentrant}))


def stepped_by(name: str) -> Job:
    return replace(GPT2, make_optimizer=ELEMENTWISE[name])


def unruly(sleeping: str, accumulation: int) -> tuple[Job, list[dict]]:
    arguments = {"model_arguments": {"sleeping": sleeping}, "find_unused": True, "batch_size": 4, "steps": 4}
    job = Job(make_model=Unruly, **arguments, accumulation=accumulation)
    return job, (STAGES if accumulation == 1 else [*STAGES[:2], LOCAL, LOCAL_3])


def undefined(when: str, accumulation: int, reentrant: bool | None) -> Job:
    return Job(make_model=Undefined, model_arguments={"when": when, "reentrant": reentrant}, accumulation=accumulation)


def stacked(span: int, reentrant: bool) -> Job:
    return Job(make_model=Stack, make_batch=bert_batch, model_arguments={"span": span, "reentrant": reentrant}, steps=2)


def in_place(into_input: bool, frozen: bool) -> Job:
    arguments = {"into_input": into_input, "frozen": frozen}
    return Job(make_model=InPlace, make_batch=bert_batch, model_arguments=arguments, steps=2)


LOCALLY = [{**settings, "grad_accumulation": "local"} for settings in UNDEFINED]
NOT_AHEAD = [*BOTH, {**RESHARDED, "prefetch_units": 0}]
AHEAD = [{**RESHARDED, "prefetch_units": ahead} for ahead in (0, 3, 100)]
SEGMENTS = [{**STAGES[3], "prefetch_units": ahead} for ahead in (0, 1, 2)]
AHEAD_OR_KEPT = [
    IN_PAIRS | more for more in ({"prefetch_units": 0}, {"reshard_after_forward": False}, {"prefetch_units": 3})
]
OF_ALBERT = [{**settings, "unit_modules": "AlbertLayer"} for settings in BOTH]

# (name, job, the engine's settings), to the last bit on two ranks.
EXACT = [
    ("plain-gpt2", GPT2, [*STAGES, *OTHERWISE]),
    ("uneven last batch-gpt2", replace(GPT2, uneven_last_batch=True), STAGES[::2]),
    ("dropout-gpt2", replace(GPT2, model_arguments={"dropout": 0.1}), STAGES[3:]),
    ("local accumulation-t5", replace(FAMILIES["t5"], max_norm=None, accumulation=2), [LOCAL_3]),
    ("sgd", stepped_by("sgd"), STAGES[1:2]),
    ("adagrad", stepped_by("adagrad"), STAGES[3:]),
    ("adam amsgrad", stepped_by("adam amsgrad"), STAGES[3:]),
    ("adamw foreach", stepped_by("adamw foreach"), STAGES[1:2]),
    # Parameters that are unused, used twice, tied or frozen.
    ("unruly, odd ranks", *unruly("odd ranks", 1)),
    ("undefined, always", undefined("always", 1, None), UNDEFINED),
    (
        "undefined, odd ranks",
        undefined("odd ranks", 1, False),
        [*UNDEFINED, {**UNDEFINED[2], "offload": {"optimizer": "cpu"}}, {**UNDEFINED[3], "offload": IN_HOST_MEMORY}],
    ),
    ("undefined, recomputed", undefined("always", 2, True), LOCALLY),
    ("recomputed-gpt2", recomputed(GPT2, True), STAGES[2:]),
    ("segments", replace(GPT2, make_model=InSegments, model_arguments={"reentrant": False}), SEGMENTS),
    *((f"family-{name}", FAMILIES[name], BOTH) for name in ("bert", "t5")),
    *((f"family-{name}", FAMILIES[name], [RESHARDED]) for name in ("gpt2", "llama", "vit")),
    ("family-bert, recomputed", recomputed(FAMILIES["bert"], False), BOTH),
    ("checkpoints around calls of layers", stacked(2, True), NOT_AHEAD),
    ("residuals into what a layer returned", in_place(False, False), NOT_AHEAD),
    ("residuals into what a frozen layer returned", in_place(False, True), NOT_AHEAD),
    ("residuals into a frozen layer's input", in_place(True, True), NOT_AHEAD),
    ("two layers in turn", replace(FAMILIES["albert"], model_arguments={"layers_a_group": 2}), OF_ALBERT),
    ("ahead-llama", replace(FAMILIES["llama"], max_norm=None), AHEAD),
    ("grouped-gpt2", replace(GPT2, max_norm=100.0), GROUPED),
    ("grouped-two streams", Job(make_model=TwoStreams, make_batch=bert_batch, steps=4, find_unused=True), GROUPED),
    ("grouped, recomputed-t5", recomputed(WIDE_T5, True), GROUPED),
    ("grouped, offloaded-gpt2", replace(GPT2, max_norm=100.0), [{**IN_PAIRS, "offload": IN_HOST_MEMORY}]),
]
EXACT_IN_THE_LONG_RUN = [
    ("plain-bert", BERT, [*STAGES, *OTHERWISE]),
    *(
        (f"{name}-{model}-every stage", replace(job, **change), [*STAGES, *OTHERWISE])
        for name, change in CHANGES.items()
        for model, job in (("gpt2", GPT2), ("bert", BERT))
    ),
    *(
        (f"local accumulation in {n}-{model}", replace(job, accumulation=n), [*STAGES[:2], LOCAL, LOCAL_3])
        for n in (2, 4)
        for model, job in (("gpt2", GPT2), ("bert", BERT))
    ),
    ("local accumulation-llama", replace(FAMILIES["llama"], max_norm=None, accumulation=2), [LOCAL_3]),
    *((f"{name}-every stage", stepped_by(name), STAGES[1:]) for name in ELEMENTWISE),
    *((f"unruly, {sleeping}, {n}", *unruly(sleeping, n)) for sleeping in ("none", "even steps") for n in (1, 2)),
    ("unruly, odd ranks, accumulated", *unruly("odd ranks", 2)),
    ("undefined, odd forwards", undefined("odd forwards", 2, None), LOCALLY),
    *(
        (f"recomputed-{model}-{reentrant}-every stage", recomputed(job, reentrant), STAGES)
        for model, job in (("gpt2", GPT2), ("bert", BERT))
        for reentrant in (False, True)
    ),
    ("segments, reentrant", replace(GPT2, make_model=InSegments, model_arguments={"reentrant": True}), SEGMENTS),
    *((f"family-{name}-both", job, BOTH) for name, job in FAMILIES.items()),
    *(
        (f"family-{name}, recomputed-{reentrant}", recomputed(FAMILIES[name], reentrant), BOTH)
        for name in ("bert", "roberta", "distilbert", "gpt2", "t5", "llama")
        for reentrant in (False, True)
    ),
    *(
        (f"checkpoints around {span}-{on}", stacked(span, on), NOT_AHEAD)
        for span, on in ((1, False), (1, True), (2, False))
    ),
    ("one layer many times", FAMILIES["albert"], OF_ALBERT),
    (
        "named units-t5",
        FAMILIES["t5"],
        [{**RESHARDED, "unit_modules": ["T5Block"]}, {**KEPT, "unit_modules": "T5Stack"}],
    ),
    ("ahead-t5", replace(FAMILIES["t5"], max_norm=None), AHEAD),
    *((f"ahead, recomputed-{name}", recomputed(FAMILIES[name], True), AHEAD) for name in ("t5", "llama")),
    ("grouped-bert", replace(BERT, max_norm=100.0), GROUPED),
    ("grouped-t5", WIDE_T5, GROUPED),
    ("grouped, every ahead or kept-t5", WIDE_T5, AHEAD_OR_KEPT),
    *(
        (f"grouped, recomputed-gpt2-{on}", recomputed(replace(GPT2, max_norm=100.0), on), GROUPED)
        for on in (False, True)
    ),
    ("grouped, recomputed-t5-False", recomputed(WIDE_T5, False), GROUPED),
]


@pytest.mark.parametrize(
    ("job", "variants"),
    [pytest.param(*cell, id=name) for name, *cell in EXACT]
    + [slow(*cell, id=name) for name, *cell in EXACT_IN_THE_LONG_RUN],
)
def test_bits_are_ddps(job, variants):
    assert_bitwise(job, variants)


SEVERAL = {"accumulation": 2, "max_norm": 0.5}
# (name, job, the engine's settings, ranks), where sums are taken in another order.
CLOSE = [
    ("sharded accumulation-2", replace(GPT2, **SEVERAL), STAGES[2:], 2),
    ("biting clip-gpt2", replace(GPT2, max_norm=0.3), STAGES, 2),
    ("undefined, odd forwards", undefined("odd forwards", 2, None), UNDEFINED[2:], 2),
    ("undefined, recomputed", undefined("always", 2, True), UNDEFINED[2:], 2),
    ("autocast-gpt2", replace(GPT2, max_norm=100.0, autocast=True), STAGES[2:], 2),
    ("three ranks-bert", replace(BERT, **SEVERAL), STAGES[1::2], 3),
]
CLOSE_IN_THE_LONG_RUN = [
    ("sharded accumulation-4", replace(GPT2, accumulation=4, max_norm=0.5), STAGES[2:], 2),
    ("sharded accumulation-t5", replace(FAMILIES["t5"], max_norm=None, accumulation=2), BOTH, 2),
    ("sharded accumulation-llama", replace(FAMILIES["llama"], max_norm=None, accumulation=2), BOTH, 2),
    ("biting clip-bert", replace(BERT, max_norm=0.3), STAGES, 2),
    *((f"biting clip-{name}", replace(FAMILIES[name], max_norm=0.3), BOTH, 2) for name in ("t5", "llama")),
    ("autocast-gpt2-every stage", replace(GPT2, max_norm=100.0, autocast=True), STAGES, 2),
    ("autocast-bert", replace(BERT, autocast=True), STAGES, 2),
    *(
        (f"{ranks} ranks-{model}", replace(job, **SEVERAL), [*STAGES, LOCAL], ranks)
        for ranks in (3, 4)
        for model, job in (("bert", BERT), ("gpt2", GPT2))
    ),
    *(
        (f"{ranks} ranks-{name}", replace(FAMILIES[name], accumulation=2, max_norm=0.3), BOTH, ranks)
        for ranks in (3, 4)
        for name in ("t5", "llama")
    ),
    ("3 ranks, grouped-bert", replace(BERT, accumulation=2, max_norm=0.3), GROUPED, 3),
]


@pytest.mark.parametrize(
    ("job", "variants", "world_size"),
    [pytest.param(*cell, id=name) for name, *cell in CLOSE]
    + [slow(*cell, id=name) for name, *cell in CLOSE_IN_THE_LONG_RUN],
)
def test_losses_and_norms_are_close_to_ddps(job, variants, world_size):
    assert_close(job, variants, world_size)


# ---- what DDP refuses, or has no counterpart for ----


@on_shared_ranks
def test_where_unused_parameters_are_found_an_undefined_gradient_is_none(rank, world_size):
    found = []
    for settings in (None, *UNDEFINED):
        torch.manual_seed(0)
        model = entry = Undefined()
        optimizer = adamw_in_two_groups(model)
        if settings is None:
            entry = DistributedDataParallel(model, find_unused_parameters=True)
        else:
            engine = ZeroEngine(model, [optimizer], settings, find_unused_parameters=True)
        for step in range(2):
            entry(**gpt2_batch(torch.Generator().manual_seed(10 * step + rank), 2)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if settings is not None:
            engine.close()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    expected, *found = found
    for stage, parameters in enumerate(found):
        assert all(map(torch.equal, parameters, expected)), f"stage {stage}"


class TwiceCheckpointed(nn.Module):
    """A layer in two reentrant checkpoints: its gradient comes in two inner backward passes, which DDP refuses."""

    def __init__(self, checkpointing: bool):
        super().__init__()
        self.embed = nn.Embedding(97, 32)
        self.layer = nn.Linear(32, 32)
        self.head = nn.Linear(32, 97)
        self.checkpointing = checkpointing

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids % 97)
        for _ in range(3):
            if self.checkpointing:
                hidden = checkpoint(lambda h: torch.tanh(self.layer(h)), hidden, use_reentrant=True)
            else:
                hidden = torch.tanh(self.layer(hidden))
        return Answer(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten() % 97))


CHECKPOINTED = [(bucket_bytes, stage) for bucket_bytes in (1000, "1GiB") for stage in range(4)]


def checkpointed_and_plain(rank: int, world_size: int) -> list[list[Outcome]]:
    """(without checkpoints, with them) of each of CHECKPOINTED."""
    found = []
    for bucket_bytes, stage in CHECKPOINTED:
        job = Job(make_model=TwiceCheckpointed, settings={"stage": stage, "bucket_bytes": bucket_bytes}, steps=2)
        arguments = ({"checkpointing": on} for on in (False, True))
        found.append([train(rank, world_size, replace(job, model_arguments=each)) for each in arguments])
    return found


@pytest.fixture(scope="module")
def twice_checkpointed() -> list[list[list[Outcome]]]:
    return run_on_ranks(checkpointed_and_plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1000, "1GiB"])
def test_parameter_in_several_reentrant_checkpoints_loses_no_gradient(stage, bucket_bytes, twice_checkpointed):
    for cells in twice_checkpointed:
        plain, checkpointed = cells[CHECKPOINTED.index((bucket_bytes, stage))]
        assert checkpointed.loss_error(plain) <= 1e-5
        for name, value in plain.tensors.items():
            assert np.allclose(value, checkpointed.tensors[name], rtol=1e-4, atol=1e-6), name


def to_bf16(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def bf16_reference(rank: int, world_size: int, steps: int) -> list[float]:
    """One process, both ranks' batches: bf16 gradients halved, summed in fp32, AdamW on an fp32 master."""
    torch.manual_seed(0)
    model = gpt2().to(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    matrices = [m for m in masters if m.dim() > 1]
    others = [m for m in masters if m.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    generators = [torch.Generator().manual_seed(100 + r) for r in range(world_size)]
    losses = []
    for _ in range(steps):
        sums = [torch.zeros_like(m) for m in masters]
        for r, generator in enumerate(generators):
            loss = model(**gpt2_batch(generator, 2)).loss
            loss.backward()
            if r == rank:
                losses.append(loss.item())
            for total, p in zip(sums, model.parameters()):
                total += p.grad / world_size
                p.grad = None
        for master, total in zip(masters, sums):
            master.grad = total
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters):
                p.copy_(master)
    return losses


def bf16_engines_and_reference(rank: int, world_size: int) -> tuple[list[list[float]], list[float]]:
    """Losses at each stage, and those of one process."""
    found = []
    for stage in range(4):
        # Stages 1 to 3 add what arrives in bf16 in the master's fp32. Stage 0's all-reduce adds in the dtype that travels.
        travels = {"reduce_dtype": "float32"} if stage == 0 else {}
        settings = {"stage": stage, "bucket_bytes": SMALL_BUCKETS, **travels}
        found.append(train(rank, world_size, replace(GPT2, prepare=to_bf16, settings=settings, steps=4)).losses)
    return found, bf16_reference(rank, world_size, 4)


@pytest.fixture(scope="module")
def in_bf16() -> list[tuple[list[list[float]], list[float]]]:
    return run_on_ranks(bf16_engines_and_reference)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_parameters_with_fp32_master_follow_a_single_process(stage, in_bf16):
    for engines, reference in in_bf16:
        assert np.allclose(engines[stage], reference, rtol=1e-5, atol=0)


def answering(dropout: float = 0.0) -> nn.Module:
    """BERT that marks the answer in a text. Its scores go through a softmax over the text, which their bias does not change."""
    config = bert(dropout).config
    config.num_labels = 2
    return BertForQuestionAnswering(config)


def question_batch(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    ids = bert_batch(generator, size)["input_ids"]
    marks = torch.randint(ids.shape[1], (2, size), generator=generator)
    return {"input_ids": ids, "start_positions": marks[0], "end_positions": marks[1]}


@pytest.mark.parametrize("clips", [slow(False), True])
def test_a_bias_whose_true_gradient_is_zero_walks_with_the_rounding_of_the_clip_and_nothing_else_does(clips):
    # Adam makes a full step of rounding noise. Clipping by a norm whose last digit differs from DDP's changes that noise.
    job = Job(make_model=answering, make_batch=question_batch, max_norm=0.5 if clips else None)
    for _, expected, found in outcomes(job, [{"stage": 2}, {"stage": 3}]):
        apart = {
            name: np.abs(found.tensors[name] - expected.tensors[name]).max()
            for name in found.parameter_names
            if not np.array_equal(found.tensors[name], expected.tensors[name])
        }
        assert clips or not apart
        assert np.allclose(found.losses, expected.losses, rtol=1e-6, atol=0)
        # All add the same to each score of a text, keys' biases to each score of an attention.
        shifts = ("qa_outputs.bias", "key.bias", "layer.2.output.LayerNorm.bias")
        assert not {name: off for name, off in apart.items() if off > 1e-5 and not name.endswith(shifts)}


# ---- which modules are units, and how many are whole at a time ----


def gathered_bytes(
    rank: int, world_size: int, jobs: dict[str, Job], variants: list[dict]
) -> dict[str, list[tuple[int, list[int], int]]]:
    """By name, for each variant: the most gathered at a time, what each unit takes, and what an evaluation leaves whole."""
    found = {}
    for name, job in jobs.items():
        found[name] = []
        for settings in variants:
            model = job.make_model()
            optimizer = fused_adamw(model)
            engine = ZeroEngine(model, [optimizer], settings)
            for step in range(3):
                model(**job.make_batch(torch.Generator().manual_seed(step), 2)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                model.eval()(**job.make_batch(torch.Generator().manual_seed(3), 2))
            schedule = engine.sharded.schedule
            left = sum(unit.passing_bytes for unit in schedule.units if not unit.is_sharded)
            found[name].append((schedule.peak_bytes, [unit.passing_bytes for unit in schedule.units], left))
    return found


@pytest.mark.parametrize(
    "names",
    [
        ["t5", "resnet"],
        slow(["bert", "distilbert", "gpt2", "llama", "bert masked lm", "electra", "deberta-v2"], id="others"),
    ],
    ids=["some", None],
)
def test_no_more_than_two_layers_are_whole_at_a_time(names):
    found, _ = run_on_ranks(
        gathered_bytes, jobs={name: FAMILIES[name] for name in names}, variants=[{"stage": 3, "prefetch_units": 1}]
    )
    for name, [(peak, (root, *layers), left)] in found.items():
        assert peak <= root + sum(sorted(layers)[-2:]) < root + sum(layers), name
        assert left == 0, name


def test_two_groups_of_layers_are_whole_at_a_time_and_none_after_an_evaluation():
    variants = [{"stage": 3, "unit_bytes": 0}, IN_PAIRS, {"stage": 3, "unit_bytes": "1MiB"}]
    for found in run_on_ranks(gathered_bytes, jobs={"t5": WIDE_T5}, variants=variants):
        for peak, (root, *layers), left in found["t5"]:
            assert peak <= root + sum(sorted(layers)[-2:])
            assert left == 0
        assert [len(units) for _, units, _ in found["t5"]] == [1 + 6, 1 + 4, 1 + 2]


UNITS = {
    "bert": {"BertEmbeddings": 1, "BertLayer": 3},
    "roberta": {"RobertaEmbeddings": 1, "RobertaLayer": 3},
    "distilbert": {"TransformerBlock": 3},
    "gpt2": {"GPT2Block": 3},
    "t5": {"T5Block": 5},
    "llama": {"LlamaDecoderLayer": 3},
    "bert masked lm": {"BertEmbeddings": 1, "BertLayer": 3},
    "electra": {"ElectraLayer": 3},
    "deberta-v2": {"DebertaV2Layer": 3},
    "gpt-neo": {"GPTNeoBlock": 2},
    "bloom": {"BloomBlock": 2},
    "albert": {"AlbertModel": 1},
    "funnel": {"FunnelLayer": 4},
    "vit": {"ViTEmbeddings": 1, "ViTLayer": 3},
    "resnet": {"ResidualBlock": 4},
    "wav2vec2": {"Wav2Vec2EncoderLayer": 6},
}


TIED = {
    "gpt2": "transformer.wte.weight",
    "t5": "shared.weight",
    "bert masked lm": "bert.embeddings.word_embeddings.weight",
    "gpt-neo": "transformer.wte.weight",
    "bloom": "transformer.word_embeddings.weight",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_are_units(name):
    units = find_unit_modules(FAMILIES[name].make_model(), "auto")
    assert Counter(type(module).__name__ for _, module in units) == UNITS[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_unit_owns_what_lies_in_it_but_for_the_tied_weight(name):
    model = FAMILIES[name].make_model()
    units = find_unit_modules(model, "auto")

    def home(parameter: str) -> str:
        inside = [unit for unit, _ in units if parameter.startswith(f"{unit}.") and parameter != TIED.get(name)]
        return inside[0] if inside else ""

    own = own_parameters(model, units)
    found = {parameter: unit for unit, pairs in own.items() for parameter, _ in pairs}
    assert found == {parameter: home(parameter) for parameter, _ in model.named_parameters()}
    assert sum(len(pairs) for pairs in own.values()) == len(found)


@pytest.mark.parametrize("name", TIED)
def test_tied_weight_is_the_roots(name):
    model = FAMILIES[name].make_model()
    own = own_parameters(model, find_unit_modules(model, "auto"))
    assert model.get_output_embeddings().weight is model.get_parameter(TIED[name])
    assert TIED[name] in dict(own[""])


def refusal_of_unit_modules(rank: int, world_size: int, names: list[str]) -> str:
    model = t5()
    try:
        ZeroEngine(model, [fused_adamw(model)], {"stage": 3, "unit_modules": names})
    except ConfigError as error:
        return str(error)
    return "no error"


def test_unknown_unit_module_is_refused_by_naming_the_known_ones():
    for message in run_on_ranks(refusal_of_unit_modules, names=["T5Blok"]):
        assert "`unit_modules` is ['T5Blok']" in message
        assert "T5Block, " in message and "T5Stack" in message


def grouped(model: nn.Module, least_bytes: int) -> list[list[str]]:
    units = find_unit_modules(model, "auto")
    own = {name: [p for _, p in held] for name, held in own_parameters(model, units).items()}
    return group_layers(units, own, least_bytes)


def test_layers_of_one_list_and_class_are_joined_until_they_have_the_bytes():
    left, right = ([f"{side}.{index}" for index in range(3)] for side in ("left", "right"))
    layer = sum(p.nbytes for p in Block().parameters())
    assert grouped(TwoStreams(), 0) == [[name] for name in left + right]
    assert grouped(TwoStreams(), layer) == [[name] for name in left + right]
    assert grouped(TwoStreams(), layer + 1) == [left[:2], left[2:], right[:2], right[2:]]
    assert grouped(TwoStreams(), 10**9) == [left, right]


def test_layers_of_several_classes_are_not_joined():
    model = bert()
    assert [len(names) for names in grouped(model, 10**9)] == [1, 3]  # the embeddings, and the layers


def test_bytes_are_checked():
    assert ZeroConfig(stage=3, unit_bytes="16MiB").unit_bytes == 16 * 2**20
    assert ZeroConfig(stage=3, unit_bytes=0).unit_bytes == 0
    with pytest.raises(ConfigError, match=r"`unit_bytes`.*or 0"):
        ZeroConfig(stage=3, unit_bytes=-1)
