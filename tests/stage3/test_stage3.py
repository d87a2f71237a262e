"""Stage 3: everything people do with a model still works while each rank holds only a shard of its parameters."""

import copy
import gc
import itertools
import pickle
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
from cells import slow
from shared_ranks import on_ranks, on_shared_ranks, run_on_ranks, shared_ranks
from stage3_runs import (
    FAR_AHEAD,
    KEPT,
    NOT_AHEAD,
    SHARDED,
    WIDTH,
    Block,
    Run,
    assert_equal,
    assert_same,
    no_unit_is_whole,
    same_as_ddp,
)
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from training import VOCABULARY, Answer, bert, bert_batch, checkpoint_activations, gpt2, gpt2_batch
from transformers import GenerationConfig
from transformers.integrations.fsdp import is_fsdp_managed_module

import hf_zero
from hf_zero.allocation import Reservation, ResizedReservation
from hf_zero.buckets import gathered_memory
from hf_zero.engine.engine import ZeroEngine
from hf_zero.hooks.mixins import mix_in
from hf_zero.hooks.weak import engine_attached_to
from hf_zero.stage3.evaluation_dtype import computing_in

pytestmark = pytest.mark.timeout(120)
# In the short run, `test_no_setting_changes_a_digit` has the others alone.
EVERY = [SHARDED, KEPT, NOT_AHEAD, FAR_AHEAD]
some_variants_or_every = pytest.mark.parametrize("variants", [EVERY[:2], slow(EVERY)], ids=["some", "every"])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def gathered_bytes(engine: ZeroEngine) -> int:
    return engine.comm_report().bytes_by_verb().get("all-gather", 0)


# ---- generate ----


def talkative(config_class, model_class, **sizes) -> nn.Module:
    """A random model whose next token is not always the same one."""
    ids = {"vocab_size": VOCABULARY, "bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    model = model_class(config_class(**ids, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.eval()


def talkative_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return talkative(GPT2Config, GPT2LMHeadModel, n_embd=32, n_layer=3, n_head=4, n_positions=32)


def talkative_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return talkative(T5Config, T5ForConditionalGeneration, **sizes)


def generates(rank: int, world_size: int, make) -> list[int]:
    torch.manual_seed(0)
    whole, model = make(), make()
    model.load_state_dict(whole.state_dict())
    optimizer = sgd(model)
    engine = ZeroEngine(model, [optimizer], SHARDED)
    prompt = torch.randint(2, VOCABULARY, (1, 3 + 4 * rank), generator=torch.Generator().manual_seed(rank))
    lengths = []
    for beams in (1, 3):
        options = {
            "max_new_tokens": 9,
            "num_beams": beams,
            "do_sample": False,
            "attention_mask": torch.ones_like(prompt),
        }
        free = whole.generate(prompt, eos_token_id=None, **options)
        # Each rank stops at a token of its own: rank 0 early, rank 1 late.
        options["eos_token_id"] = int(free[0, -2 - 5 * (1 - rank)])
        expected = whole.generate(prompt, **options)
        sent = gathered_bytes(engine)
        assert torch.equal(model.generate(prompt, **options), expected)
        assert gathered_bytes(engine) > sent
        # As Seq2SeqTrainer does: it asks the model for a mark, and gives what it finds.
        assert torch.equal(model.generate(prompt, synced_gpus=False, **options), expected)
        with hf_zero.unsharded(model):
            sent = gathered_bytes(engine)
            assert torch.equal(model.generate(prompt, **options), expected)
            assert gathered_bytes(engine) == sent
            # Whole, no rank needs another one.
            assert rank == 0 or torch.equal(model.generate(prompt, **options), expected)
        assert no_unit_is_whole(engine)
        lengths.append(expected.shape[1] - (prompt.shape[1] if make is talkative_gpt2 else 1))
    return lengths


@pytest.mark.slow
@pytest.mark.parametrize("make", [talkative_gpt2, slow(talkative_t5)])
def test_generate_gives_the_whole_models_tokens_where_ranks_stop_at_different_lengths(make):
    lengths = run_on_ranks(generates, make=make)
    assert all(early != late for early, late in zip(*lengths)), lengths


def own_way(model: nn.Module, inputs: torch.Tensor, **options) -> torch.Tensor:
    """As `custom_generate` of a repository on the Hub, which from_pretrained puts in the place of the class's."""
    return type(model).generate(model, inputs, **options)


class Marks(nn.Module):
    """Reads transformers' mark where the models that drop layers read it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.seen: list[bool] = []

    def forward(self, *args, **kwargs):
        self.seen.append(is_fsdp_managed_module(self))
        return self.layer(*args, **kwargs)


@on_ranks(2)
def test_a_way_of_its_own_to_generate_waits_for_all_ranks_and_no_layer_is_marked(rank, world_size):
    torch.manual_seed(0)
    model = talkative_gpt2()
    model.transformer.h[1] = Marks(model.transformer.h[1])
    own = model.generate = partial(own_way, model)
    optimizer = sgd(model)
    engine = ZeroEngine(model, [optimizer], SHARDED)
    prompt = torch.randint(2, VOCABULARY, (1, 3 + 4 * rank), generator=torch.Generator().manual_seed(rank))
    tokens = model.generate(prompt, max_new_tokens=2 + 3 * rank, do_sample=False, eos_token_id=None, use_cache=False)
    assert tokens.shape[1] == prompt.shape[1] + 2 + 3 * rank
    assert not any(model.transformer.h[1].seen)
    assert not any(is_fsdp_managed_module(module) for module in model.modules())
    engine.close()
    assert model.generate is own


@on_ranks(2)
def test_a_static_cache_compiles_no_forward_that_gathers(rank, world_size):
    model, asked = talkative_gpt2(), []
    engine = ZeroEngine(model, [sgd(model)], SHARDED)
    compiles = model._valid_auto_compile_criteria

    def asking(model_kwargs: dict, generation_config: GenerationConfig) -> bool:
        asked.append(generation_config.disable_compile)
        return compiles(model_kwargs, generation_config)

    model._valid_auto_compile_criteria = asking
    model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2, cache_implementation="static")
    assert asked == [True]
    engine.close()
    model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2, cache_implementation="static")
    assert asked[0] and not asked[1]


# ---- evaluation ----


def evaluating_between_steps(run: Run) -> None:
    for step in range(3):
        run.step()
        for _ in range(step):
            run.seen.append(run.evaluate())
    run.seen.append(run.evaluate())


@pytest.mark.short_cells("gpt2-some")
@some_variants_or_every
@pytest.mark.parametrize("make", [gpt2, bert])
def test_evaluation_between_steps_sees_the_whole_model_and_disturbs_nothing(make, variants):
    shared_ranks.run(
        same_as_ddp,
        script=evaluating_between_steps,
        variants=variants,
        make=partial(make, dropout=0.1),
        make_batch=bert_batch if make is bert else gpt2_batch,
    )


def predicting(run: Run) -> None:
    run.step()
    run.model.eval()
    with torch.inference_mode():
        run.seen.append(run.model(**run.batch()).logits.clone())
    run.model.train()
    run.step()


def test_inference_mode_is_as_good_as_no_grad():
    shared_ranks.run(same_as_ddp, script=predicting, variants=[SHARDED, KEPT], make=gpt2)


# ---- PEFT ----


def with_lora(make, checkpointing: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    base = make()
    if checkpointing != "none":
        kwargs = {"use_reentrant": checkpointing == "reentrant"}
        checkpoint_activations(base, kwargs)
        base.enable_input_require_grads()
        assert any(getattr(module, "gradient_checkpointing", False) for module in base.modules())
    is_gpt2 = make is gpt2
    config = LoraConfig(
        r=4,
        target_modules=["c_attn"] if is_gpt2 else ["query", "value"],
        modules_to_save=None if is_gpt2 else ["classifier"],
        fan_in_fan_out=is_gpt2,
        lora_dropout=0.1,
        init_lora_weights=False,
    )
    return get_peft_model(base, config)


def adapting(run: Run) -> None:
    for _ in range(2):
        run.step()
    with run.model.disable_adapter():
        run.seen.append(run.evaluate())
    for change in (run.model.merge_adapter, run.model.unmerge_adapter):
        with hf_zero.gathered(run.model, writeback=True):
            change()
        run.seen.append(run.evaluate())
    for _ in range(2):
        run.step()


def assert_base_is_only_a_shard(run: Run) -> None:
    frozen = [p for p in run.model.parameters() if not p.requires_grad]
    assert all(p in run.engine.sharded.unit_of for p in frozen)
    rows = {row.kind: row.bytes for row in run.engine.memory_report().rows}
    buffers = sum(buffer.nbytes for buffer in run.model.buffers())
    buckets = {run.engine.sharded.unit_of[p][1].bucket for p in frozen}
    half = sum(bucket.layout.numel for bucket in buckets) * 4 // 2
    assert rows["frozen parameters and buffers"] == half + buffers <= 1.1 * sum(p.nbytes for p in frozen) / 2 + buffers
    trained = sum(bucket.layout.numel for bucket in run.engine.buckets) * 4
    assert rows["gradients"] <= trained // 2 and rows["gradient buffers"] <= trained
    trained_numel = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    everyones = sum(run.engine.transport.exchange(rows["optimizer state"]))
    assert everyones == 2 * 4 * trained_numel
    assert not any(p in run.optimizer.state for p in frozen)
    assert all(p.grad is None for p in frozen)


IN_EVERY_WAY = {checkpointing: [SHARDED, KEPT] for checkpointing in ("none", "reentrant", "non-reentrant")}


@pytest.mark.parametrize(
    ("make", "ways"),
    [
        pytest.param(gpt2, {"none": [SHARDED], "reentrant": [KEPT]}, id="gpt2-some"),
        slow(gpt2, IN_EVERY_WAY, id="gpt2-every"),
        slow(bert, IN_EVERY_WAY, id="bert-every"),
    ],
)
@on_ranks(2)
def test_lora_trains_over_a_sharded_frozen_base_and_its_adapter_reloads(rank, world_size, make, ways):
    from peft import PeftModel, get_peft_model_state_dict

    make_batch = bert_batch if make is bert else gpt2_batch
    for checkpointing, variants in ways.items():
        prepared = partial(with_lora, make, checkpointing)
        ddp, *sharded = (Run(rank, prepared, settings, make_batch=make_batch) for settings in (None, *variants))
        for run in (ddp, *sharded):
            torch.manual_seed(1000 + rank)
            adapting(run)
        for run in sharded:
            assert_same(run, ddp, f"checkpointing: {checkpointing}")
            assert_base_is_only_a_shard(run)
            with tempfile.TemporaryDirectory() as folder:
                run.model.save_pretrained(folder)
                torch.manual_seed(0)
                reloaded = PeftModel.from_pretrained(make(), folder)
            assert_equal(get_peft_model_state_dict(reloaded), get_peft_model_state_dict(ddp.model))


# ---- looking and editing ----


def parameters_of(target) -> set[nn.Parameter]:
    return (
        {target}
        if isinstance(target, nn.Parameter)
        else set(target.parameters() if isinstance(target, nn.Module) else target)
    )


@on_ranks(2)
def test_gathered_shows_whole_values_at_every_stage_and_without_an_engine(rank, world_size):
    variants = [{**SHARDED, "stage": 0}, {**SHARDED, "stage": 1}, {**SHARDED, "stage": 2}, SHARDED, KEPT]
    ddp, *runs = (Run(rank, gpt2, settings) for settings in (None, *variants))
    for run in (ddp, *runs):
        run.step()
    expected = dict(ddp.model.named_parameters())
    for run in (ddp, *runs):
        transformer = run.model.transformer
        for target in (transformer.wte.weight, transformer.h[1], list(transformer.h[2].parameters()), run.model):
            wanted = [name for name, p in run.model.named_parameters() if p in parameters_of(target)]
            with hf_zero.gathered(target):
                found = dict(run.model.named_parameters())
                assert_equal({name: found[name] for name in wanted}, {name: expected[name] for name in wanted})
    for run in (ddp, *runs):
        run.step()
        assert_same(run, ddp)


# Each edit leaves `values` in the parameters of a module; it is called on every rank.


def edit_on_all_ranks(rank: int, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with hf_zero.gathered(module, writeback=True), torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name] + rank)


def edit_on_rank_0(rank: int, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with hf_zero.gathered(module, writeback=True), torch.no_grad():
        for name, parameter in module.named_parameters() if rank == 0 else ():
            parameter.copy_(values[name])


def edit_data(rank: int, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with hf_zero.gathered(module, writeback=True):
        for name, parameter in module.named_parameters():
            parameter.data.copy_(values[name])


def replace_data(rank: int, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with hf_zero.gathered(module, writeback=True):
        for name, parameter in module.named_parameters():
            # Laid out in another order, where there are orders.
            parameter.data = (values[name] + rank).t().contiguous().t() if parameter.dim() == 2 else values[name] + rank


def replace_on_rank_0_and_save(rank: int, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with hf_zero.gathered(module), hf_zero.gathered(module, writeback=True):
        if rank == 0:
            for name, parameter in module.named_parameters():
                parameter.data = values[name].clone()
            assert_equal(module.state_dict(), values)


def set_storage(rank: int, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with hf_zero.gathered(module, writeback=True), torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.set_(values[name].clone())


def fill_from_vector(rank: int, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with hf_zero.gathered(module, writeback=True):
        vector = torch.cat([values[name].flatten() for name, _ in module.named_parameters()])
        nn.utils.vector_to_parameters(vector, module.parameters())


def exchange_data(rank: int, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    alike: dict[torch.Size, list[str]] = {}
    for name, parameter in module.named_parameters():
        alike.setdefault(parameter.shape, []).append(name)
    others = {name: each[place - 1] for each in alike.values() for place, name in enumerate(each)}
    edit_data(rank, module, {name: values[other] for name, other in others.items()})
    with hf_zero.gathered(module, writeback=True):
        found = dict(module.named_parameters())
        taken = {others[name]: parameter.data for name, parameter in found.items()}
        for name, parameter in found.items():
            parameter.data = taken[name]


def load_strictly(rank: int, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(values)


def load_what_is_there(rank: int, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    left_out = next(name for name in values if name.endswith("attn.c_proj.bias"))
    kept = {name: value for name, value in values.items() if name != left_out}
    with pytest.raises(RuntimeError, match=r"Missing key.*attn\.c_proj\.bias"):
        module.load_state_dict(kept)
    found = module.load_state_dict({**kept, "stranger": torch.zeros(1)}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == ([left_out], ["stranger"])
    module.load_state_dict({left_out: values[left_out]}, strict=False)


REPLACED = [replace_data, replace_on_rank_0_and_save, set_storage, fill_from_vector, exchange_data]
GATHERED_EDITS = [edit_on_all_ranks, edit_on_rank_0, edit_data, *REPLACED]
EDITS = [*GATHERED_EDITS, load_strictly, load_what_is_there]


def whole_model(model: nn.Module) -> nn.Module:
    return model


def second_block(model: nn.Module) -> nn.Module:
    return model.transformer.h[1]


def values_for(module: nn.Module) -> dict[str, torch.Tensor]:
    """A new state dict of the module, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    values = {}
    for name, value in module.state_dict().items():
        tied = name == "lm_head.weight"
        fresh = values["transformer.wte.weight"] if tied else torch.randn(value.shape, generator=generator) * 0.05
        values[name] = fresh.to(value.dtype)
    return values


def prepared_with(part: Callable[[nn.Module], nn.Module] | None, dtype: torch.dtype) -> nn.Module:
    model = gpt2().to(dtype)
    if part is not None:
        part(model).load_state_dict(values_for(part(model)))
    return model


def goes_on_from(rank: int, world_size: int, edits: list, cells: list[tuple]) -> list[str]:
    """Of each edit, how training after it differs from a run that began with the edited weights: "" where it does not."""
    found = [""] * len(edits)
    for settings, dtype, part in cells:
        begun = Run(rank, partial(prepared_with, part, dtype), settings)
        values = values_for(part(begun.model))
        begun.evaluate()
        begun.step()
        begun.step()
        for number, edit in enumerate(edits):
            edited = Run(rank, partial(prepared_with, None, dtype), settings)
            edited.evaluate()
            edit(rank, part(edited.model), values)
            edited.step()
            edited.step()
            total = sum(value.double().sum().item() for value in edited.state().values())
            if len(set(edited.engine.transport.exchange(total))) != 1:
                found[number] += f"ranks differ with {settings} in {dtype}, {part.__name__}\n"
            try:
                assert_same(edited, begun, f"{settings} in {dtype}, {part.__name__}")
            except AssertionError as error:
                found[number] += f"{error}\n"
    return found


# Settings, dtype, and what is edited.
DTYPES, PARTS = (torch.float32, torch.bfloat16), (whole_model, second_block)
EDITED = [(SHARDED, torch.float32, second_block), (SHARDED, torch.bfloat16, whole_model)]
BELOW_3 = [{**SHARDED, "stage": stage} for stage in (0, 1, 2)]
EDITED_BELOW_3 = [(settings, torch.bfloat16, PARTS[settings["stage"] % 2]) for settings in BELOW_3]


@pytest.fixture(
    scope="module", params=[EDITED, slow(list(itertools.product([SHARDED], DTYPES, PARTS)))], ids=["some", "every"]
)
def after_edits(request) -> dict[Callable, list[str]]:
    """Edit → what each rank found."""
    return dict(zip(EDITS, zip(*run_on_ranks(goes_on_from, edits=EDITS, cells=request.param))))


@pytest.mark.parametrize("edit", EDITS)
def test_training_goes_on_from_edited_weights_as_if_it_had_begun_there(edit, after_edits):
    assert set(after_edits[edit]) == {""}


@pytest.fixture(
    scope="module",
    params=[EDITED_BELOW_3, slow(list(itertools.product(BELOW_3, DTYPES[1:], PARTS)))],
    ids=["some", "every"],
)
def after_edits_below_stage_3(request) -> dict[Callable, list[str]]:
    found = run_on_ranks(goes_on_from, edits=GATHERED_EDITS, cells=request.param)
    return dict(zip(GATHERED_EDITS, zip(*found)))


@pytest.mark.slow
@pytest.mark.parametrize("edit", GATHERED_EDITS)
def test_gathered_edits_are_kept_below_stage_3_too(edit, after_edits_below_stage_3):
    assert set(after_edits_below_stage_3[edit]) == {""}


def looking_and_editing_inside_unsharded(run: Run) -> None:
    run.step()
    weight = run.model.transformer.ln_f.weight
    with hf_zero.unsharded(run.model):
        if torch.distributed.get_rank() == 0:
            run.seen += list(run.state().values())
            # Whole, the model runs on one rank alone.
            run.evaluate()
        with hf_zero.gathered(weight, writeback=True), torch.no_grad():
            weight.mul_(0.5)
        run.seen.append(run.evaluate())
    run.step()


def test_unsharded_lets_one_rank_save_and_gathered_edit_inside_it():
    shared_ranks.run(same_as_ddp, script=looking_and_editing_inside_unsharded, variants=[SHARDED, KEPT], make=gpt2)


def test_gathered_and_unsharded_do_nothing_to_a_model_that_is_not_prepared():
    model = gpt2()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    storages = {name: value.data_ptr() for name, value in model.state_dict().items()}
    with hf_zero.gathered(model, writeback=True), torch.no_grad():
        model.transformer.ln_f.weight.fill_(2.0)
        expected["transformer.ln_f.weight"].fill_(2.0)
    with hf_zero.unsharded(model), hf_zero.gathered(model.transformer.ln_f.weight):
        assert_equal(model.state_dict(), expected)
    assert_equal(model.state_dict(), expected)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == storages
    assert_nothing_is_left_in(model, gpt2())


# ---- the way out ----


def closes(rank: int, world_size: int, rank0_only: bool) -> None:
    run = Run(rank, gpt2, SHARDED)
    run.step()
    run.step()
    expected = run.state()
    memories = [weakref.ref(bucket.memory) for unit in run.engine.sharded.schedule.units for bucket in unit.buckets]
    run.engine.close(rank0_only=rank0_only)
    model, untouched = run.model, gpt2()
    assert engine_attached_to(model) is None
    assert_nothing_is_left_in(model, untouched)
    assert list(model.state_dict()) == list(expected)
    if rank0_only and rank > 0:
        assert all(p.is_meta for p in model.parameters())
    else:
        for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_equal(other.state_dict(), expected)
            other(**run.batch()).loss.backward()
            assert all(type(p.grad) is torch.Tensor for p in other.parameters())
    run.engine = run.optimizer = run.no_sync = None
    gc.collect()
    assert not any(memory() for memory in memories), "the shards are still held"
    assert model.lm_head.weight is model.transformer.wte.weight


def assert_nothing_is_left_in(model: nn.Module, untouched: nn.Module) -> None:
    for (name, module), other in zip(model.named_modules(), untouched.modules()):
        assert vars(module).keys() == vars(other).keys(), name
        assert type(module._parameters) is dict, name
        for hooks in (
            "_forward_hooks",
            "_forward_pre_hooks",
            "_forward_hooks_always_called",
            "_forward_hooks_with_kwargs",
        ):
            assert not getattr(module, hooks), f"{name}.{hooks}"
    for name, parameter in model.named_parameters():
        assert not vars(parameter), name
        assert not parameter._post_accumulate_grad_hooks, name


@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.short_cells("False")
def test_a_closed_engine_hands_back_an_ordinary_whole_model(rank0_only):
    run_on_ranks(closes, rank0_only=rank0_only)


# ---- settings: what travels, what is held ----


def three_steps(run: Run) -> None:
    for _ in range(3):
        run.step()


SETTINGS = [
    SHARDED,
    KEPT,
    {**SHARDED, "reshard_after_forward": "auto"},
    NOT_AHEAD,
    FAR_AHEAD,
    {**KEPT, "prefetch_units": 3},
    {"stage": 3, "prefetch_units": 0},
]


@pytest.mark.parametrize(
    ("make", "variants"),
    [(gpt2, SETTINGS[::3]), slow(gpt2, SETTINGS), slow(bert, SETTINGS)],
    ids=["gpt2", "gpt2-every", "bert-every"],
)
def test_no_setting_changes_a_digit(make, variants):
    make_batch = bert_batch if make is bert else gpt2_batch
    shared_ranks.run(same_as_ddp, script=three_steps, variants=variants, make=make, make_batch=make_batch)


def checkpointed_gpt2(reentrant: bool) -> nn.Module:
    model = gpt2()
    checkpoint_activations(model, {"use_reentrant": reentrant})
    return model


class CalledInACheckpoint:
    """A layer that is called inside of a reentrant checkpoint, hooks and all."""

    def __call__(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return checkpoint(partial(super().__call__, **kwargs), hidden, *args, use_reentrant=True)


def gpt2_called_in_checkpoints() -> nn.Module:
    model = gpt2()
    for layer in model.transformer.h:
        mix_in(layer, CalledInACheckpoint)
    return model


CHECKPOINTED = [(partial(checkpointed_gpt2, reentrant), SHARDED) for reentrant in (False, True)]
WEIGHED = [*CHECKPOINTED, (gpt2_called_in_checkpoints, SHARDED), *((gpt2, settings) for settings in SETTINGS)]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [(2, WEIGHED[1:5] + WEIGHED[7:8]), slow(2, WEIGHED), slow(3, WEIGHED)],
    ids=["2-some", "2-every", "3-every"],
)
@on_ranks()
def test_a_step_sends_the_formulas_bytes_and_holds_no_more_than_the_layers_in_use(rank, world_size, cases):
    for make, settings in cases:
        run = Run(rank, make, settings)
        schedule = run.engine.sharded.schedule
        root, *layers = (sum(bucket.flat.nbytes for bucket in unit.buckets) for unit in schedule.units)
        assert [unit.name for unit in schedule.units[1:]] == ["transformer.h.2", "transformer.h.1", "transformer.h.0"]
        ahead = settings.get("prefetch_units", 1)
        reduced = sum(bucket.flat.nbytes for bucket in run.engine.buckets)
        kept = reduced - root - sum(layers)
        for _ in range(3):
            # The last layer stays for its backward.
            again = sum(layers[1:]) if schedule.reshards_after_forward else 0
            before = run.engine.comm_report().bytes_by_verb()
            run.step()
            run.engine.finish_parameters()
            after = run.engine.comm_report().bytes_by_verb()
            sent = {verb: after[verb] - before.get(verb, 0) for verb in ("reduce-scatter", "all-gather")}
            share = (world_size - 1) / world_size
            assert sent == {
                "reduce-scatter": share * reduced,
                "all-gather": share * (kept + root + sum(layers) + again),
            }
            assert no_unit_is_whole(run.engine)
        passing_root, *passing = (unit.passing_bytes for unit in schedule.units)
        largest = sorted(passing, reverse=True)[: 1 + ahead] if schedule.reshards_after_forward else passing
        assert 0 < schedule.peak_bytes <= passing_root + sum(largest), settings


def resized(
    numel: int, dtype: torch.dtype, device: torch.device, kept: slice, *, separate_own: bool = False
) -> Reservation:
    return ResizedReservation(numel, dtype, kept, device)


@pytest.mark.slow
@on_ranks(2)
def test_memory_that_an_accelerators_allocator_takes_back_changes_nothing(rank, world_size):
    """Parameters given back by resizing their storage, and not page by page as on the host."""
    with mock.patch.object(gathered_memory, "reserve", resized):
        run = Run(rank, gpt2, SHARDED)
        assert not any(bucket.memory.flat.untyped_storage().nbytes() for bucket in run.engine.buckets)
        same_as_ddp(rank, world_size, evaluating_between_steps, [SHARDED, KEPT, NOT_AHEAD], make=gpt2)
        for reentrant in (False, True):
            make = partial(checkpointed_gpt2, reentrant)
            same_as_ddp(rank, world_size, evaluating_between_steps, [SHARDED, KEPT], make=make)
        assert goes_on_from(rank, world_size, [edit_on_rank_0], EDITED) == [""]
        closes(rank, world_size, rank0_only=False)


# ---- the schedule ----


class Wandering(nn.Module):
    """Leaves out its second layer in every other training step and runs its layers backwards in evaluation."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.steps = 0
        self.skips = True

    def forward(self, input_ids, labels) -> Answer:
        hidden = self.embed(input_ids)
        layers = list(self.layers)
        if not self.training:
            layers.reverse()
        elif torch.is_grad_enabled():
            self.steps += 1
            if self.steps % 2 and self.skips:
                del layers[1]
        for layer in layers:
            hidden = layer(hidden)
        self.logits = self.head(hidden)
        answer = Answer(nn.functional.cross_entropy(self.logits.flatten(0, 1), labels.flatten()))
        answer.logits = self.logits
        return answer


def wandering(run: Run) -> None:
    for step in range(6):
        run.step()
        if step % 3 == 1:
            run.seen.append(run.evaluate())


@pytest.mark.slow
def test_layers_that_change_their_order_between_steps_train_as_under_ddp():
    shared_ranks.run(same_as_ddp, script=wandering, variants=EVERY, make=Wandering, find_unused=True)


@on_ranks(2)
def test_the_next_layers_are_gathered_ahead_again_after_an_evaluation_in_another_order(rank, world_size):
    for count in (0, 1, 2):
        run = Run(rank, Wandering, {**SHARDED, "prefetch_units": count})
        run.model.skips = False
        units = {unit.name: unit for unit in run.engine.sharded.schedule.units}
        whole: list[list[int]] = []

        def note(units=units, whole=whole) -> None:
            whole.append([i for i in range(4) if not units[f"layers.{i}"].is_sharded])

        for layer in run.model.layers:
            layer.on_run = note
        # The next ones are there already, and those before have gone.
        ahead = [[i for i in range(at, at + 1 + count) if i < 4] for at in range(4)]
        for evaluates in (False, True):
            if evaluates:
                run.evaluate()
            run.step()
            whole.clear()
            run.step()
            assert whole == ahead, f"{count} ahead, after an evaluation: {evaluates}"


# ---- several models ----


@pytest.mark.parametrize("variants", [[SHARDED], slow([SHARDED, KEPT])], ids=["sharded", "kept, too"])
@on_shared_ranks
def test_a_frozen_sharded_teacher_distils_into_a_sharded_student(rank, world_size, variants):
    runs, teachers = [], []
    for settings in (None, *variants):
        torch.manual_seed(5)
        teacher = bert().eval().requires_grad_(False)
        if settings is not None:
            teachers.append(ZeroEngine(teacher, [], settings))
        run = Run(rank, bert, settings, make_batch=bert_batch)
        for _ in range(3):
            batch = run.batch()
            with torch.no_grad():
                wanted = teacher(**batch).logits
            loss = nn.functional.mse_loss(run.entry(**batch).logits, wanted)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.seen += [loss.item(), wanted]
        runs.append(run)
    for run in runs[1:]:
        assert_same(run, runs[0])
    assert no_unit_is_whole(teachers[0])
    for engine in teachers:
        rows = {row.kind: row.bytes for row in engine.memory_report().rows}
        assert [rows[kind] for kind in ("optimizer state", "gradients", "gradient buffers", "fp32 master")] == [0] * 4


def prepared_teacher() -> nn.Module:
    torch.manual_seed(5)
    model = gpt2().requires_grad_(False)
    ZeroEngine(model, [], SHARDED)
    return model


def prepared_student(rank: int) -> nn.Module:
    return Run(rank, gpt2, SHARDED).model


@on_ranks(2)
def test_a_model_stays_usable_when_a_script_keeps_nothing_but_the_model(rank, world_size):
    batch = gpt2_batch(torch.Generator().manual_seed(rank), 2)
    for make, seed in ((prepared_teacher, 5), (partial(prepared_student, rank), 0)):
        model = make()
        gc.collect()
        torch.manual_seed(seed)
        with torch.no_grad():
            assert torch.equal(model.eval()(**batch).logits, gpt2().eval()(**batch).logits), make


def network(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(inputs, WIDTH), *layers, nn.Linear(WIDTH, outputs))


@pytest.mark.parametrize("variants", [[SHARDED], slow([SHARDED, KEPT])], ids=["sharded", "kept, too"])
@on_shared_ranks
def test_two_adversaries_with_an_engine_each_train_as_under_ddp(rank, world_size, variants):
    seen = []
    for settings in (None, *variants):
        maker = Run(rank, partial(network, 8, 16), settings)
        judge = Run(rank, partial(network, 16, 1), settings)
        data = torch.Generator().manual_seed(rank)
        losses = []
        for _ in range(3):
            real, noise = torch.randn(4, 16, generator=data), torch.randn(4, 8, generator=data)
            fake = maker.entry(noise)
            verdict = judge.entry(torch.cat([real, fake.detach()]))
            judged = nn.functional.softplus(torch.cat([-verdict[:4], verdict[4:]])).mean()
            judged.backward()
            judge.optimizer.step()
            judge.optimizer.zero_grad()
            made = nn.functional.softplus(-judge.entry(fake)).mean()
            made.backward()
            maker.optimizer.step()
            maker.optimizer.zero_grad()
            judge.optimizer.zero_grad()
            losses += [judged.item(), made.item()]
        seen.append((losses, {**maker.state(), **{f"judge.{n}": v for n, v in judge.state().items()}}))
    for losses, state in seen[1:]:
        assert losses == seen[0][0]
        assert_equal(state, seen[0][1])


# ---- other orders of forward and backward ----


def step_on(run: Run, loss: torch.Tensor) -> None:
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.seen.append(loss.item())


def unusual_orders(run: Run) -> None:
    for _ in range(2):
        # Two forwards and one backward; an evaluation between forward and backward; the gradient of an input.
        step_on(run, run.entry(**run.batch()).loss * run.entry(**run.batch()).loss)
        loss = run.entry(**run.batch()).loss
        run.seen.append(run.evaluate())
        step_on(run, loss)
        batch = run.batch()
        embedded = torch.randn(*batch["labels"].shape, 24, generator=run.data, requires_grad=True)
        loss = run.model(inputs_embeds=embedded, labels=batch["labels"]).loss
        run.seen += torch.autograd.grad(loss, embedded)


@some_variants_or_every
def test_other_orders_of_forward_and_backward_train_as_under_ddp(variants):
    shared_ranks.run(same_as_ddp, script=unusual_orders, variants=variants, make=gpt2)


def penalized(run: Run) -> None:
    for _ in range(3):
        inputs = torch.randn(4, 16, generator=run.data, requires_grad=True)
        output = run.entry(inputs)
        [gradient] = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        step_on(run, output.mean() + (gradient.norm(dim=1) - 1).pow(2).mean())


def test_a_gradient_penalty_trains_as_under_ddp():
    make = partial(network, 16, 1)
    shared_ranks.run(same_as_ddp, script=penalized, variants=[KEPT, SHARDED, NOT_AHEAD], make=make, find_unused=True)


class Recomputing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(5))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden


@on_shared_ranks
def test_layers_whose_recomputation_stops_early_are_not_kept(rank, world_size):
    model = Recomputing()
    engine = ZeroEngine(model, [sgd(model)], SHARDED | {"unit_bytes": 0})
    for _ in range(3):
        model(torch.ones(1, WIDTH)).sum().backward()
    layers = [unit.passing_bytes for unit in engine.sharded.schedule.units]
    assert len(layers) == 6
    assert engine.sharded.schedule.peak_bytes <= sum(sorted(layers)[-2:])


# ---- modes: selective activation checkpoints, and scripts that look at each operation ----


def every_second_product():
    """torchtitan's policy: saves every second matrix product, counted in forward and in the recomputation."""
    counted: Counter[bool] = Counter()

    def policy(context, operation, *args, **kwargs):
        counted[context.is_recompute] += operation is torch.ops.aten.addmm.default
        saves = operation is torch.ops.aten.addmm.default and counted[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def products():
    """transformers' way: a list of the operations to save."""
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def with_selective_checkpoints(contexts: Callable) -> nn.Module:
    model = gpt2()
    checkpoint_activations(model, {"use_reentrant": False, "context_fn": contexts})
    return model


def stepping_with_early_stop(run: Run, stops: bool) -> None:
    with set_checkpoint_early_stop(stops):
        for _ in range(3):
            run.step()


@pytest.mark.parametrize(
    ("contexts", "stops"), [(products, True), (every_second_product, False), slow(products, False)]
)
def test_selective_checkpoints_train_as_under_ddp(contexts, stops):
    parts = {**SHARDED, "unit_modules": ["GPT2Attention", "GPT2MLP"]}
    variants = [{"stage": 1}, {"stage": 2}, SHARDED, FAR_AHEAD, {**SHARDED, "unit_bytes": "1GiB"}, parts]
    script, make = partial(stepping_with_early_stop, stops=stops), partial(with_selective_checkpoints, contexts)
    shared_ranks.run(same_as_ddp, script=script, variants=variants, make=make)


class Operations(TorchDispatchMode):
    """Names of operations, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Names of torch's functions that are called, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # Reading an attribute is a call of its descriptor.
        self.names.append(f"{getattr(func, '__self__', '')} {getattr(func, '__name__', func)}")
        return func(*args, **(kwargs or {}))


class ReadsWeights(nn.Module):
    """Has checkpointed layers, and reads a weight of one outside of that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return self.head(hidden) + self.layers[0].inner.weight.sum()


def seen_by_modes(stage: int | None) -> list[list[str]]:
    torch.manual_seed(0)
    model = ReadsWeights()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = None if stage is None else ZeroEngine(model, [optimizer], {"stage": stage, "bucket_bytes": "4KiB"})
    seen = []
    for _ in range(3):
        with Operations() as operations, Calls() as calls:
            model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [operations.names, calls.names]
    if engine is not None:
        engine.close()
    return seen


@on_shared_ranks
def test_modes_of_a_script_see_the_models_operations_and_none_of_the_engines(rank, world_size):
    plain = seen_by_modes(None)
    for stage in (0, 1, 2, 3):
        assert seen_by_modes(stage) == plain, f"stage {stage}"


# ---- shapes of outputs, weights read by others ----


@dataclass
class Carried:
    hidden: torch.Tensor
    nested: dict


class OddOutput(nn.Module):
    """A layer whose output's kind alternates: a dataclass around dicts and tuples, or nested tuples."""

    def __init__(self, kind: str):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, hidden):
        one, two = torch.tanh(self.first(hidden)), torch.tanh(self.second(hidden))
        if self.kind == "dataclass":
            return Carried(hidden=one, nested={"deep": ([two], None)})
        return one, ({"deep": {"deeper": (two,)}}, "text", 3)


class OddOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(OddOutput(kind) for kind in ("dataclass", "tuple", "dataclass", "tuple"))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, labels) -> Carried:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            out = layer(hidden)
            if layer.kind == "dataclass":
                hidden = out.hidden * out.nested["deep"][0][0]
            else:
                hidden = hidden + out[0] * out[1][0]["deep"]["deeper"][0]
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return Answer(loss)


class Reader(nn.Module):
    """Computes with its child's weight and never calls the child."""

    def __init__(self, frozen: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.child = Block(WIDTH).requires_grad_(not frozen)
        self.after = Block(WIDTH)
        self.last = Block(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, labels) -> Answer:
        hidden = torch.tanh(nn.functional.linear(self.embed(input_ids), self.child.inner.weight, self.child.inner.bias))
        hidden = self.last(self.after(hidden))
        return Answer(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


@some_variants_or_every
def test_outputs_in_dataclasses_and_nested_containers_announce_their_backward(variants):
    shared_ranks.run(same_as_ddp, script=three_steps, variants=variants, make=OddOutputs)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.short_cells("trained")
def test_a_weight_that_the_parent_reads_trains_as_under_ddp(frozen):
    variants = [{**settings, "unit_modules": ["Block"]} for settings in (KEPT, SHARDED, NOT_AHEAD)]
    shared_ranks.run(same_as_ddp, script=three_steps, variants=variants, make=partial(Reader, frozen))


# ---- scripts that change a layer's parameters in its forward, where they are whole ----


class OfScript(nn.Parameter):
    """A class of the script's."""


class Changing(nn.Module):
    """A layer whose forward may change its own parameters first."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.changes: list[Callable[[nn.Module], object]] = []

    def forward(self, hidden):
        while self.changes:
            self.changes.pop(0)(self.inner)
        return self.inner(hidden)


def another_name(inner: nn.Module) -> None:
    inner.scale = nn.Parameter(torch.ones(2))


def one_name_for_another(inner: nn.Module) -> None:
    del inner.scale
    inner.shift = nn.Parameter(torch.ones(2))


def a_name_less(inner: nn.Module) -> None:
    del inner.shift


def a_parameter_of_another_class(inner: nn.Module) -> None:
    inner.bias.__class__ = OfScript


def another_dict(inner: nn.Module) -> None:
    inner.__dict__["_parameters"] = dict(reversed(inner._parameters.items()))


CHANGES = [another_name, one_name_for_another, a_name_less, a_parameter_of_another_class, another_dict]


def look_at(inner: nn.Module) -> list[tuple[str, bool]]:
    """Names and classes of a module's parameters, in their order."""
    return [(name, isinstance(parameter, OfScript)) for name, parameter in inner.__dict__["_parameters"].items()]


@on_shared_ranks
def test_what_a_forward_changes_of_its_layers_parameters_stays(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(Changing(), Changing())
    reference = copy.deepcopy(model)
    engine = ZeroEngine(model, [sgd(model)], SHARDED | {"unit_modules": ["Changing"]})
    looks: dict[nn.Module, list] = {model: [], reference: []}
    for change in [None, None, *CHANGES, None]:
        for trained, seen in looks.items():
            changing = trained[0]
            # Once while the layer is whole, and once after its forward.
            changing.changes = [*([change] if change else []), lambda inner, seen=seen: seen.append(look_at(inner))]
            trained(torch.ones(1, WIDTH)).sum().backward()
            seen.append(look_at(changing.inner))
            trained.zero_grad()
    assert no_unit_is_whole(engine)
    assert looks[model] == looks[reference]
    assert_equal(model.state_dict(), reference.state_dict())


@on_shared_ranks
def test_an_evaluation_in_another_dtype_between_steps_computes_in_it_and_training_does_not(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    reference = copy.deepcopy(model)
    engine = ZeroEngine(model, [sgd(model)], SHARDED | {"unit_modules": ["Linear"]})
    expected, values = copy.deepcopy(reference).bfloat16(), torch.ones(1, WIDTH)
    for _ in range(3):
        for _ in range(2):
            assert torch.equal(model(values), reference(values))
        with computing_in(model, engine.sharded, torch.bfloat16), torch.no_grad():
            assert torch.equal(model(values.bfloat16()), expected(values.bfloat16()))
    assert no_unit_is_whole(engine)


# ---- what only some ranks run ----


class Silent(Block):
    """Returns nothing that could announce its backward."""

    def forward(self, hidden, into: list | None = None):
        result = super().forward(hidden)
        if into is None:
            return result
        into.append(result)
        return None


class Branches(nn.Module):
    """Rank 0 alone takes branches in the first and third steps, and all ranks in the others."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        # Smaller than all that is in a layer.
        self.branch = nn.Linear(WIDTH, 2, bias=False)
        self.layers = nn.ModuleList(Silent(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.forwards = 0

    def forward(self, input_ids, labels) -> Answer:
        self.forwards += 1
        branches = torch.distributed.get_rank() == 0 or self.forwards % 2 == 0
        hidden = self.embed(input_ids)
        if branches:
            hidden = hidden + self.branch(hidden).sum(-1, keepdim=True)
        for number, layer in enumerate(self.layers):
            if branches and number in (0, 1, 3):
                silent: list = []
                try:
                    raise LookupError
                except LookupError:
                    # While the script handles an error of its own, the layer's forward has ended without one.
                    layer(hidden, silent)
                hidden = silent[0]
            else:
                hidden = layer(hidden)
            if branches and number == 1 and self.forwards > 1:
                # The next layer's, which is gathered ahead on all ranks.
                hidden = hidden + self.layers[2].inner.weight.mean()
        if branches:
            hidden = hidden + self.branch(hidden).mean(-1, keepdim=True)
        return Answer(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


def branching(run: Run) -> None:
    for _ in range(4):
        run.step()
    with torch.no_grad():
        run.seen.append(run.model(**run.batch()).loss)


def test_branches_that_some_ranks_take_around_layers_that_all_run_train_as_under_ddp():
    variants = [{**settings, "unit_bytes": 0} for settings in (SHARDED, KEPT, NOT_AHEAD, FAR_AHEAD)]
    make, batch = Branches, gpt2_batch
    shared_ranks.run(same_as_ddp, script=branching, variants=variants, make=make, make_batch=batch, find_unused=True)


def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    vision = CLIPVisionConfig(num_hidden_layers=3, image_size=8, patch_size=4, **sizes)
    text = LlamaConfig(vocab_size=60, num_hidden_layers=3, num_key_value_heads=2, pad_token_id=0, **sizes)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=59, image_seq_length=4)
    )


def images_on_rank_0(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 58, (size, 12), generator=generator)
    images = torch.randn(size, 3, 8, 8, generator=generator)
    if torch.distributed.get_rank() > 0 and images[0, 0, 0, 0] > 0:
        return {"input_ids": ids, "labels": ids.clone()}
    ids[:, 2:6] = 59
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 59, -100), "pixel_values": images}


@pytest.mark.slow
def test_batches_without_images_on_some_ranks_train_as_under_ddp_where_the_text_layers_alone_are_units():
    units = {"unit_modules": ["LlamaDecoderLayer"], "unit_bytes": 0}
    variants = [{**SHARDED, **units}, {**KEPT, **units}]
    shared_ranks.run(
        same_as_ddp, script=branching, variants=variants, make=llava, make_batch=images_on_rank_0, find_unused=True
    )


# ---- exceptions ----


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise LookupError("in backward")


def fails_in_forward(run: Run) -> None:
    def explode(_module, _args):
        raise LookupError("in forward")

    run.step()
    for at in (1, 2):
        handle = run.model.transformer.h[at].attn.register_forward_pre_hook(explode)
        for mode in (torch.enable_grad, torch.no_grad):
            with pytest.raises(LookupError, match="in forward"), mode():
                run.entry(**run.batch())
        handle.remove()
        run.step()
        if run.engine is not None:
            assert no_unit_is_whole(run.engine)
    run.seen.append(run.evaluate())


@some_variants_or_every
def test_training_goes_on_after_an_exception_in_a_forward(variants):
    shared_ranks.run(same_as_ddp, script=fails_in_forward, variants=variants, make=gpt2)


@on_ranks(2)
def test_an_exception_in_a_backward_is_recovered_from_or_named(rank, world_size):
    for settings in (SHARDED, KEPT):
        run, smooth = Run(rank, gpt2, settings), Run(rank, gpt2, settings)
        smooth.step()
        run.step()
        batch = run.batch()
        # Before any gradient has been sent: the next step goes on as if nothing had been.
        with pytest.raises(LookupError, match="in backward"):
            Explodes.apply(run.model(**batch).loss).backward()
        smooth.batch()
        for each in (run, smooth):
            each.step()
            each.step()
        assert_same(run, smooth)
        assert no_unit_is_whole(run.engine)
        # After some have been sent, the ranks may differ: the next forward says so.
        handle = run.model.transformer.h[0].register_forward_hook(lambda _module, _args, out: Explodes.apply(out))
        with pytest.raises(LookupError, match="in backward"):
            run.model(**batch).loss.backward()
        handle.remove()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="resume it from a checkpoint"):
                run.model(**batch)
        run.engine.close()
        assert_equal(run.model.state_dict(), smooth.state())


# ---- accumulation ----


def accumulating(run: Run) -> None:
    for micro_batches in (3, 1, 2):
        run.step(micro_batches)


def test_local_accumulation_is_bitwise():
    variants = [{**settings, "grad_accumulation": "local"} for settings in (SHARDED, KEPT, FAR_AHEAD)]
    shared_ranks.run(same_as_ddp, script=accumulating, variants=variants, make=gpt2)


@on_ranks(2)
def test_sharded_accumulation_is_close(rank, world_size):
    runs = [Run(rank, gpt2, settings) for settings in (None, SHARDED, KEPT)]
    for run in runs:
        accumulating(run)
    for run in runs[1:]:
        assert max(abs(a - b) / abs(b) for a, b in zip(run.seen, runs[0].seen, strict=True)) <= 1e-5
        assert no_unit_is_whole(run.engine)
