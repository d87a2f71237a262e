"""Parts of other packages that need less memory in addition to the state: losses in chunks, and kept logits.

They read a head's weight outside of the head's forward, and again in backward. Losses are those of DDP with the same part.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import slow
from shared_ranks import run_on_ranks, shared_ranks
from stage3_runs import FAR_AHEAD, KEPT, NOT_AHEAD, SHARDED, Run, same_as_ddp
from torch import nn
from torch.nn import functional as F
from training import LENGTH, gpt2, llama
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from triton_interpreter import interpret

pytestmark = pytest.mark.timeout(300)

BELOW = [{**SHARDED, "stage": stage} for stage in (1, 2)]
ELSEWHERE = [
    {**SHARDED, "offload": {"optimizer": "nvme", "params": "nvme"}},
    {**SHARDED, "offload": {"optimizer": "cpu", "params": "cpu"}},
    {**SHARDED, "offload": {"activations": "cpu"}},
    {**BELOW[1], "offload": {"optimizer": "nvme"}},
]


def in_folder(settings: dict, folder: Path) -> dict:
    offload = settings.get("offload", {})
    return {**settings, "offload": {**offload, "nvme_path": str(folder)}} if "nvme" in offload.values() else settings


# ---- losses in chunks ----


class Tile(torch.autograd.Function):
    """The loss of some tokens. Neither the logits nor their gradients are kept: backward computes them again."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        return F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        hidden, weight, labels = ctx.saved_tensors
        ahead = torch.softmax(hidden @ weight.t(), -1) - F.one_hot(labels, weight.shape[0])
        return gradient * (ahead @ weight), gradient * (ahead.t() @ hidden), None


def in_tiles(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    tiles = zip(hidden.split(7), labels.split(7))
    return sum(Tile.apply(part, weight, of_part) for part, of_part in tiles) / labels.numel()


def by_torch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=7, chunking_method=None)
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


def read_head(make: Callable[[], nn.Module], loss: Callable[..., torch.Tensor]) -> nn.Module:
    """A model whose forward reads the weight of its head, and does not call the head."""
    model = make()

    def forward(input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        hidden = model.base_model(input_ids=input_ids).last_hidden_state[:, :-1].flatten(0, 1)
        return CausalLMOutput(loss=loss(hidden, model.lm_head.weight, labels[:, 1:].flatten()))

    model.forward = forward
    return model


def tied_llama() -> nn.Module:
    model = llama()
    model.config.tie_word_embeddings = True
    tied = LlamaForCausalLM(model.config)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    return tied


def steps_and_evaluates(run: Run) -> None:
    run.step()
    run.step()
    with torch.no_grad():
        run.seen.append(run.entry(**run.batch()).loss.item())
    run.step()


def frozen(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    model.lm_head.weight.requires_grad_(False)
    return model


HEADS = {"tied": gpt2, "apart": llama, "tied llama": tied_llama, "frozen": partial(frozen, llama)}
LOSSES = {"tiles": in_tiles, "torch": by_torch}


def compare(rank: int, world_size: int, *, head: str, loss: str, variants: list[dict]) -> None:
    same_as_ddp(rank, world_size, steps_and_evaluates, variants, make=partial(read_head, HEADS[head], LOSSES[loss]))


@pytest.mark.parametrize(
    ("head", "loss", "variants"),
    [
        ("tied", "tiles", [SHARDED]),
        slow("apart", "tiles", [*BELOW, SHARDED, *ELSEWHERE]),
        *(
            slow(head, loss, [*BELOW, SHARDED, KEPT, NOT_AHEAD, FAR_AHEAD, *ELSEWHERE])
            for head in HEADS
            for loss in LOSSES
        ),
    ],
)
def test_a_loss_in_chunks_reads_the_weight_of_the_head(head, loss, variants, tmp_path):
    if loss == "torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch has linear_cross_entropy from 2.13 on")
    variants = [in_folder(settings, tmp_path) for settings in variants]
    shared_ranks.run(compare, head=head, loss=loss, variants=variants)


def keeps_some_logits(run: Run) -> None:
    """As a loop over prompts and completions does: logits of the completion alone."""
    for _ in range(3):
        batch = run.batch()
        kept = LENGTH // 2
        loss = run.entry(input_ids=batch["input_ids"], labels=batch["labels"][:, -kept:], logits_to_keep=kept).loss
        loss.backward()
        run.seen.append(loss.item())
        run.optimizer.step()
        run.optimizer.zero_grad()


def compare_kept(rank: int, world_size: int, *, variants: list[dict]) -> None:
    same_as_ddp(rank, world_size, keeps_some_logits, variants, make=gpt2)


@pytest.mark.slow
def test_logits_of_some_tokens_are_kept(tmp_path):
    shared_ranks.run(compare_kept, variants=[BELOW[1], SHARDED, in_folder(ELSEWHERE[0], tmp_path)])


# ---- Liger ----


def ligers_losses(rank: int, world_size: int, *, settings: list[dict | None]) -> list[list[float]]:
    interpret()
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    def patched() -> nn.Module:
        model = llama()
        # The loss alone: each of Liger's other kernels takes the interpreter a minute.
        _apply_liger_kernel_to_instance(model=model, rope=False, rms_norm=False, swiglu=False)
        return model

    found = []
    for each in settings:
        run = Run(rank, patched, each)
        run.step()
        run.step()
        found.append(run.seen)
    return found


@pytest.mark.slow
def test_ligers_fused_loss_trains_in_tritons_interpreter(tmp_path):
    pytest.importorskip("liger_kernel", reason="liger-kernel is not among the tests' packages")
    pytest.importorskip("triton", reason="Liger's kernels are Triton's")
    settings = [None, *BELOW, SHARDED, *(in_folder(each, tmp_path) for each in ELSEWHERE)]
    for ddp, *ours in run_on_ranks(ligers_losses, settings=settings):
        assert ours == [ddp] * len(ours)
