"""One optimizer over several prepared models, and over parameters of no prepared model, trains as under DDP."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from accelerate_job import make_accelerator
from cells import short_of, short_rows, slow
from shared_ranks import run_on_ranks
from torch import nn
from trainer_job import as_launched, history, make_trainer
from training import LENGTH, VOCABULARY, bert
from transformers import Trainer, TrainerCallback

from hf_zero import ZeroEngine
from hf_zero.integrations.accelerator import ZeroAcceleratorMixin

pytestmark = pytest.mark.timeout(180)

# The encoder's pooler is not used.
UNUSED = DistributedDataParallelKwargs(find_unused_parameters=True)


class Denoiser(nn.Module):
    def __init__(self, width: int = 24):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, width)

    def forward(self, noise: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            noise = noise + block(noise + text)
        return self.out(self.norm(noise))


class WithHead(nn.Module):
    """What DDP averages the gradients of a loss's head by: the head is a part of the model."""

    def __init__(self, denoiser: nn.Module, head: nn.Module):
        super().__init__()
        self.denoiser, self.head = denoiser, head

    def forward(self, noise: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.denoiser(noise, text))


def _headed(accelerator: Accelerator, denoiser: nn.Module, head: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    with accelerator.autocast():
        return head(denoiser(*args)).float()


def trained(
    rank: int,
    world_size: int,
    doors: list[str],
    accumulation: int = 1,
    clip: str = "norm",
    resume_in: str | None = None,
    steps: int = 3,
    **passed: object,
) -> list[tuple]:
    """For each door (losses, norms, whole state dicts of both models and the head), on two resumed halves if asked for."""
    as_launched(rank, world_size)
    return [
        _trained(rank, door, accumulation, clip, None if resume_in is None else f"{resume_in}/{place}", steps, passed)
        for place, door in enumerate(doors)
    ]


def _trained(rank, door, accumulation, clip, resume_in, steps, passed) -> tuple:
    losses, norms, guide_before = [], [], {}
    for resumes in (False, True) if resume_in is not None else (False,):
        accelerator = make_accelerator(
            door, gradient_accumulation_steps=accumulation, cpu=True, kwargs_handlers=[UNUSED], **passed
        )
        # The same on all ranks, as by a script's seed; on a run that resumes others, as a script does not save a head.
        torch.manual_seed(7 if resumes else 0)
        encoder, denoiser, head, guide = bert().bert, Denoiser(), nn.Linear(24, 3), nn.Linear(24, 3)
        frozen = nn.Linear(2, 2).requires_grad_(False)
        if resumes:
            guide.load_state_dict(guide_before)
        guide_before = {name: value.clone() for name, value in guide.state_dict().items()}
        groups = [
            {"params": [*denoiser.parameters(), *head.parameters()], "weight_decay": 0.1},
            {"params": [*encoder.parameters(), *guide.parameters(), *frozen.parameters()], "lr": 3e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        if door == "ddp":
            model = WithHead(denoiser, head)
            model, encoder, optimizer, schedule = accelerator.prepare(model, encoder, optimizer, schedule)
            models = [model, encoder]
        else:
            denoiser, encoder, optimizer, schedule = accelerator.prepare(denoiser, encoder, optimizer, schedule)
            models = [denoiser, encoder]
            model = partial(_headed, accelerator, denoiser, head)
        if resumes:
            accelerator.load_state(resume_in)
        for step in range(steps):
            for micro in range(accumulation):
                generator = torch.Generator().manual_seed(1000 * resumes + 100 * step + 10 * micro + rank)
                ids = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
                noise, labels = torch.randn(4, 24, generator=generator), torch.randint(0, 3, (4,), generator=generator)
                last = micro == accumulation - 1
                with accelerator.accumulate(*models) if accumulation > 1 else contextlib.nullcontext():
                    # In the second step, only one of the models is used.
                    text = encoder(ids).last_hidden_state[:, 0] if step != 1 else torch.zeros(4, 24)
                    loss = nn.functional.cross_entropy(model(noise, text), labels)
                    accelerator.backward(loss)
                    if last and clip == "norm":
                        params = [p for each in models for p in each.parameters()]
                        params += [] if door == "ddp" else list(head.parameters())
                        norms.append(float(accelerator.clip_grad_norm_(params, 100.0)))
                    elif last:
                        params = [p for each in models for p in each.parameters()]
                        params += [] if door == "ddp" else list(head.parameters())
                        accelerator.clip_grad_value_(params, 0.01)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        if resume_in is not None and not resumes:
            accelerator.save_state(resume_in)
        if door == "ddp":
            whole = [each.state_dict() for each in (denoiser, accelerator.unwrap_model(encoder), head)]
        else:
            # On all ranks, collective at stage 3; only the first rank gets it there.
            whole = [accelerator.get_state_dict(denoiser), accelerator.get_state_dict(encoder), head.state_dict()]
        whole = [{name: value.detach().cpu().numpy().copy() for name, value in state.items()} for state in whole]
        assert all(torch.equal(value, guide_before[name]) for name, value in guide.state_dict().items())
        accelerator.free_memory()
    return losses, norms, whole


def assert_alike(runs: list[list[tuple]], tolerance: float = 0.0) -> None:
    """That all doors have the first one's losses on each rank, its weights on rank 0, and one head on all ranks."""
    for doors in runs:
        losses, norms, whole = doors[0]
        for other in doors[1:]:
            assert other[0] == pytest.approx(losses, rel=tolerance, abs=tolerance)
            assert other[1] == pytest.approx(norms, rel=1e-6)
            for state, expected in zip(other[2], whole) if doors is runs[0] else ():
                assert state.keys() == expected.keys()
                near = {
                    name: np.allclose(state[name], expected[name], rtol=tolerance, atol=tolerance) for name in state
                }
                assert all(near.values()), near
    heads = [[whole[2] for _, _, whole in doors] for doors in runs]
    for first, second in zip(heads[0], heads[-1]):
        assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("doors", [["attach 1", "attach 2", "attach 3"], slow(["attach 0"])], ids=str)
def test_an_encoder_and_a_denoiser_train_with_a_head_as_under_ddp(doors, tmp_path):
    assert_alike(run_on_ranks(trained, doors=["ddp", *doors], resume_in=str(tmp_path)))


@pytest.mark.parametrize(
    ("last", "settings"),
    [(3, {"accumulation": 2, "clip": "value"}), slow(2, {"mixed_precision": "bf16", "steps": 2})],
    ids=str,
)
def test_they_accumulate_and_clip_as_under_ddp(last, settings):
    # Sharded accumulation adds up in another order.
    assert_alike(run_on_ranks(trained, doors=["ddp", "attach 0", f"attach {last}"], **settings), tolerance=2e-6)


@pytest.mark.slow
def test_one_rank_trains_them_as_a_plain_loop(tmp_path):
    assert_alike(run_on_ranks(trained, 1, doors=["ddp", "attach 2", "attach 3"], resume_in=str(tmp_path)))


class ClearsTheHead(TrainerCallback):
    """Trainer clears the model's gradients alone. sentence-transformers clears those of losses in this way."""

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        optimizer.zero_grad()


class TrainerWithHead(Trainer):
    """Its loss has a head that learns, and a guide that does not."""

    def create_optimizer(self, model=None):
        with torch.random.fork_rng():
            torch.manual_seed(self.head_seed)
            self.head, self.guide = nn.Linear(VOCABULARY, 2), nn.Linear(VOCABULARY, 2)
        self.optimizer = torch.optim.AdamW(
            [*self.model.parameters(), *self.head.parameters(), *self.guide.parameters()], lr=1e-3
        )
        if isinstance(self.accelerator, ZeroAcceleratorMixin) or self.args.world_size == 1:
            return self.optimizer
        self.optimizer.register_step_pre_hook(self._average)
        return self.optimizer

    def _average(self, *_args: object) -> None:
        """DDP leaves a head outside of the model to each rank. Inside of the model, DDP would average its gradients so."""
        for parameter in self.head.parameters():
            dist.all_reduce(parameter.grad.div_(2))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs)
        return output.loss + self.head(output.logits).square().mean()


def trained_by_trainer(rank: int, world_size: int, door: str, folder: str) -> list[dict]:
    """Histories and the heads of a run of four steps, and of one that goes on from its second step."""
    as_launched(rank, world_size)
    seen = []
    for resume in (None, f"{folder}/checkpoint-2"):
        if resume is not None and door == "ddp":
            break
        trainer = make_trainer(
            door,
            "gpt2",
            folder,
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            dropout=0.0,
            trainer_class=TrainerWithHead,
            callbacks=[ClearsTheHead()],
        )
        # A run that goes on draws another head, and the checkpoint has the trained one.
        trainer.head_seed = 0 if resume is None else 17
        trainer.train(resume_from_checkpoint=resume)
        seen.append(history(trainer) | {name: value.tolist() for name, value in trainer.head.state_dict().items()})
        trainer.accelerator.free_memory()
    return seen


@pytest.mark.parametrize(
    "config",
    ["stage=3,checkpoint.layout=sharded", slow("stage=3"), slow("stage=2"), slow("stage=1,param_dtype=float32")],
)
def test_trainer_trains_the_head_of_a_loss_and_resumes_it(config, tmp_path):
    ddp = run_on_ranks(trained_by_trainer, door="ddp", folder=str(tmp_path / "ddp"))
    zero = run_on_ranks(trained_by_trainer, door=f"flag {config}", folder=str(tmp_path / "zero"))
    for rank, (expected,) in enumerate(ddp):
        for kind, values in expected.items():
            seen = [run[kind] for run in zero[rank]]
            # Norms are summed in another order.
            assert seen == [pytest.approx(values, rel=1e-6) if kind == "norms" else values] * 2, kind


@pytest.mark.parametrize("config", [slow("param_dtype=bfloat16"), slow("param_dtype=bfloat16,offload.optimizer=cpu")])
def test_a_head_with_a_master_is_resumed(config, tmp_path):
    for whole, resumed in run_on_ranks(trained_by_trainer, door=f"flag stage=2,{config}", folder=str(tmp_path)):
        assert whole == resumed


def in_an_order(rank: int, world_size: int, door: str, order: str, folder: str) -> list[float]:
    """Losses of two models that are prepared in some order, and saved."""
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True, kwargs_handlers=[UNUSED])
    torch.manual_seed(0)
    encoder, denoiser, teacher = bert().bert, Denoiser(), bert().bert.requires_grad_(False)
    biases = (
        [p for name, p in denoiser.named_parameters() if name.endswith("bias")] if order == "two optimizers" else []
    )
    held = {*biases}
    both = [p for p in (*denoiser.parameters(), *encoder.parameters()) if p not in held]
    both += list(teacher.parameters()) if order == "with a frozen model" else []
    optimizers = [torch.optim.AdamW(both, lr=1e-2)] + ([torch.optim.SGD(biases, lr=0.1)] if biases else [])
    if order == "apart, the optimizer first":
        optimizers = [accelerator.prepare(each) for each in optimizers]
        encoder, denoiser = accelerator.prepare(encoder), accelerator.prepare(denoiser)
    elif order == "one model late":
        denoiser, *optimizers = accelerator.prepare(denoiser, *optimizers)
        encoder = accelerator.prepare(encoder)
    else:
        if order == "with a frozen model" and door != "ddp":
            teacher = accelerator.prepare(teacher)
        denoiser, encoder, *optimizers = accelerator.prepare(denoiser, encoder, *optimizers)
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
        with torch.no_grad():
            wanted = teacher(ids).last_hidden_state[:, 0]
        noise = torch.randn(4, 24, generator=generator)
        loss = (denoiser(noise, encoder(ids).last_hidden_state[:, 0]) - wanted).square().mean()
        accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_model(denoiser, f"{folder}/denoiser")
    saved = accelerator.get_state_dict(encoder)
    accelerator.unwrap_model(encoder).save_pretrained(f"{folder}/encoder", state_dict=saved, is_main_process=rank == 0)
    return losses


@pytest.mark.parametrize(
    ("order", "stage"),
    [
        ("one model late", 3),
        ("two optimizers", 2),
        *short_rows(
            [
                ("apart, the optimizer first", 2),
                ("apart, the optimizer first", 3),
                ("one model late", 2),
                ("two optimizers", 3),
                ("with a frozen model", 2),
                ("with a frozen model", 3),
            ],
            [],
        ),
    ],
)
def test_models_are_prepared_in_any_order(order, stage, tmp_path):
    runs = {
        door: run_on_ranks(in_an_order, door=door, order=order, folder=str(tmp_path / door))
        for door in ("ddp", f"attach {stage}")
    }
    files = [sorted(tmp_path.glob(f"{door}/*/model.safetensors")) for door in runs]
    assert len(files[0]) == len(files[1]) == 2
    for expected, seen in zip(*files):
        assert expected.read_bytes() == seen.read_bytes(), seen
    assert runs["ddp"] == runs[f"attach {stage}"]


def unfrozen(
    rank: int, world_size: int, door: str, freezes: bool, settings: dict | None = None, zeroes: bool = True
) -> tuple:
    """Losses and weights of a model whose second block and head of a loss are added to the optimizer after two steps.

    Args:
        zeroes: zeroes the gradients of the parameters that no optimizer has yet, which sum up otherwise.
        settings: of SGD, which has the block from the start, with a rate of 0; else AdamW gets it later.
    """
    as_launched(rank, world_size)
    accelerator = make_accelerator(door, cpu=True, kwargs_handlers=[UNUSED])
    torch.manual_seed(0)
    model = Denoiser()
    block = list(model.blocks[1].parameters())
    rest = [p for p in model.parameters() if not any(p is each for each in block)]
    for parameter in block if freezes else ():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(rest, lr=1e-2)
    if settings is not None:
        optimizer = torch.optim.SGD(
            [{"params": rest}, *([{"params": block, "lr": 0.0}] if settings["early"] else [])], lr=0.1
        )
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(5):
        if step == 2 and settings is not None and settings["early"]:
            optimizer.param_groups[1]["lr"] = 0.2
        elif step == 2:
            for parameter in block:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": block, "lr": 0.2 if settings is not None else 3e-3})
        generator = torch.Generator().manual_seed(10 * step + rank)
        noise, text = torch.randn(2, 4, 24, generator=generator).to(next(model.parameters()).dtype)
        loss = model(noise, text).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        if zeroes:
            model.zero_grad()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = accelerator.get_state_dict(model)
    return losses, {name.removeprefix("module."): value.float().numpy() for name, value in state.items()}


@pytest.mark.parametrize(
    ("stage", "freezes"), short_rows([(1, True), (2, False), (2, True), (3, False), (3, True)], [(2, False), (3, True)])
)
def test_a_block_that_is_added_to_the_optimizer_in_training_is_trained_as_under_ddp(stage, freezes):
    ddp = run_on_ranks(unfrozen, door="ddp", freezes=False)
    zero = run_on_ranks(unfrozen, door=f"attach {stage}", freezes=freezes)
    assert [losses for losses, _ in zero] == [losses for losses, _ in ddp]
    assert zero[0][1].keys() == ddp[0][1].keys()
    assert all(np.array_equal(zero[0][1][name], values) for name, values in ddp[0][1].items())


@pytest.mark.parametrize("stage", short_of([0, 1, 2, 3], [3]))
def test_sums_of_a_block_in_no_optimizer_wait_for_its_optimizer_as_under_ddp(stage):
    ddp = run_on_ranks(unfrozen, door="ddp", freezes=False, zeroes=False)
    zero = run_on_ranks(unfrozen, door=f"attach {stage}", freezes=False, zeroes=False)
    assert [losses for losses, _ in zero] == [losses for losses, _ in ddp]
    # Earlier sums are added in another order.
    assert all(np.allclose(zero[0][1][name], values, rtol=1e-5, atol=1e-7) for name, values in ddp[0][1].items())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "config", ["stage=2,param_dtype=bfloat16", "stage=3,param_dtype=bfloat16,offload.optimizer=cpu"]
)
def test_masters_go_on_when_a_block_is_added(config, world_size):
    runs = [
        run_on_ranks(unfrozen, world_size, door=f"plugin {config}", freezes=False, settings={"early": early})
        for early in (True, False)
    ]
    assert [losses for losses, _ in runs[0]] == [losses for losses, _ in runs[1]]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_one_rank_trains_a_model_and_a_head_of_another_dtype(dtypes):
    # One has masters and the other has none.
    torch.manual_seed(0)
    model, head = (nn.Linear(4, 4, dtype=dtype) for dtype in dtypes)
    before = [p.detach().clone() for p in (*model.parameters(), *head.parameters())]
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.5)
    ZeroEngine(model, optimizer, 2)
    hidden = model(torch.ones(2, 4, dtype=dtypes[0]))
    head(hidden.to(dtypes[1])).sum().backward()
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip((*model.parameters(), *head.parameters()), before))
