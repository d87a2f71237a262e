"""Stage 3: layers that only some ranks run, in orders that ranks have for themselves, train as under DDP."""

import copy
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import hypothesis
import pytest
import torch
from cells import slow
from hypothesis import strategies as st
from ranks import run_ranks
from shared_ranks import on_ranks, shared_ranks
from stage3_runs import FAR_AHEAD, KEPT, NOT_AHEAD, SHARDED, WIDTH, Block, Run, assert_same, same_as_ddp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import VOCABULARY, Answer, gpt2, gpt2_batch

from hf_zero.engine.engine import ZeroEngine
from hf_zero.layout.gradient_buffers import GRAD_BUFFERS
from hf_zero.stage3.agreed_order import AgreedOrder

pytestmark = pytest.mark.timeout(170)

LAYERS = 6
EACH = {"unit_bytes": 0}
OFFLOADED = {**SHARDED, "offload": {"params": "cpu", "optimizer": "cpu"}}
VARIANTS = [{**each, **EACH} for each in (SHARDED, NOT_AHEAD, FAR_AHEAD, KEPT, OFFLOADED)]
LONGEST_WAIT_S = 5.0


class Skipping(nn.Module):
    """Each rank draws which of its layers to run, with probability one half."""

    def __init__(self, checkpoints: bool | None = None, layers: int = LAYERS):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.checkpoints = checkpoints

    def chosen(self) -> list[nn.Module]:
        return [layer for layer in self.layers if torch.rand(()) < 0.5]

    def run(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        if self.checkpoints is None:
            return layer(hidden)
        return checkpoint(layer, hidden, use_reentrant=self.checkpoints)

    def forward(self, input_ids, labels) -> Answer:
        hidden = self.embed(input_ids)
        for layer in self.chosen():
            hidden = self.run(layer, hidden)
        return self.answer(hidden, labels)

    def answer(self, hidden: torch.Tensor, labels: torch.Tensor) -> Answer:
        logits = self.head(hidden)
        answer = Answer(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        answer.logits = logits
        return answer


class Shuffled(Skipping):
    """Each rank runs some layers in an order of its own, and some of them twice."""

    def chosen(self) -> list[nn.Module]:
        return [self.layers[int(place)] for place in torch.randint(LAYERS, (LAYERS,))]


class OneEach(Skipping):
    """Each rank runs one layer, always the same."""

    def chosen(self) -> list[nn.Module]:
        return [self.layers[torch.distributed.get_rank()]]


class OnlyTheFirstRank(Skipping):
    def chosen(self) -> list[nn.Module]:
        return list(self.layers[: LAYERS if torch.distributed.get_rank() == 0 else 1])


class Late(Skipping):
    """From the fourth step on, one rank runs a layer in the middle that no rank has run before."""

    steps = 0

    def chosen(self) -> list[nn.Module]:
        self.steps += 1
        runs_all = self.steps > 3 and torch.distributed.get_rank() == 1
        return [layer for place, layer in enumerate(self.layers) if runs_all or place != 2]


class OneLoss(Skipping):
    """All ranks run all layers, and each one's loss is of a few."""

    def forward(self, input_ids, labels) -> Answer:
        hidden = self.embed(input_ids)
        outputs = [layer(hidden) for layer in self.layers]
        drawn = torch.rand(LAYERS) < 0.4
        return self.answer(sum((out for out, is_drawn in zip(outputs, drawn) if is_drawn), hidden), labels)


class InTurn(Skipping):
    """All ranks run the first half of the layers in one step, and the other half in the next."""

    steps = 0

    def chosen(self) -> list[nn.Module]:
        self.steps += 1
        return list(self.layers[:3] if self.steps % 2 else self.layers[3:])


class Parts(nn.Module):
    """A layer of more buckets than there are buffers."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(GRAD_BUFFERS + 2))
        self.unused: range = range(0)

    def forward(self, hidden):
        for place, part in enumerate(self.parts):
            if place not in self.unused:
                hidden = torch.tanh(part(hidden)) + hidden
        return hidden


class OtherParts(Skipping):
    """All ranks run all layers. Rank 0 leaves out the parameters whose gradients come last, those that come first, or all."""

    steps, begin = 0, 0

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Parts() for _ in range(3))

    def chosen(self) -> list[nn.Module]:
        unused = [range(GRAD_BUFFERS), range(2, 9), range(9)][self.steps % 3]
        for layer in self.layers:
            layer.unused = unused if self.steps >= self.begin and torch.distributed.get_rank() == 0 else range(0)
        self.steps += 1
        return list(self.layers)


class OtherPartsLater(OtherParts):
    begin = 3


CHECKPOINTED, REENTRANT = partial(Skipping, False), partial(Skipping, True)
MODELS = [
    Skipping,
    CHECKPOINTED,
    REENTRANT,
    Shuffled,
    OneEach,
    OnlyTheFirstRank,
    Late,
    OneLoss,
    InTurn,
    OtherParts,
    OtherPartsLater,
]


def trains_as_under_ddp(rank: int, world_size: int, make: Callable[[], nn.Module], variants: list[dict]) -> None:
    is_reentrant = getattr(make, "args", ()) == (True,)
    for settings in (None, *variants):
        # DDP does not find unused parameters of layers whose checkpoints are reentrant; the numbers are the same.
        run = Run(rank, CHECKPOINTED if settings is None and is_reentrant else make, settings, find_unused=True)
        for _ in range(5):
            run.step()
        run.seen.append(run.evaluate())
        for _ in range(3):
            run.step()
        if settings is None:
            reference = run
        else:
            assert_same(run, reference, settings)


@pytest.mark.short_cells(
    *(f"some-{name}" for name in ("reentrant", "Shuffled", "OneEach", "OnlyTheFirstRank", "OneLoss", "InTurn")),
    *("some-OtherParts", "some-OtherPartsLater"),
)
@pytest.mark.parametrize(
    "make", MODELS, ids=["random", "checkpointed", "reentrant", *[each.__name__ for each in MODELS[3:]]]
)
@pytest.mark.parametrize("variants", [VARIANTS[:1], VARIANTS], ids=["some", "every"])
def test_layers_that_some_ranks_skip_train_as_under_ddp(make, variants):
    shared_ranks.run(trains_as_under_ddp, make=make, variants=variants)


GROUPS = [{"shard_group_size": 2}, {"secondary_shard": "node", "node_size": 2}]


def trains_in_groups(rank: int, world_size: int, make: Callable[[], nn.Module], comm: dict) -> None:
    losses = []
    for settings in (None, {**SHARDED, **EACH, "comm": comm}):
        is_reentrant = getattr(make, "args", ()) == (True,)
        run = Run(rank, CHECKPOINTED if settings is None and is_reentrant else make, settings, find_unused=True)
        for _ in range(8):
            run.step()
        losses.append(run.seen)
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [*MODELS[:5], OtherParts], ids=["random", "checkpointed", "reentrant", "Shuffled", "OneEach", "OtherParts"]
)
@pytest.mark.parametrize(
    "comm", [{"shard_group_size": 2}, {"secondary_shard": "node", "node_size": 2}], ids=["hybrid", "secondary"]
)
def test_ranks_of_several_groups_skip_layers(make, comm):
    run_ranks(trains_in_groups, world_size=4, time_limit_s=150, keyword_arguments={"make": make, "comm": comm})


@on_ranks(2)
def test_a_layer_that_one_rank_runs_outside_of_the_models_forward_gives_no_parameters_of_two_steps(rank, world_size):
    # A look at the norm would find the ranks apart at the step.
    run = Run(rank, Skipping, {**SHARDED, **EACH, "nonfinite": "ignore"})
    run.model.chosen = lambda: list(run.model.layers)
    run.step()
    run.step()
    if rank == 0:
        loss = run.entry(**run.batch()).loss
        loss.backward()
        with torch.no_grad(), pytest.raises(RuntimeError, match="gathered from two steps"):
            run.model.layers[0](torch.ones(2, WIDTH))
            run.optimizer.step()
            run.model(**run.batch())
    else:
        run.step()
        with pytest.raises(RuntimeError, match="gathered from two steps"):
            run.model(**run.batch())


# ---- The order by itself, of ranks that are threads ----


class InThreads:
    """What ranks that are threads tell each other; each call waits for all of them."""

    def __init__(self, world_size: int):
        self.values: dict[int, object] = {}
        self.barrier = threading.Barrier(world_size, timeout=10.0)

    def of(self, rank: int) -> "InThreads":
        mine = copy.copy(self)
        mine.rank = rank
        return mine

    def exchange(self, value: object, purpose: str = "") -> list:
        self.values[self.rank] = value
        self.barrier.wait()
        everyone = [self.values[rank] for rank in sorted(self.values)]
        self.barrier.wait()
        return everyone

    def agree_max(self, values: torch.Tensor, label: object) -> torch.Tensor:
        return torch.stack(self.exchange(values)).amax(0)


NAMES = ["root", "first", "second", "third"]
UNITS = len(NAMES)
a_pass = st.lists(st.integers(0, UNITS - 1), max_size=6)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.integers(2, 3).flatmap(
        lambda ranks: st.lists(st.tuples(*[st.tuples(a_pass, a_pass)] * ranks), min_size=1, max_size=5)
    )
)
def test_ranks_that_need_any_layers_in_any_order_all_get_them_and_gather_in_one_order(steps):
    world_size = len(steps[0])
    everyone = InThreads(world_size)
    gathered: list[list[int]] = [[] for _ in range(world_size)]

    def run(rank: int) -> None:
        transport = everyone.of(rank)

        def gather(number: int) -> None:
            # Waits for all ranks, which must be at the same gather.
            assert set(transport.exchange(number)) == {number}
            gathered[rank].append(number)

        order = AgreedOrder(NAMES, transport, gather)
        for step in steps:
            forward, backward = step[rank]
            for numbers, end in (
                (forward, order.forward_end_with_graph),
                ([UNITS + n for n in backward], order.backward_end),
            ):
                for number in numbers:
                    order.reach(number)
                    gather(number)
                order.reach(end)
            order.count_step()

    with ThreadPoolExecutor(world_size) as threads:
        for ended in [threads.submit(run, rank) for rank in range(world_size)]:
            ended.result(timeout=60.0)
    assert all(each == gathered[0] for each in gathered)


def test_layers_that_all_ranks_run_need_no_words_but_at_the_ends():
    said = []

    class Alone(InThreads):
        def agree_max(self, values, label):
            said.append(values)
            return super().agree_max(values, label)

    order = AgreedOrder(NAMES, Alone(1).of(0), lambda number: None)
    told = []
    for _ in range(3):
        said.clear()
        for number in range(UNITS):
            order.reach(number)
        order.reach(order.forward_end_with_graph)
        for number in reversed(range(UNITS, 2 * UNITS)):
            order.reach(number)
        order.reach(order.backward_end)
        told.append(len(said))
    # Of each layer in the first pass; then of the two ends.
    assert told == [2 * UNITS + 2, 2, 2]


def trains_long(rank: int, world_size: int, steps: int) -> tuple[list[float], float, list[float]]:
    """DDP's longest step and ours in seconds, the largest difference from DDP's losses, and the last losses."""
    runs, longest_s = [], []
    for settings in (None, {**SHARDED, **EACH, "grad_accumulation": "local"}):
        # What a pass costs is its layers: each is a few messages to every rank.
        run = Run(rank, partial(Skipping, False, layers=4), settings, find_unused=True)
        clip = torch.nn.utils.clip_grad_norm_ if settings is None else None
        longest_s.append(0.0)
        for step in range(steps):
            begin_s = time.monotonic()
            micro_batches = 2 if step % 4 == 0 else 1
            for micro in range(micro_batches):
                with nullcontext() if micro == micro_batches - 1 else run.no_sync():
                    loss = run.entry(**run.batch()).loss / micro_batches
                    loss.backward()
                run.seen.append(loss.item())
            if clip is None:
                run.engine.clip_grad_norm_(0.5)
            else:
                clip(run.model.parameters(), 0.5)
            run.optimizer.step()
            run.optimizer.zero_grad()
            longest_s[-1] = max(longest_s[-1], time.monotonic() - begin_s)
        runs.append(run)
    differences = [abs(one - other) for one, other in zip(runs[0].seen, runs[1].seen)]
    return longest_s, max(differences), runs[1].seen[-4:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world_size", "steps"), [(2, 300), (3, 100), (4, 100)])
def test_many_steps_in_which_each_rank_skips_half_of_its_layers(world_size, steps):
    found = run_ranks(trains_long, world_size=world_size, time_limit_s=880, keyword_arguments={"steps": steps})
    for rank, ((ddp_s, ours_s), difference, losses) in enumerate(found):
        print(
            f"W {world_size}, rank {rank}: longest step {ours_s:.2f} s, DDP's {ddp_s:.2f} s; {difference:.1e} from it, {losses}"
        )
        # On a machine that does other work, DDP's steps are as long.
        assert ours_s < LONGEST_WAIT_S + ddp_s
        # A clip that bites agrees to rounding.
        assert difference < 1e-4


# ---- Ranks that run different numbers of forwards before their backward ----


class Headed(nn.Module):
    """GPT-2 and some layers after it, whose gradients fill several buckets before the first layer of a backward is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = gpt2(layers=2), nn.ModuleList(nn.Linear(24, 24) for _ in range(5))

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        found = self.body(**batch, output_hidden_states=True)
        hidden = found.hidden_states[-1]
        for layer in self.head:
            hidden = torch.tanh(layer(hidden)) + hidden
        return found.loss + hidden.square().mean()


def runs_different_numbers_of_forwards(
    rank: int, world_size: int, counts: list[list[int]], bucket_bytes: str, evaluates: bool = False
) -> None:
    losses = []
    for settings in (None, {**SHARDED, "unit_bytes": 0, "bucket_bytes": bucket_bytes, "comm": {"late_s": 20.0}}):
        torch.manual_seed(0)
        model = entry = Headed()
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.05), []
        if settings is None:
            entry = DistributedDataParallel(model)
        else:
            engine = ZeroEngine(model, [optimizer], settings)
        for step, by_rank in enumerate(counts):
            batch = gpt2_batch(torch.Generator().manual_seed(10 * step + rank), 1)
            forwards = 1 if evaluates else by_rank[rank]
            loss = torch.stack([entry(**batch) for _ in range(forwards)]).sum()
            with torch.no_grad():
                for _ in range(by_rank[rank] - forwards):
                    model(**batch)
            if settings is not None and by_rank == [2, 2]:
                # A promise holds only after the first gather of a backward, so no reduction has started in these forwards.
                assert engine._step.gradients.starts.started == 0
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        losses.append(seen)
    engine.close()
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("bucket_bytes", ["4KiB", "20KiB"])
def test_ranks_that_run_different_numbers_of_forwards_train_as_under_ddp(bucket_bytes, evaluates):
    # All promises are made in the first steps. Then each rank is once the only one in a forward.
    counts = [*[[1, 1]] * 5, [1, 2], [2, 1], [1, 3], [2, 2], [2, 1], [1, 1]]
    arguments = {"counts": counts, "bucket_bytes": bucket_bytes, "evaluates": evaluates}
    shared_ranks.run(runs_different_numbers_of_forwards, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_run_random_numbers_of_forwards_train_as_under_ddp(world_size, seed):
    numbers = random.Random(seed)

    def drawn(steps: int) -> list[list[int]]:
        return [[numbers.choice([1, 1, 2, 3]) for _ in range(world_size)] for _ in range(steps)]

    counts = [*[[1] * world_size] * 6, *drawn(8), *[[2] * world_size] * 5, *drawn(6)]
    for bucket_bytes in ("4KiB", "12KiB", "20KiB"):
        arguments = {"counts": counts, "bucket_bytes": bucket_bytes, "evaluates": seed % 2 == 1}
        run_ranks(
            runs_different_numbers_of_forwards,
            world_size=world_size,
            time_limit_s=100,
            keyword_arguments=arguments,
        )


# ---- Models of transformers ----


def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    text = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=3, num_attention_heads=2
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=IMAGE,
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        )
    )


IMAGE, PATCHES = 3, 5


def batch_with_or_without_images(generator: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, VOCABULARY, (rows, 12), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if torch.rand((), generator=generator) < 0.5:
        ids[:, :PATCHES] = IMAGE
        batch["pixel_values"] = torch.randn(rows, 3, 8, 8, generator=generator)
    return batch


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": WIDTH, "decoder_ffn_dim": WIDTH}
    drops = {"encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4, "dropout": 0.0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=VOCABULARY, d_model=WIDTH, max_position_embeddings=32, **sizes, **drops, **heads)
    )


def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 4}
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 2}
    off = {"mask_time_prob": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0}
    return Wav2Vec2ForCTC(
        Wav2Vec2Config(
            vocab_size=16,
            layerdrop=0.4,
            num_conv_pos_embedding_groups=2,
            activation_dropout=0.0,
            **convolutions,
            **sizes,
            **off,
        )
    )


def batch_of_sound(generator: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    return {
        "input_values": torch.randn(rows, 400, generator=generator),
        "labels": torch.randint(1, 16, (rows, 5), generator=generator),
    }


def to_own_experts(gate: nn.Module, args: tuple, outputs: tuple) -> tuple:
    """Sends each rank's tokens to experts of its own."""
    logits, scores, experts = outputs
    return logits, scores, experts % 2 + 2 * (torch.distributed.get_rank() % 2)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **experts, **sizes))
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(to_own_experts)
    return model


REAL = {
    "llava": (llava, batch_with_or_without_images),
    "bart": (bart, gpt2_batch),
    "wav2vec2": (wav2vec2, batch_of_sound),
    "mixtral": (mixtral, gpt2_batch),
}


def eight_steps(run: Run) -> None:
    for _ in range(8):
        run.step()


@pytest.mark.parametrize("name", ["llava", slow("bart"), slow("wav2vec2"), slow("mixtral")])
def test_models_of_transformers_whose_ranks_run_other_layers_train_as_under_ddp(name):
    make, make_batch = REAL[name]
    arguments = {"make": make, "make_batch": make_batch, "find_unused": True}
    shared_ranks.run(same_as_ddp, script=eight_steps, variants=VARIANTS[:1], **arguments)
