"""Models and losses of sentence-transformers at every stage: losses and saved weights next to DDP's.

    python scripts/bench/encoders.py                             # into outputs/bench/encoders.json, in about half an hour
    python scripts/bench/encoders.py --cells triplet splade --ranks 2 --stages 3
    python scripts/bench/encoders.py --json scripts/bench/results/encoders.json

Gloo ranks on this machine, random models of one layer, three steps of AdamW with dropout, no network. Each cell trains with DDP
and with each stage in fresh ranks, saves the model, and loads it by its own class. "by hand" instead of DDP averages all
gradients
before each step: DDP does not average the gradients of a loss's own parameters, and averages none if a loss calls the model
inside of DDP's wrapper. An existing file keeps its other rows.

Exits with status 1 if a cell has failed: a loss further away than 1e-6 on two ranks, or than 1e-12 in float64 on three, other
weights, or an error.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

import ranks
import torch
import torch.distributed as dist
from harness import ROOT, describe_run, on_ranks, read_options, write_record
from torch import nn

_LIMIT_S = 280  # limit for one start of ranks, on a machine with other work
_STEPS, _BATCH, _WORDS, _WIDTH = 3, 4, 60, 24
_NEAR_ON_MORE, _NEAR_IN_FLOAT64 = 1e-5, 1e-12
"""On more than two ranks, sums of gradients are rounded in a different order from DDP's, so the same cell also trains in float64,
where losses that differ by rounding only are equal to this number."""


class Cell(NamedTuple):
    """A combination of model, loss and data.

    Attributes:
        kind: kind of the model, a name of `MODELS`.
        loss: makes the loss from (module of the kind's losses, model, its folder).
        rows: a name of `ROWS`.
        reference: the reference run: `ddp`, or `by hand` if DDP computes a different average.
        note: the reason for `by hand`.
        settings: of the engine, in addition to the stage.
        near: allowed difference of losses and weights to the reference on two ranks.
        without_gradient: end of the name of a weight whose exact gradient is zero. AdamW turns its rounding error into steps of
            up to the learning rate, so on more than two ranks the weight is not compared.
        has_float64: False if the loss makes float32 tensors of its own, so it cannot run in float64.
    """

    kind: str
    loss: Callable[[Any, Any, str], Any]
    rows: str
    reference: str = "ddp"
    note: str = ""
    settings: str = ""
    near: float = 1e-6
    without_gradient: str | None = None
    has_float64: bool = True


_OWN = "DDP does not average gradients of the loss's parameters: each rank trains its own"
_OF_SCORES: dict[str, Any] = {"without_gradient": "classifier.bias", "has_float64": False}
_INSIDE = "the loss calls the model inside of DDP's, so that DDP averages nothing"
_ONCE = "grad_accumulation=local"
"""Mini-batches of a cached loss are added up before their reduction, as DDP does."""


def _guide(folder: str) -> Any:
    guide = make_bi(folder)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return guide


def _splade(
    losses: Any,
    model: Any,
    kind: str = "SpladeLoss",
    inner: str = "SparseMultipleNegativesRankingLoss",
    **settings: Any,
) -> Any:
    weights = {"document_regularizer_weight": 3e-3, "query_regularizer_weight": 5e-3}
    return getattr(losses, kind)(model, getattr(losses, inner)(model), **weights, **settings)


def _of(name: str, **settings: Any) -> Callable[[Any, Any, str], Any]:
    return lambda losses, model, folder: getattr(losses, name)(model, **settings)


def _matryoshka(losses: Any, model: Any, folder: str, inner: str = "MultipleNegativesRankingLoss") -> Any:
    return losses.MatryoshkaLoss(model, getattr(losses, inner)(model), [_WIDTH, _WIDTH // 2, _WIDTH // 4])


CELLS = {
    # Bi-encoders
    "MultipleNegativesRanking": Cell("bi", _of("MultipleNegativesRankingLoss"), "triplets"),
    "MultipleNegativesRanking, gathered": Cell(
        "bi", _of("MultipleNegativesRankingLoss", gather_across_devices=True), "triplets"
    ),
    "CachedMultipleNegativesRanking": Cell(
        "bi", _of("CachedMultipleNegativesRankingLoss", mini_batch_size=2), "triplets", settings=_ONCE
    ),
    "CachedMultipleNegativesRanking, reduced in shards": Cell(
        # Each mini-batch is reduced separately, so sums are rounded in a different order.
        *("bi", _of("CachedMultipleNegativesRankingLoss", mini_batch_size=2), "triplets"),
        near=1e-5,
    ),
    "CachedMultipleNegativesRanking, gathered": Cell(
        "bi",
        _of("CachedMultipleNegativesRankingLoss", mini_batch_size=2, gather_across_devices=True),
        "triplets",
        settings=_ONCE,
    ),
    "GISTEmbed": Cell("bi", lambda losses, model, folder: losses.GISTEmbedLoss(model, _guide(folder)), "triplets"),
    "CachedGISTEmbed, gathered": Cell(
        "bi",
        lambda losses, model, folder: losses.CachedGISTEmbedLoss(
            model, _guide(folder), mini_batch_size=2, gather_across_devices=True
        ),
        "triplets",
        settings=_ONCE,
    ),
    "Matryoshka": Cell("bi", _matryoshka, "triplets"),
    "Matryoshka, cached": Cell(
        "bi", partial(_matryoshka, inner="CachedMultipleNegativesRankingLoss"), "triplets", settings=_ONCE
    ),
    "AdaptiveLayer": Cell(
        "bi",
        lambda losses, model, folder: losses.AdaptiveLayerLoss(model, losses.MultipleNegativesRankingLoss(model)),
        "triplets",
    ),
    "MarginMSE": Cell("bi", _of("MarginMSELoss"), "scored triplets"),
    # This loss, and BatchAllTriplet, depend only on differences of embeddings, in which the last bias cancels.
    "Triplet": Cell("bi", _of("TripletLoss"), "triplets", without_gradient="layer.1.output.LayerNorm.bias"),
    "BatchAllTriplet": Cell(
        *("bi", _of("BatchAllTripletLoss"), "classes", "by hand", _INSIDE),
        without_gradient="layer.1.output.LayerNorm.bias",
    ),
    "CoSENT": Cell("bi", _of("CoSENTLoss"), "scored pairs"),
    "CosineSimilarity": Cell("bi", _of("CosineSimilarityLoss"), "scored pairs"),
    "ContrastiveTension": Cell("bi", _of("ContrastiveTensionLoss"), "binary pairs", "by hand", _OWN),
    "DistillKLDiv": Cell("bi", _of("DistillKLDivLoss"), "scores of documents"),
    "Softmax": Cell(
        "bi", _of("SoftmaxLoss", embedding_dimension=_WIDTH, num_labels=3), "classified pairs", "by hand", _OWN
    ),
    "MSE": Cell("bi", _of("MSELoss"), "embeddings"),
    "MSE, projection_dim": Cell("bi", _of("MSELoss", projection_dim=2 * _WIDTH), "wide embeddings", "by hand", _OWN),
    # Cross-encoders
    "BinaryCrossEntropy": Cell("cross", _of("BinaryCrossEntropyLoss"), "binary pairs"),
    "MultipleNegativesRanking, cross": Cell("cross", _of("MultipleNegativesRankingLoss", num_negatives=2), "pairs"),
    "CachedMultipleNegativesRanking, cross": Cell(
        "cross",
        _of("CachedMultipleNegativesRankingLoss", num_negatives=2, mini_batch_size=4),
        "pairs",
        settings=_ONCE,
    ),
    "MarginMSE, cross": Cell("cross", _of("MarginMSELoss"), "scored triplets"),
    # These losses depend only on differences of scores, in which the last bias cancels.
    "ListNet": Cell("cross", _of("ListNetLoss"), "lists", **_OF_SCORES),
    "LambdaLoss": Cell("cross", _of("LambdaLoss"), "lists", **_OF_SCORES),
    "LambdaLoss, mini-batches": Cell("cross", _of("LambdaLoss", mini_batch_size=2), "lists", **_OF_SCORES),
    # Sparse encoders
    "Splade": Cell("sparse", lambda losses, model, folder: _splade(losses, model), "triplets"),
    "CachedSplade": Cell(
        "sparse",
        lambda losses, model, folder: _splade(losses, model, "CachedSpladeLoss", mini_batch_size=2),
        "triplets",
        settings=_ONCE,
    ),
    "Splade, SparseMarginMSE": Cell(
        "sparse",
        lambda losses, model, folder: _splade(losses, model, inner="SparseMarginMSELoss"),
        "scored triplets",
    ),
    # Multi-vector encoders
    "MultiVectorMultipleNegativesRanking, gathered": Cell(
        "multi", _of("MultiVectorMultipleNegativesRankingLoss", gather_across_devices=True), "triplets"
    ),
    "CachedMultiVectorMultipleNegativesRanking, gathered": Cell(
        "multi",
        _of("CachedMultiVectorMultipleNegativesRankingLoss", mini_batch_size=2, gather_across_devices=True),
        "triplets",
        settings=_ONCE,
    ),
    "MultiVectorDistillKLDiv": Cell("multi", _of("MultiVectorDistillKLDivLoss"), "scores of documents"),
    "MultiVectorMarginMSE": Cell("multi", _of("MultiVectorMarginMSELoss"), "scored triplets"),
    # Related packages
    "spans and labels, as GLiNER": Cell("spans", lambda losses, model, folder: None, "spans"),
    "SetFit": Cell("setfit", lambda losses, model, folder: None, "classes"),
}

# ---- models and data, random ----


def _as_launched(rank: int, world_size: int, *, is_quiet: bool) -> None:
    """Sets the variables of a launcher. The ranks are connected already, and accelerate only looks for an address."""
    # sentence-transformers and Trainer's DDP use deprecated names of torch, and a test's ranks raise for such warnings.
    warnings.simplefilter("ignore", FutureWarning)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    from transformers.utils import logging

    logging.disable_progress_bar()
    if is_quiet:
        # Suppress reports of loaded weights.
        logging.set_verbosity_error()
    else:
        # With the engine's forecast, which takes as much time as the training here.
        getLogger("hf_zero").setLevel("INFO")


def write_bert(folder: str | Path) -> None:
    """Writes a random BERT of one layer and a tokenizer of words, in the format of `from_pretrained`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: index for index, word in enumerate([*special, *(f"w{number}" for number in range(_WORDS))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special))
    # Longer than the default lengths of queries and documents in a multi-vector encoder.
    longest = 320
    PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=longest, **names).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": _WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * _WIDTH}
    BertForMaskedLM(BertConfig(vocab_size=len(words), max_position_embeddings=longest, **sizes)).save_pretrained(folder)


def make_bi(folder: str) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    # The file has no pooler weights, so they are drawn here.
    torch.manual_seed(0)
    return SentenceTransformer(modules=[Transformer(folder), Pooling(_WIDTH)], device="cpu")


def _make_cross(folder: str) -> Any:
    from sentence_transformers import CrossEncoder

    torch.manual_seed(0)
    return CrossEncoder(folder, num_labels=1, device="cpu")


def _make_sparse(folder: str) -> Any:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer

    return SparseEncoder(
        modules=[Transformer(folder, transformer_task="fill-mask"), SpladePooling("max")], device="cpu"
    )


def _make_multi(folder: str) -> Any:
    from sentence_transformers import MultiVectorEncoder

    torch.manual_seed(0)
    return MultiVectorEncoder(folder, device="cpu")


class Spans(nn.Module):
    """Scores each span of words for each label, both read by one encoder, like GLiNER's models."""

    def __init__(self, folder: str, most_words: int = 2):
        from transformers import AutoModel

        super().__init__()
        torch.manual_seed(0)
        self.encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False)
        self.most_words = most_words
        self.start, self.end = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.out = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * _WIDTH, _WIDTH))
        self.label = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, input_ids: torch.Tensor, label_ids: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        words = self.encoder(input_ids).last_hidden_state
        labels = self.label(self.encoder(label_ids).last_hidden_state[:, 0])
        start, end = self.start(words), self.end(words)
        spans = [self.out(torch.cat([start, end.roll(-length, dims=1)], dim=-1)) for length in range(self.most_words)]
        scores = torch.einsum("nbwd,ld->bwnl", torch.stack(spans), labels)
        return {"loss": nn.functional.binary_cross_entropy_with_logits(scores, targets), "logits": scores}


MODELS: dict[str, tuple[Callable[[str], Any], str]] = {
    "bi": (make_bi, "SentenceTransformer"),
    "cross": (_make_cross, "CrossEncoder"),
    "sparse": (_make_sparse, "SparseEncoder"),
    "multi": (_make_multi, "MultiVectorEncoder"),
    "spans": (Spans, ""),
}
"""Kind of a model → the function to make it, and its class in sentence-transformers to load its saves."""

_PACKAGES = {
    "bi": "sentence_transformer",
    "cross": "cross_encoder",
    "sparse": "sparse_encoder",
    "multi": "multi_vector_encoder",
}


def _rows(kind: str, count: int = 48) -> Any:
    from datasets import Dataset

    generator = torch.Generator().manual_seed(5)

    def text() -> str:
        # Draw texts of several lengths, so that ranks pad to different ones.
        length = int(torch.randint(3, 9, (1,), generator=generator))
        return " ".join(f"w{int(each)}" for each in torch.randint(0, _WORDS, (length,), generator=generator))

    def number() -> float:
        return float(torch.rand(1, generator=generator))

    def numbers(how_many: int) -> list[float]:
        return torch.randn(how_many, generator=generator).tolist()

    makers: dict[str, Callable[[int], dict[str, Any]]] = {
        "pairs": lambda index: {"anchor": text(), "positive": text()},
        "triplets": lambda index: {"anchor": text(), "positive": text(), "negative": text()},
        "scored triplets": lambda index: {"anchor": text(), "positive": text(), "negative": text(), "label": number()},
        "scored pairs": lambda index: {"a": text(), "b": text(), "label": number()},
        "binary pairs": lambda index: {"a": text(), "b": text(), "label": float(index % 2)},
        "classified pairs": lambda index: {"a": text(), "b": text(), "label": index % 3},
        "classes": lambda index: {"text": text(), "label": index % 2},
        "scores of documents": lambda index: {"query": text(), "one": text(), "two": text(), "label": numbers(2)},
        "embeddings": lambda index: {"text": text(), "label": numbers(_WIDTH)},
        "wide embeddings": lambda index: {"text": text(), "label": numbers(2 * _WIDTH)},
        "lists": lambda index: {
            "query": text(),
            "docs": [text() for _ in range(2 + index % 2)],
            "labels": [float(place == 0) for place in range(2 + index % 2)],
        },
        "spans": lambda index: {
            "input_ids": torch.randint(5, _WORDS, (8,), generator=generator).tolist(),
            "targets": (torch.rand(8, 2, 3, generator=generator) > 0.8).float().tolist(),
        },
    }
    return Dataset.from_list([makers[kind](index) for index in range(count)])


# ---- one training, in each rank ----


class Trained(NamedTuple):
    """The results of one rank.

    Attributes:
        losses: of each micro-batch, on this rank.
        own: the loss's own parameters, by name.
        metrics: of evaluations.
        saved_bytes: the most that autograd held for backward at a time.
    """

    losses: list[float]
    own: dict[str, Any]
    metrics: list[dict[str, float]]
    saved_bytes: int


def _recording(trainer_class: type, seen: list[float], by_hand: bool) -> type:
    """Makes a Trainer class which notes each loss, and averages gradients before each step if requested."""

    class Recording(trainer_class):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.model.training:
                seen.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            optimizer = super().create_optimizer(*args, **kwargs)
            if by_hand:
                optimizer.register_step_pre_hook(_average)
            return optimizer

    return Recording


def _average(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


@contextmanager
def _saved_for_backward() -> Iterator[list[int]]:
    """Counts the bytes autograd saves, as long as they exist: [now, most]."""
    count = [0, 0]

    class Held:
        def __init__(self, tensor: torch.Tensor):
            self.tensor = tensor

    def forget(nbytes: int) -> None:
        count[0] -= nbytes

    def pack(tensor: torch.Tensor) -> Any:
        # Parameters exist all the time, so they do not count.
        if any(isinstance(each, nn.Parameter) for each in (tensor, tensor._base)):
            return tensor
        held = Held(tensor)
        count[0] += tensor.nbytes
        count[1] = max(count)
        weakref.finalize(held, forget, tensor.nbytes)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor if isinstance(held, Held) else held):
        yield count


def _arguments(kind: str, folder: str, **more: Any) -> Any:
    import sentence_transformers as st
    from transformers import TrainingArguments

    known: dict[str, Any] = {
        "bi": st.SentenceTransformerTrainingArguments,
        "cross": st.CrossEncoderTrainingArguments,
        "sparse": st.SparseEncoderTrainingArguments,
        "multi": st.MultiVectorEncoderTrainingArguments,
        "spans": TrainingArguments,
    }
    settings = {
        "output_dir": folder,
        "max_steps": _STEPS,
        "logging_steps": 1,
        "per_device_train_batch_size": _BATCH,
        "learning_rate": 1e-3,
        "seed": 3,
        # Clip above any norm: a clip that scales would add the squares of gradients in a different order from DDP.
        "max_grad_norm": 1e6,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    if kind == "cross":
        # A tokenizer's own dict class hides a cross-encoder's outputs from DDP. DDP would then treat all parameters as unused,
        # and raise "marked ready twice".
        settings["ddp_find_unused_parameters"] = False
    return known[kind](**settings | more)


def train(
    rank: int,
    world_size: int,
    name: str,
    door: str,
    start: str,
    folder: str,
    evaluates: bool = False,
    is_quiet: bool = True,
    in_float64: bool = False,
    **more: Any,
) -> Trained:
    """Trains a cell and saves its model to `folder`/model.

    Args:
        door: `ddp`, `by hand`, or settings of the engine.
        start: the folder of the random model.
        evaluates: by an evaluator after each step.
        in_float64: everything, from the same random numbers.
        more: training arguments.
    """
    _as_launched(rank, world_size, is_quiet=is_quiet)
    dtype = torch.float64 if in_float64 else torch.float32
    import sentence_transformers as st
    from transformers import Trainer

    import hf_zero

    cell = CELLS[name]
    if cell.kind == "setfit":
        return _train_setfit(rank, door, start, folder)
    callbacks = [] if door in ("ddp", "by hand") else [hf_zero.ZeroCallback(hf_zero.ZeroConfig.of(door))]
    if evaluates:
        more |= {"eval_strategy": "steps", "eval_steps": 1}
    arguments = _arguments(cell.kind, folder, **more)
    model = MODELS[cell.kind][0](start).to(dtype)
    seen: list[float] = []
    passed: dict[str, Any] = {}
    stock: type = Trainer
    if cell.kind == "spans":
        labels = torch.arange(5, 14).view(3, 3)
        passed["data_collator"] = lambda rows: {
            "label_ids": labels,
            **{each: torch.tensor([row[each] for row in rows]) for each in ("input_ids", "targets")},
        }
    else:
        losses = __import__(f"sentence_transformers.{_PACKAGES[cell.kind]}.losses", fromlist=["losses"])
        torch.manual_seed(2)
        passed["loss"] = cell.loss(losses, model, start).to(dtype)
        stock = getattr(st, f"{MODELS[cell.kind][1]}Trainer")
        if evaluates:
            passed["evaluator"] = _evaluator()
    trainer = _recording(stock, seen, door == "by hand")(
        model=model,
        args=arguments,
        train_dataset=_rows(cell.rows, _STEPS * world_size * arguments.per_device_train_batch_size),
        callbacks=callbacks,
        **passed,
    )
    # Labels become tensors of the default dtype.
    torch.set_default_dtype(dtype)
    if door == "by hand":
        trainer.accelerator.prepare_model = partial(trainer.accelerator.prepare_model, evaluation_mode=True)
    with _saved_for_backward() as saved:
        trainer.train()
    trainer.save_model(f"{folder}/model")
    metrics = [each for each in trainer.state.log_history if any("eval" in key for key in each)]
    if evaluates:
        with hf_zero.unsharded(trainer.model):
            # The script itself calls the evaluator, on one rank.
            metrics += [passed["evaluator"](model)] if rank == 0 else []
    if cell.kind == "spans":
        whole = trainer.accelerator.get_state_dict(trainer.model)
        if rank == 0:
            Path(f"{folder}/model").mkdir(exist_ok=True)
            torch.save(whole, f"{folder}/model/spans.pt")
    own = _own_parameters(passed.get("loss"), model)
    dist.barrier()
    return Trained(seen, own, metrics, saved[1])


def _own_parameters(loss: Any, model: Any) -> dict[str, Any]:
    """Returns the values of trained parameters which only the loss has."""
    if loss is None:
        return {}
    of_model = {id(each) for each in model.parameters()}
    return {
        name: value.detach().float().numpy().copy()
        for name, value in loss.named_parameters()
        if id(value) not in of_model and not name.startswith("guide.")
    }


def _evaluator() -> Any:
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    # Three texts per side: two ranks get different numbers of texts, and the third of three ranks gets one.
    rows = _rows("scored pairs", 3)
    return EmbeddingSimilarityEvaluator(rows["a"], rows["b"], rows["label"], batch_size=1)


def _train_setfit(rank: int, door: str, start: str, folder: str) -> Trained:
    import setfit

    import hf_zero

    model = setfit.SetFitModel(
        model_body=make_bi(start), model_head=setfit.SetFitHead(in_features=_WIDTH, out_features=2)
    )
    arguments = setfit.TrainingArguments(
        output_dir=folder, max_steps=_STEPS, batch_size=_BATCH, num_epochs=1, seed=3, report_to="none", use_amp=False
    )
    callbacks = [] if door in ("ddp", "by hand") else [hf_zero.ZeroCallback(hf_zero.ZeroConfig.of(door))]
    trainer = setfit.Trainer(model=model, args=arguments, train_dataset=_rows("classes", 16), callbacks=callbacks)
    seen: list[float] = []
    inner = trainer.st_trainer
    inner.__class__ = _recording(type(inner), seen, False)
    trainer.train()
    model.model_body.save_pretrained(f"{folder}/model")
    dist.barrier()
    return Trained(seen, {}, [], 0)


# ---- cells: compared with the reference ----


def _read(cell: Cell, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of a saved model, read by its class."""
    import sentence_transformers as st

    saved = folder / "model"
    if cell.kind == "spans":
        return torch.load(saved / "spans.pt", weights_only=True)
    kind = "SentenceTransformer" if cell.kind == "setfit" else MODELS[cell.kind][1]
    return getattr(st, kind)(str(saved), device="cpu").state_dict()


def _furthest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    return max(
        (float(abs(torch.as_tensor(found[name]) - torch.as_tensor(value)).max()) for name, value in expected.items()),
        default=0.0,
    )


def _compared(cell: Cell, world_size: int, weights: dict[str, Any]) -> dict[str, Any]:
    if world_size <= 2 or cell.without_gradient is None:
        return weights
    return {name: value for name, value in weights.items() if not name.endswith(cell.without_gradient)}


def _apart(found: list[Trained], expected: list[Trained]) -> float:
    pairs = [pair for each, other in zip(found, expected) for pair in zip(each.losses, other.losses, strict=True)]
    return max(abs(a - b) for a, b in pairs) if all(math.isfinite(a) for a, _ in pairs) else math.inf


def _stock(trained: Callable[[], Any], by_hand: list[Trained]) -> str:
    """Describes the result of stock DDP for a cell whose reference averages gradients by hand."""
    try:
        found, _ = trained()
    except Exception as raised:
        return str(raised)[-300:]
    return f"losses differ by {_apart(found, by_hand):.1e}"


def compare(name: str, world_size: int, stages: list[int], folder: Path) -> Iterator[dict[str, Any]]:
    """Trains a cell with its reference and at each stage; yields a row for each stage."""
    cell = CELLS[name]
    start = folder / "start"
    write_bert(start)

    def trained(door: str, **more: Any) -> tuple[list[Trained], dict[str, torch.Tensor]]:
        own = folder / f"{door.replace(' ', '-')}{more or ''}"
        own.mkdir()
        more |= {"name": name, "door": door, "start": str(start), "folder": str(own)}
        return on_ranks(train, world_size, limit_s=_LIMIT_S, **more), _read(cell, own)

    began_s = time.monotonic()
    expected, weights = trained(cell.reference)
    same = {"cell": name, "kind": cell.kind, "reference": cell.reference, "ranks": world_size}
    exact: list[Trained] = []
    if world_size > 2 and cell.kind != "setfit" and cell.has_float64:
        exact, _ = trained(cell.reference, in_float64=True)
        # Distance of the reference itself from its run in float64.
        same["rounding"] = _apart(expected, exact)
    if cell.reference != "ddp":
        same["ddp"] = _stock(partial(trained, "ddp"), expected)
    for stage in stages:
        row = {**same, "stage": stage}
        try:
            door = ",".join(filter(None, (f"stage={stage}", cell.settings)))
            found, ours = trained(door)
            if exact:
                row["float64_difference"] = _apart(trained(door, in_float64=True)[0], exact)
            row |= {
                "loss_difference": _apart(found, expected),
                "weight_difference": _furthest(*(_compared(cell, world_size, each) for each in (ours, weights))),
                "own_difference": _furthest(found[0].own, expected[0].own),
                "own_apart": max(_furthest(each.own, found[0].own) for each in found),
                "own_parameters": len(found[0].own),
                "error": None,
            }
        except Exception as raised:
            # Continue with the other cells; the exit status reports the failure.
            row["error"] = str(raised)[-3000:]
        yield row | {"outcome": _outcome(row), "seconds": round(time.monotonic() - began_s, 1)}
        began_s = time.monotonic()


def _outcome(row: dict[str, Any]) -> str:
    if row["error"] is not None:
        return "failed"
    near = CELLS[row["cell"]].near if row["ranks"] <= 2 else _NEAR_ON_MORE
    kinds = ("loss_difference", "weight_difference", "own_difference", "own_apart")
    is_near = all(row[kind] <= near for kind in kinds) and row.get("float64_difference", 0.0) <= _NEAR_IN_FLOAT64
    return "passed" if is_near else "differs"


def main(arguments: list[str] | None = None) -> int:
    options = read_options(__doc__, arguments, cells=list(CELLS), ranks=[2, 3], stages=[1, 2, 3])
    options.json = options.json or ROOT / "outputs" / "bench" / "encoders.json"
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    ranks.PRELOADED_MODULES += ["sentence_transformers", "transformers.models.bert.modeling_bert", "datasets"]
    kept = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    rows = {(row["cell"], row["ranks"], row["stage"]): row for row in kept}
    asked = []
    for world_size in options.ranks:
        for name in options.cells:
            with tempfile.TemporaryDirectory(prefix="encoders-") as folder:
                for row in compare(name, world_size, options.stages, Path(folder)):
                    asked.append(row)
                    rows[name, world_size, row["stage"]] = row
                    print({key: value for key, value in row.items() if value is not None}, flush=True)
                    # Write after each cell, so an interrupted run keeps the earlier ones.
                    write_record(options.json, {**describe_run(options), "kind": "encoders", "rows": [*rows.values()]})
    return int(any(row["outcome"] != "passed" for row in asked))


if __name__ == "__main__":
    sys.exit(main())
