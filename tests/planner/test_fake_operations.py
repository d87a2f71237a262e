"""A trace that repeats known results of operations finds what a trace finds in which torch infers each result."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from training import LENGTH, VOCABULARY, bert, gpt2, llama

from hf_zero.forecast.fit import PlanError
from hf_zero.forecast.peak import Activations
from hf_zero.planner.batches import batch_of
from hf_zero.planner.fake_operations import FakeOperations
from hf_zero.planner.trace import trace

pytestmark = pytest.mark.timeout(150)

TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def t5(dropout: float) -> nn.Module:
    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 52, "num_layers": 3, "num_heads": 4, "dropout_rate": dropout}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, **TOKENS, decoder_start_token_id=0, use_cache=False)
    )


def vit(dropout: float) -> nn.Module:
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 52}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=8, patch_size=4, hidden_dropout_prob=dropout)
    )


def experts(dropout: float) -> nn.Module:
    sizes = {"hidden_size": 24, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, **TOKENS, num_key_value_heads=2, num_local_experts=4)
    )


def layer_of_another_width(dropout: float) -> nn.Module:
    model = gpt2(dropout)
    model.transformer.h[1].mlp = transformers.models.gpt2.modeling_gpt2.GPT2MLP(40, model.config)
    return model


def layer_of_another_dtype(dropout: float) -> nn.Module:
    model = gpt2(dropout)
    layer = model.transformer.h[1].mlp.to(torch.float64)
    forward = type(layer).forward
    layer.forward = lambda states: forward(layer, states.double()).float()
    return model


def layer_of_another_flag(dropout: float) -> nn.Module:
    """Two flags: one layer scales attention by its number, one is frozen, and one drops nothing."""
    model = gpt2(dropout)
    model.transformer.h[1].attn.scale_attn_by_inverse_layer_idx = True
    model.transformer.h[1].attn.scaling = 0.5
    model.transformer.h[0].requires_grad_(False)
    model.transformer.h[2].mlp.dropout.p = 0.0
    return model


def transposed_weight(dropout: float) -> nn.Module:
    """A layer whose weight has the same sizes as another layer's, and other strides."""
    model = gpt2(dropout)
    weight = model.transformer.h[1].attn.c_proj.weight
    weight.data = weight.data.t().contiguous().t()
    return model


class Awkward(nn.Module):
    """Operations that return arguments, constants, several results, none at all, complex values, or write to an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12).double(), nn.Linear(12, 12)])
        self.convolutions = nn.ModuleList([nn.Conv1d(3, 3, 3, padding=1) for _ in range(2)])
        self.rows = nn.Parameter(torch.ones(12, 3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = input_ids.float()
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden.to(layer.weight.dtype)).to(torch.float32 if number % 2 else torch.float64)
            hidden = hidden.float().contiguous() * torch.tensor(2.0)
            values, _ = hidden.topk(2, dim=-1)
            first, second = hidden.chunk(2, dim=-1)
            hidden = torch.cat([second, first], -1) + values.sum() + torch.fft.rfft(hidden).abs().mean()
            hidden.add_(int(torch.tensor(number) + 1)).relu_()
            hidden = hidden.t().contiguous().t() if number == 1 else hidden
            hidden = hidden + torch.where(hidden > 0, 1, 1.0) + torch.full((12,), True) + torch.full((12,), 1)
        wide = hidden @ self.rows
        for convolution in self.convolutions:
            wide = wide + convolution(wide[None].transpose(1, 2)).transpose(1, 2)[0]
        return wide.sum() + torch.std_mean(hidden, 0)[0].sum() + torch.ones(()).expand(3).sum()


def awkward(dropout: float) -> nn.Module:
    return Awkward()


MODELS = {
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "t5": t5,
    "vit": vit,
    "experts": experts,
    "another width": layer_of_another_width,
    "another dtype": layer_of_another_dtype,
    "another flag": layer_of_another_flag,
    "transposed": transposed_weight,
    "awkward": awkward,
}


def traced(name: str, rows: int, length: int, **how: object) -> Activations | str:
    """The trace of a model, or the error that says why there is none."""
    attention = how.pop("attention")
    model = MODELS[name](how.pop("dropout"))
    if attention == "eager" and isinstance(model, transformers.PreTrainedModel):
        model.set_attn_implementation("eager")

    def batch() -> dict:
        return {"input_ids": torch.ones(rows, 12)} if name == "awkward" else batch_of(model, rows, length)

    try:
        return trace(model, batch, shape="", tokens=rows * length, **how)
    except PlanError as error:
        return str(error)


def with_torch_alone(self, func, args, kwargs):
    return func(*args, **kwargs)


ways = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "length": st.sampled_from([1, 7, LENGTH]),
        "autocast": st.sampled_from([None, torch.bfloat16, torch.float16]),
        "param_dtype": st.sampled_from(["auto", "bfloat16"]),
        "recomputes": st.booleans(),
        "dropout": st.sampled_from([0.0, 0.1]),
        "attention": st.sampled_from(["sdpa", "eager"]),
    }
)


@pytest.mark.short_cells("another flag", "awkward")
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=5)
@given(how=ways)
def test_a_trace_finds_the_same_if_torch_infers_each_result(name, how):
    found = traced(name, **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeOperations, "run", with_torch_alone)
        assert traced(name, **how) == found


@pytest.mark.parametrize("name", MODELS)
def test_each_result_is_the_one_that_torch_infers(name, monkeypatch):
    """Also what no figure of a forecast depends on: shapes, strides, dtypes, devices, and which results share a storage."""
    run = FakeOperations.run

    def compared(self, func, args, kwargs):
        if func._schema.is_mutable:
            return run(self, func, args, kwargs)
        expected, found = func(*args, **kwargs), run(self, func, args, kwargs)
        assert described(found, args) == described(expected, args), func
        return found

    monkeypatch.setattr(FakeOperations, "run", compared)
    found = traced(name, 2, LENGTH, dropout=0.1, attention="sdpa", autocast=torch.bfloat16)
    assert name == "experts" or isinstance(found, Activations), found


def described(result: object, args: tuple) -> object:
    if isinstance(result, list | tuple):
        return type(result), [described(each, args) for each in result]
    if not isinstance(result, torch.Tensor):
        return type(result), result
    storage = result.untyped_storage()
    shared = [at for at, each in enumerate(args) if torch.is_tensor(each) and each.untyped_storage() is storage]
    shape = result.shape, result.stride(), result.storage_offset(), result.dtype, result.device, result.layout
    return *shape, type(result), result.requires_grad, result.is_conj(), storage.nbytes(), shared


def test_torch_infers_no_more_results_in_more_layers(monkeypatch):
    kinds = []
    for layers in (3, 9):
        operations = []
        start = FakeOperations.__init__

        def kept(self, mode, start=start, operations=operations):
            start(self, mode)
            operations.append(self)

        monkeypatch.setattr(FakeOperations, "__init__", kept)
        model = gpt2(layers=layers)
        trace(model, lambda model=model: batch_of(model, 2, LENGTH), shape="", tokens=2 * LENGTH)
        kinds.append(len(operations[0]._known))
        monkeypatch.undo()
    assert kinds[0] == kinds[1] > 20
