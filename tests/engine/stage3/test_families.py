"""Stage 3 follows DDP on the model families people train, each gathered a layer at a time."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from cells import slow
from ddp_outcomes import assert_bitwise, assert_close, checkpoint_activations
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Answer, Job, fused_adamw
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
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
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from hf_zero.config import ConfigError
from hf_zero.engine.bucketing import find_unit_modules, own_parameters
from hf_zero.engine.engine import ZeroEngine

pytestmark = pytest.mark.timeout(180)

RESHARDED = {"stage": 3, "bucket_bytes": "20KiB"}
KEPT = {"stage": 3, "reshard_after_forward": False}
LOCAL = {"stage": 3, "bucket_bytes": "20KiB", "grad_accumulation": "local"}

VOCABULARY = 97
LENGTH = 12
CLASSES = 3
IMAGE = 16

# ---- models ----

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


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**ENCODER))


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


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": LENGTH}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


def gpt_neo() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 60}
    attention = {"attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": LENGTH}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, **attention, bos_token_id=0, eos_token_id=0))


def bloom() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    return BloomForCausalLM(BloomConfig(**sizes, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=LENGTH))


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 60, "num_layers": 3}
    return T5ForConditionalGeneration(
        T5Config(**sizes, num_decoder_layers=2, dropout_rate=0.0, decoder_start_token_id=0)
    )


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


# ---- batches ----


def texts(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(0, CLASSES, (size,), generator=generator)}


def tokens(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


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


JOBS = {
    name: Job(make_model=model, make_batch=batch, steps=2)
    for name, model, batch in [
        ("bert", bert, texts),
        ("roberta", roberta, texts),
        ("distilbert", distilbert, texts),
        ("gpt2", gpt2, tokens),
        ("t5", t5, translations),
        ("llama", llama, tokens),
        ("bert masked lm", bert_masked_lm, tokens),
        ("electra", electra, texts),
        ("deberta-v2", deberta, texts),
        ("gpt-neo", gpt_neo, tokens),
        ("bloom", bloom, tokens),
        ("albert", albert, texts),
        ("funnel", funnel, texts),
        ("vit", vit, images),
        ("resnet", ResNet, images),
    ]
} | {"wav2vec2": Job(make_model=wav2vec2, make_batch=sounds, steps=4, find_unused=True, max_norm=1e6)}


# Of kinds that are built alike, one is in the short run: Roberta and Electra are Berts, Bloom and GPT-Neo have GPT-2's units.
ALIKE = ("roberta", "bert masked lm", "electra", "gpt-neo", "bloom")


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        *((name, [RESHARDED, KEPT] if name in ("bert", "t5") else [RESHARDED]) for name in JOBS if name not in ALIKE),
        *(slow(name, [RESHARDED, KEPT], id=f"{name}-both") for name in JOBS),
    ],
)
@pytest.mark.short_cells(
    "bert-variants0", "gpt2-variants2", "t5-variants3", "llama-variants4", "vit-variants8", "wav2vec2-variants10"
)
def test_family_is_bitwise(name, variants):
    assert_bitwise(replace(JOBS[name], max_norm=JOBS[name].max_norm or 100.0), variants)


# In the short run; test_equivalence.py has GPT-2.
CHECKPOINTED = {
    "bert": (False,),
    "roberta": (),
    "distilbert": (),
    "gpt2": (),
    "t5": (True,),
    "llama": (),
}


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        pytest.param(
            name,
            reentrant,
            id=f"{name}-{'reentrant' if reentrant else 'non-reentrant'}",
            marks=[] if reentrant in short else pytest.mark.slow,
        )
        for name, short in CHECKPOINTED.items()
        for reentrant in (False, True)
    ],
)
@pytest.mark.short_cells("bert-non-reentrant")
def test_family_with_activation_checkpointing_is_bitwise(name, reentrant):
    checkpointing = partial(checkpoint_activations, reentrant=reentrant)
    assert_bitwise(replace(JOBS[name], prepare=checkpointing, max_norm=100.0), [RESHARDED, KEPT])


@pytest.mark.parametrize(
    ("span", "reentrant"),
    [(1, False), (2, True), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1, True), (2, False)))],
)
@pytest.mark.short_cells("2-True")
def test_checkpoints_around_calls_of_layers_are_bitwise(span, reentrant):
    job = Job(make_model=Stack, make_batch=texts, model_arguments={"span": span, "reentrant": reentrant}, steps=2)
    assert_bitwise(job, [RESHARDED, KEPT, {**RESHARDED, "prefetch_units": 0}])


@pytest.mark.parametrize(
    ("into_input", "frozen"),
    [(False, False), (False, True), (True, True)],
    ids=["into what a layer returned", "into what a frozen layer returned", "into a frozen layer's input"],
)
def test_residuals_added_in_place_are_bitwise(into_input, frozen):
    arguments = {"into_input": into_input, "frozen": frozen}
    job = Job(make_model=InPlace, make_batch=texts, model_arguments=arguments, steps=2)
    assert_bitwise(job, [RESHARDED, KEPT, {**RESHARDED, "prefetch_units": 0}])


@pytest.mark.parametrize("layers_a_group", [slow(1), 2], ids=["one layer", "two layers in turn"])
def test_layers_used_many_times_are_bitwise_as_units(layers_a_group):
    job = replace(JOBS["albert"], model_arguments={"layers_a_group": layers_a_group}, max_norm=100.0)
    assert_bitwise(job, [{**settings, "unit_modules": "AlbertLayer"} for settings in (RESHARDED, KEPT)])


@pytest.mark.parametrize(
    ("name", "prepare"),
    [("llama", None), slow("t5", checkpoint_activations), slow("t5", None), slow("llama", checkpoint_activations)],
)
def test_any_number_of_units_ahead_is_bitwise(name, prepare):
    job = replace(JOBS[name], prepare=prepare and partial(prepare, reentrant=True))
    assert_bitwise(job, [{**RESHARDED, "prefetch_units": ahead} for ahead in (0, 3, 100)])


@pytest.mark.parametrize("name", ["t5", slow("llama")])
def test_local_accumulation_is_bitwise(name):
    assert_bitwise(replace(JOBS[name], accumulation=2), [LOCAL])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        slow("t5", {"accumulation": 2}),
        ("llama", {"max_norm": 0.3}),
        slow("t5", {"max_norm": 0.3}),
        slow("llama", {"accumulation": 2}),
    ],
)
def test_accumulation_and_clip_are_close(name, change):
    assert_close(replace(JOBS[name], **change), [RESHARDED, KEPT])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"), [("t5", 3), slow("llama", 3), slow("t5", 4), slow("llama", 4)])
def test_more_ranks_are_close(name, world_size):
    assert_close(replace(JOBS[name], accumulation=2, max_norm=0.3), [RESHARDED, KEPT], world_size)


def gathered_at_most(rank: int, world_size: int, names: list[str]) -> dict[str, tuple[int, list[int], int]]:
    """Family → bytes gathered at a time, those that each layer takes, and those of the root."""
    found = {}
    for name in names:
        model = JOBS[name].make_model()
        optimizer = fused_adamw(model)
        engine = ZeroEngine(model, [optimizer], {"stage": 3, "prefetch_units": 1})
        for step in range(3):
            model(**JOBS[name].make_batch(torch.Generator().manual_seed(step), 2)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        root, *layers = engine.sharded.schedule.units
        sizes = [layer.passing_bytes for layer in layers]
        found[name] = engine.sharded.schedule.peak_bytes, sizes, root.passing_bytes
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
    (found, _) = run_ranks(gathered_at_most, world_size=2, time_limit_s=100, keyword_arguments={"names": names})
    for name, (peak, layers, root) in found.items():
        assert peak <= root + sum(sorted(layers)[-2:]) < root + sum(layers), name


# ---- which modules are units ----

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


@pytest.mark.parametrize("name", JOBS)
def test_layers_are_units(name):
    units = find_unit_modules(JOBS[name].make_model(), "auto")
    assert Counter(type(module).__name__ for _, module in units) == UNITS[name]


@pytest.mark.parametrize("name", JOBS)
def test_each_unit_owns_what_lies_in_it_but_for_the_tied_weight(name):
    model = JOBS[name].make_model()
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
    model = JOBS[name].make_model()
    own = own_parameters(model, find_unit_modules(model, "auto"))
    assert model.get_output_embeddings().weight is model.get_parameter(TIED[name])
    assert TIED[name] in dict(own[""])


def test_named_unit_modules_are_bitwise():
    assert_bitwise(JOBS["t5"], [{**RESHARDED, "unit_modules": ["T5Block"]}, {**KEPT, "unit_modules": "T5Stack"}])


def refusal_of_unit_modules(rank: int, world_size: int, names: list[str]) -> str:
    model = t5()
    try:
        ZeroEngine(model, [fused_adamw(model)], {"stage": 3, "unit_modules": names})
    except ConfigError as error:
        return str(error)
    return "no error"


def test_unknown_unit_module_is_refused_by_naming_the_known_ones():
    arguments = {"names": ["T5Blok"]}
    for message in run_ranks(refusal_of_unit_modules, world_size=2, time_limit_s=60, keyword_arguments=arguments):
        assert "`unit_modules` is ['T5Blok']" in message
        assert "T5Block, " in message and "T5Stack" in message
