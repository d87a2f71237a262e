"""Stage 3: wrong use is one clear message on the rank that did it, and nothing hangs, crashes or trains on silently."""

import copy
import io
import pickle
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from cells import slow
from peft import LoraConfig, get_peft_model
from shared_ranks import on_ranks, run_on_ranks, shared_ranks, tell, wait_until_told
from stage3_runs import (
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
from torch.optim.swa_utils import AveragedModel
from training import VOCABULARY, Answer, gpt2

import hf_zero
from hf_zero.buckets.sharded_parameter import ShardedParametersError, are_hidden
from hf_zero.config import CommConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.presence.arrivals import CommunicationError

pytestmark = pytest.mark.timeout(120)
DOCS = Path(__file__).parents[2] / "docs"
# ---- moving, casting, copying ----

CHANGING = {
    "to(float16)": lambda module: module.to(torch.float16),
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "type(float16)": lambda module: module.type(torch.float16),
    "to(meta)": lambda module: module.to("meta"),
    "to_empty(meta)": lambda module: module.to_empty(device="meta"),
}
CHANGING_NOTHING = [
    lambda module: module.cpu(),
    lambda module: module.float(),
    lambda module: module.to("cpu"),
    lambda module: module.to(torch.float32),
    lambda module: module.to("cpu", torch.float32),
]


def casting(run: Run) -> None:
    for step in range(2):
        run.step()
        if run.engine is None:
            continue
        if step == 1:
            run.evaluate()
        for module in (run.model, run.model.transformer.h[1], run.model.transformer.wte):
            for how, change in CHANGING.items():
                with pytest.raises(
                    ShardedParametersError, match=r"before accelerator\.prepare, or after engine\.close"
                ):
                    change(module)
                    pytest.fail(how)
            for change in CHANGING_NOTHING:
                assert change(module) is module
    if run.engine is None:
        run.batch()
    run.step()


def test_moving_and_casting_a_sharded_model_is_refused_unless_it_changes_nothing_and_training_goes_on():
    shared_ranks.run(same_as_ddp, script=casting, variants=[SHARDED, KEPT], make=gpt2)


def copying(run: Run) -> None:
    run.step()
    if run.engine is not None:
        for module in (run.model, run.model.transformer.h[1]):
            for take in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
                with pytest.raises(ShardedParametersError, match=r"save_pretrained.*state_dict.*engine\.close\(\)"):
                    take(module)
    run.step()


def test_pickling_a_sharded_model_is_refused_with_the_way_out():
    shared_ranks.run(same_as_ddp, script=copying, variants=[SHARDED], make=gpt2)


def copying_deeply(run: Run) -> None:
    run.step()
    for part in (run.model, run.model.transformer.h[1]):
        expected = {name: value.clone() for name, value in part.state_dict().items()}
        copied = copy.deepcopy(part)
        run.step()
        assert_equal(copied.state_dict(), expected)
        assert not any(are_hidden(parameter) for parameter in copied.parameters())
        assert all(parameter.numel() == 0 or parameter.is_leaf for parameter in copied.parameters())
        run.seen += [value.clone() for value in copied.half().state_dict().values()]
    copied = copy.deepcopy(run.model)
    run.seen.append(copied(**run.batch()).loss.detach())
    copied(**run.batch()).loss.backward()
    run.seen += [parameter.grad for parameter in copied.parameters()]


def test_a_copy_of_a_sharded_model_is_an_ordinary_whole_one():
    variants = [SHARDED, KEPT]
    shared_ranks.run(same_as_ddp, script=copying_deeply, variants=variants, make=gpt2)


@on_ranks(2)
def test_a_copy_of_a_model_that_is_whole_just_now_is_an_ordinary_model_or_refused(rank, world_size):
    """What people do for an averaged model: an ordinary copy, or the refusal."""
    for settings in (SHARDED, KEPT):
        run = Run(rank, gpt2, settings)
        run.step()
        expected = run.state()
        for take in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
            with hf_zero.unsharded(run.model):
                try:
                    copied = take(run.model)
                except ShardedParametersError:
                    continue
            run.step()
            copied(**run.batch()).loss.backward()
            assert all(type(p.grad) is torch.Tensor for p in copied.parameters())
            assert_equal(copied.state_dict(), expected)
            assert copied.half().lm_head.weight.dtype == torch.float16
            expected = run.state()


# ---- editing and reading while sharded ----


def ones(parameter: nn.Parameter) -> torch.Tensor:
    return torch.ones(parameter.shape)


EDITS = {
    "add_": lambda p: p.add_(1),
    "mul_": lambda p: p.mul_(0.5),
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(0.5),
    "copy_": lambda p: p.copy_(ones(p)),
    "init": lambda p: nn.init.normal_(p),
    "slice": lambda p: p[:1].zero_(),
    "data.add_": lambda p: p.data.add_(1),
    "data.zero_": lambda p: p.data.zero_(),
    "data.copy_": lambda p: p.data.copy_(ones(p)),
    "data =": lambda p: setattr(p, "data", ones(p)),
}
OF_EACH_ELEMENT = ("add_", "mul_", "zero_", "fill_", "data.add_", "data.zero_")
EDITED = ("transformer.wpe.weight", "transformer.h.1.attn.c_attn.weight")


def edits_while_sharded(rank: int, world_size: int, in_turn: bool) -> list[str]:
    """The kinds of edit that were neither refused nor named before the next training step used the old values."""
    lost = []
    for number, (kind, edit) in enumerate(EDITS.items()):
        for name in EDITED[number % 2 :][:1] if in_turn else EDITED:
            run = Run(rank, gpt2, SHARDED)
            run.step()
            expected = run.state()[name]
            try:
                with torch.no_grad():
                    edit(run.model.get_parameter(name))
                    edit(expected)
                if kind in OF_EACH_ELEMENT:
                    assert torch.equal(run.state()[name], expected), kind
                    run.step()
                    continue
            except RuntimeError:
                assert kind not in OF_EACH_ELEMENT
                # Refused: the values are the old ones, and training goes on.
                run.step()
                continue
            try:
                run.step()
            except RuntimeError as error:
                assert name in str(error) and "writeback=True" in str(error), f"{kind}: {error}"
            else:
                lost.append(f"{kind} of {name}")
    return lost


@pytest.mark.parametrize("in_turn", [True, slow(False)], ids=["in turn", "each"])
def test_an_edit_of_a_sharded_parameter_is_refused_or_named_and_never_lost_silently(in_turn):
    assert run_on_ranks(edits_while_sharded, in_turn=in_turn) == [[], []]


@on_ranks(2)
def test_an_edit_without_writeback_raises_and_leaves_no_trace(rank, world_size):
    run = Run(rank, gpt2, SHARDED)
    run.step()
    before = run.state()
    with pytest.raises(
        RuntimeError, match=r"'transformer\.ln_f\.weight' was edited .* without writeback=True, and .* lost"
    ):
        with hf_zero.gathered(run.model.transformer.ln_f), torch.no_grad():
            run.model.transformer.ln_f.weight.add_(1)
    assert no_unit_is_whole(run.engine)
    assert_equal(run.state(), before)


@on_ranks(2)
def test_an_edit_that_an_exception_breaks_off_leaves_no_trace(rank, world_size):
    run = Run(rank, gpt2, SHARDED)
    run.step()
    before = run.state()
    with pytest.raises(LookupError), hf_zero.gathered(run.model, writeback=True), torch.no_grad():
        run.model.transformer.ln_f.weight.add_(1 + rank)
        raise LookupError
    assert no_unit_is_whole(run.engine)
    assert_equal(run.state(), before)


@on_ranks(2)
def test_an_edit_through_data_without_writeback_raises_or_leaves_no_trace(rank, world_size):
    run = Run(rank, gpt2, SHARDED)
    run.step()
    before = run.state()
    try:
        with hf_zero.gathered(run.model.transformer.ln_f):
            run.model.transformer.ln_f.weight.data.add_(1)
    except RuntimeError as error:
        assert "without writeback=True" in str(error)
    else:
        assert_equal(run.state(), before)


@on_ranks(2)
def test_data_replaced_without_writeback_raises_and_leaves_no_trace(rank, world_size):
    run = Run(rank, gpt2, SHARDED)
    run.step()
    before = run.state()
    weight = run.model.transformer.ln_f.weight
    for replace in (lambda: setattr(weight, "data", torch.ones(weight.shape)), lambda: weight.set_(torch.ones(WIDTH))):
        with pytest.raises(RuntimeError, match=r"'transformer\.ln_f\.weight' was edited .* without writeback=True"):
            with hf_zero.gathered(run.model), hf_zero.gathered(weight), torch.no_grad():
                replace()
        assert_equal(run.state(), before)
    run.step()


UNLIKE = {
    "dtype": lambda values: values.to(torch.bfloat16),
    "shape": lambda values: values.flatten(),
    "more": lambda values: torch.cat([values, values]),
}


@on_ranks(2)
def test_data_of_another_shape_or_dtype_given_by_one_rank_is_named_on_all(rank, world_size):
    for stage in (2, 3):
        for replace in UNLIKE.values():
            run = Run(rank, gpt2, {**SHARDED, "stage": stage})
            run.step()
            before = run.state()
            weight = run.model.transformer.h[1].attn.c_attn.weight
            message = r"'transformer\.h\.1\.attn\.c_attn\.weight' was set to .*Assign values of its own shape and dtype"
            with pytest.raises(RuntimeError, match=message), hf_zero.gathered(run.model, writeback=True):
                if rank == 1:
                    weight.data = replace(weight.data)
            if stage == 3:
                assert_equal(run.state(), before)
                run.step()


# ---- steps at the wrong time ----


def stepping_while_whole(run: Run) -> None:
    run.step()
    loss = run.entry(**run.batch()).loss
    loss.backward()
    if run.engine is not None:
        for whole in (hf_zero.unsharded(run.model), hf_zero.gathered(run.model.transformer.h[0].ln_1.weight)):
            with (
                whole,
                pytest.raises(RuntimeError, match=r"optimizer\.step\(\) was called inside `gathered` or `unsharded`"),
            ):
                run.optimizer.step()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step()


def test_a_step_inside_unsharded_or_gathered_raises_and_one_after_it_goes_through():
    shared_ranks.run(same_as_ddp, script=stepping_while_whole, variants=[SHARDED, KEPT], make=gpt2)


def with_frozen_layer() -> nn.Module:
    model = gpt2()
    model.transformer.h[1].requires_grad_(False)
    return model


@on_ranks(2)
def test_unfreezing_a_parameter_after_prepare_is_named_at_the_step(rank, world_size):
    run = Run(rank, with_frozen_layer, SHARDED)
    run.step()
    run.model.transformer.h[1].mlp.requires_grad_(True)
    run.entry(**run.batch()).loss.backward()
    with pytest.raises(RuntimeError, match=r"transformer\.h\.1\.mlp\..*requires_grad"):
        run.optimizer.step()


def freezing(run: Run) -> None:
    run.step()
    for frozen in (True, True, False, False):
        run.model.transformer.h[1].mlp.requires_grad_(not frozen)
        run.step()


def test_freezing_a_trained_parameter_and_thawing_it_again_trains_as_under_ddp():
    shared_ranks.run(same_as_ddp, script=freezing, variants=[SHARDED, KEPT, NOT_AHEAD], make=gpt2, find_unused=True)


# ---- ranks that go apart ----


@contextmanager
def said_within(seconds: float):
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


def adapted() -> nn.Module:
    settings = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    return get_peft_model(gpt2(), settings)


def gather(run: Run, **how) -> None:
    with hf_zero.gathered(run.model.transformer.h[0], **how):
        pass


def unshard(run: Run) -> None:
    with hf_zero.unsharded(run.model):
        pass


# Of docs/stage-3.md: words of the row → the call as an error names it → the call. Where a row has no calls, another test makes
# them: a rank that is late in training ends all ranks, and TRL's walks are made from a module of that name.
COLLECTIVE: dict[str, dict[str, Callable[[Run], object]]] = {
    "`model(...)`": {},
    "`state_dict()`": {
        "state_dict() of GPT2LMHeadModel": lambda run: run.model.state_dict(),
        "save_pretrained() of GPT2LMHeadModel": lambda run: run.model.save_pretrained("never"),
        "state_dict() of GPT2Block": lambda run: run.model.transformer.h[0].state_dict(),
    },
    "Reading `p`": {
        "hf_zero.gathered": gather,
        "hf_zero.unsharded": unshard,
        "copy.deepcopy() of GPT2LMHeadModel": lambda run: copy.deepcopy(run.model),
        "update_parameters() of an AveragedModel": lambda run: AveragedModel(gpt2()).update_parameters(run.model),
    },
    "Editing `p`": {"hf_zero.gathered, ": partial(gather, writeback=True)},
    "| `load_state_dict`": {
        "load_state_dict() of GPT2LMHeadModel": lambda run: run.model.load_state_dict(gpt2().state_dict()),
        "load_state_dict() of LayerNorm": lambda run: nn.Sequential(run.model.transformer.ln_f).load_state_dict(
            {"0.weight": torch.zeros(WIDTH), "0.bias": torch.zeros(WIDTH)}
        ),
    },
    "`.to(dtype)`": {"ZeroEngine.close": lambda run: run.engine.close()},
    "| LoRA": {
        "merge_and_unload() of LoraModel": lambda run: run.model.merge_and_unload(),
        "merge() of Linear": lambda run: run.model.merge_adapter(),
        "unmerge() of Linear": lambda run: run.model.unmerge_adapter(),
    },
    "| TRL with": {},
    "| A walk of your own": {"hf_zero.gathered: ": gather},
    "`full_grad`": {"full_grad": lambda run: run.engine.full_grad(run.model.transformer.wte.weight)},
    "`full_state`": {"full_state": lambda run: run.engine.full_state(run.model.transformer.wte.weight)},
    "`engine_of(model).resize_embeddings(...)`": {
        "ZeroEngine.resize_embeddings": lambda run: run.engine.resize_embeddings(VOCABULARY + 1)
    },
}
PAGES = ("stage-3.md", "gradients-and-reports.md", "what-is-refused.md")


def comes_alone(rank: int, world_size: int, rows: list[str], alone: int) -> list[str]:
    """One rank alone makes each call of these rows; returns what it is told."""
    told = []
    # For the whole life of this rank: calls read it when they are made.
    CommConfig.meeting_timeout_s = 0.1
    for row in rows:
        for name, call in COLLECTIVE[row].items():
            run = Run(rank, adapted if row == "| LoRA" else gpt2, SHARDED)
            shards = [bucket.own.clone() for bucket in run.engine.buckets]
            if rank != alone:
                wait_until_told(f"the error of {row}: {name}")
                continue
            try:
                with said_within(60), pytest.raises(CommunicationError) as error:
                    call(run)
                told.append(str(error.value))
                assert no_unit_is_whole(run.engine), name
                assert all(map(torch.equal, shards, (bucket.own for bucket in run.engine.buckets))), name
            finally:
                tell(f"the error of {row}: {name}")
    return told


def test_a_rank_that_comes_alone_to_a_collective_call_of_the_docs_is_told_in_time():
    pages = "\n".join((DOCS / page).read_text() for page in PAGES)
    assert not [row for row in COLLECTIVE if row not in pages]
    table = (DOCS / "stage-3.md").read_text().partition("| in a script |")[2].partition("\n\n")[0]
    collective = [line for line in table.splitlines() if re.search("ollective|on all ranks|hf_zero.gathered", line)]
    assert collective
    assert not [line for line in collective if not any(row in line for row in COLLECTIVE)]
    names = [name for calls in COLLECTIVE.values() for name in calls]
    told = run_on_ranks(comes_alone, rows=list(COLLECTIVE), alone=1)[1]
    for name, message in zip(names, told, strict=True):
        assert name.strip(", :") in message and "call it on every rank" in message, (name, message)
        assert "comm.late_s" in message, message


def loads(run: Run, rank: int, offset: float = 0.0) -> None:
    run.model.load_state_dict(
        {name: torch.full_like(value, 0.5) + offset for name, value in gpt2().state_dict().items()}
    )


@on_ranks(2)
def test_a_state_dict_is_loaded_whole_or_not_at_all(rank, world_size):
    run = Run(rank, gpt2, SHARDED)
    before = run.state()
    with pytest.raises(
        ValueError, match=r"(?s)load_state_dict\(\) of GPT2LMHeadModel got different values on the ranks.*rank 1"
    ):
        loads(run, rank, offset=float(rank))
    assert_equal(run.state(), before)
    # On one rank inside of the context, and on all ranks.
    with hf_zero.gathered(run.model, writeback=True):
        if rank == 0:
            loads(run, rank, offset=1.0)
    assert all((value == 1.5).all() for value in run.state().values())
    loads(run, rank)
    assert all((value == 0.5).all() for value in run.state().values())
    run.step()


@on_ranks(2)
def test_ranks_that_look_in_different_ways_are_told_both(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommConfig, "meeting_timeout_s", 3.0)
        run = Run(rank, gpt2, SHARDED)
    with said_within(60), pytest.raises(CommunicationError, match="different collectives") as error:
        if rank == 0:
            run.model.state_dict()
        else:
            with hf_zero.gathered(run.model):
                pass
    message = str(error.value)
    assert "state_dict() of GPT2LMHeadModel" in message and "hf_zero.gathered" in message


@on_ranks(2)
def test_whole_parameters_that_do_not_fit_on_one_rank_are_refused_on_all(rank, world_size):
    run, smooth = Run(rank, gpt2, SHARDED), Run(rank, gpt2, SHARDED)
    for each in (run, smooth):
        each.step()
    with pytest.MonkeyPatch.context() as patch:
        # Rank 1 alone has no room: both ranks are told.
        patch.setattr("hf_zero.stage3.gathered.free_bytes", lambda device: 1000 if rank == 1 else 10**12)
        for look in (hf_zero.gathered, hf_zero.unsharded):
            with pytest.raises(MemoryError, match=r"whole parameters would take .* MiB on each rank"), look(run.model):
                pass
    assert no_unit_is_whole(run.engine)
    for each in (run, smooth):
        each.step()
    assert_same(run, smooth)


def test_parameters_of_two_models_are_not_gathered_together():
    models = gpt2(), gpt2()
    engines = [ZeroEngine(model, [torch.optim.SGD(model.parameters(), lr=0.1)], 3) for model in models]
    with pytest.raises(ValueError, match="several prepared models"):
        with hf_zero.gathered([model.lm_head.weight for model in models]):
            pass
    assert engines


# ---- models that cannot be sharded so ----


class Opaque:
    def __init__(self, hidden: torch.Tensor):
        self.hidden = hidden


class Secretive(Block):
    """Returns its tensor where hooks cannot see it."""

    def __init__(self, size: int, way: str):
        super().__init__(size)
        self.second = nn.Linear(size, size)
        self.way = way

    def forward(self, hidden):
        result = torch.tanh(self.second(super().forward(hidden)))
        if self.way == "object":
            return Opaque(result)
        self.hidden = result
        return None


class Secrets(nn.Module):
    def __init__(self, way: str, frozen: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Secretive(WIDTH, way).requires_grad_(not frozen) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, labels) -> Answer:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            returned = layer(hidden)
            hidden = (layer if returned is None else returned).hidden
        return Answer(nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()))


class TrainedSecrets(Secrets):
    def __init__(self):
        super().__init__("object", frozen=False)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("way", ["attribute", "object"])
@pytest.mark.short_cells("object-trained", "attribute-frozen")
@on_ranks(2)
def test_a_layer_that_hides_its_outputs_is_named_and_never_trains_on_wrong_gradients(rank, world_size, way, frozen):
    """An error that says how to return tensors; without one, training must equal DDP's."""

    def make() -> nn.Module:
        return Secrets(way, frozen)

    ddp, run = Run(rank, make, None), Run(rank, make, SHARDED)
    ddp.step()
    try:
        run.step()
    except RuntimeError as error:
        assert "tensors in a tuple, list, dict, ModelOutput or dataclass" in str(error)
    else:
        assert_same(run, ddp)
