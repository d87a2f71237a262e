"""Compares training under bf16 mixed precision at stage 3, which gathers in bfloat16, with DDP under autocast.

    python scripts/bench/bf16_ways.py PATH/TO/sst2              # two minutes on two cores
    python scripts/bench/bf16_ways.py PATH/TO/sst2 --steps 20   # does the harness run?

The folder contains `train.tsv` and `dev.tsv` of the Stanford Sentiment Treebank: each line is a sentence, a tab, and 0 or 1. A
small BERT learns them from scratch with accelerate and `mixed_precision="bf16"`, on two ranks, with three seeds: under DDP, at
stage 3, and at stage 3 with `param_dtype: float32`, which leaves the casts to autocast. Ways are compared by their curves of the
loss on the dev set, seed by seed. The difference between two seeds is the noise level.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from engines import say_where_ranks_are
from harness import RESULTS, describe_run, on_ranks, print_table, write_record
from ranks import PRELOADED_MODULES
from transformers import BertConfig, BertForSequenceClassification

BASELINE = "DDP, autocast"
WAYS = {
    BASELINE: None,
    "stage 3": {"stage": 3},
    "stage 3, param_dtype: float32": {"stage": 3, "param_dtype": "float32"},
}
WORLD_SIZE = 2
LENGTH = 32
PADDING, UNKNOWN = 0, 1
TIME_LIMIT_S = 300


@dataclass(frozen=True, kw_only=True)
class Run:
    """Length and size of a run."""

    steps: int = 200
    evaluate_every: int = 20
    batch_size: int = 16
    vocabulary: int = 4000
    width: int = 64
    layers: int = 2
    lr: float = 5e-4


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The results of one run: dev losses during training, and figures of its last step on rank 0.

    Attributes:
        sent_bytes: bytes of the last step, by collective; {} under DDP.
    """

    dev_losses: list[float]
    train_losses: list[float]
    dev_accuracy: float
    sent_bytes: dict[str, int]


def read(path: Path, words: dict[str, int] | None, size: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """Token ids (sentences, LENGTH), labels, and the vocabulary: `words`, or the `size` most frequent of this file."""
    rows = [line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if words is None:
        counts = Counter(word for sentence, _ in rows for word in sentence.split())
        words = {word: place + 2 for place, (word, _) in enumerate(counts.most_common(size - 2))}
    ids = torch.full((len(rows), LENGTH), PADDING)
    for row, (sentence, _) in enumerate(rows):
        found = [words.get(word, UNKNOWN) for word in sentence.split()[:LENGTH]]
        ids[row, : len(found)] = torch.tensor(found)
    return ids, torch.tensor([int(label) for _, label in rows]), words


def train(rank: int, world_size: int, folder: str, way: str, seed: int, run: Run) -> Curve:
    """Runs one training on a rank. With the same seed, every way has the same weights and batches."""
    say_where_ranks_are(rank, world_size)
    from accelerate import Accelerator

    from hf_zero import ZeroPlugin, engine_of

    torch.set_num_threads(1)
    ids, labels, words = read(Path(folder) / "train.tsv", None, run.vocabulary)
    dev_ids, dev_labels, _ = read(Path(folder) / "dev.tsv", words, run.vocabulary)
    settings = WAYS[way]
    plugin = {} if settings is None else {"parallelism_config": ZeroPlugin(**settings)}
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", **plugin)
    torch.manual_seed(seed)
    model = make_model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = None if settings is None else engine_of(accelerator.unwrap_model(model))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(1000 * seed + rank)
    train_losses, dev_losses, accuracy, sent = [], [], 0.0, {}
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = run.lr * min(1.0, (step + 1) / 25)
        first = (step * world_size + rank) * run.batch_size
        rows = order[torch.arange(first, first + run.batch_size) % len(order)]
        before = sent_bytes(engine)
        loss = model(**batch(ids[rows], labels[rows])).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sent = {kind: nbytes - before.get(kind, 0) for kind, nbytes in sent_bytes(engine).items()}
        train_losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if (step + 1) % run.evaluate_every == 0:
            dev_loss, accuracy = evaluate(model, dev_ids, dev_labels)
            dev_losses.append(dev_loss)
    return Curve(dev_losses=dev_losses, train_losses=train_losses, dev_accuracy=accuracy, sent_bytes=sent)


def make_model(run: Run) -> BertForSequenceClassification:
    sizes = {"vocab_size": run.vocabulary, "hidden_size": run.width, "intermediate_size": 4 * run.width}
    heads = {"num_hidden_layers": run.layers, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
    return BertForSequenceClassification(BertConfig(**sizes, **heads)).train()


def batch(ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": labels}


@torch.no_grad()
def evaluate(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Returns loss and accuracy on the dev set; every rank evaluates the whole set."""
    model.eval()
    outputs = [model(**batch(i, t)) for i, t in zip(ids.split(128), labels.split(128))]
    model.train()
    right = sum((out.logits.argmax(-1) == t).sum().item() for out, t in zip(outputs, labels.split(128)))
    loss = sum(out.loss.item() * len(t) for out, t in zip(outputs, labels.split(128)))
    return loss / len(labels), right / len(labels)


def sent_bytes(engine: Any) -> dict[str, int]:
    rows = () if engine is None else engine.comm_report().rows
    found: Counter[str] = Counter()
    for row in rows:
        found[row.kind] += row.bytes_sent
    return dict(found)


def distance(first: list[float], second: list[float]) -> float:
    """Returns the mean absolute difference of two curves."""
    return fmean(abs(a - b) for a, b in zip(first, second, strict=True))


def compare(curves: dict[str, list[Curve]]) -> dict[str, dict[str, float]]:
    """Returns for each way the mean distance to DDP's curve with the same seed, next to DDP's own between two seeds."""
    ddp = curves[BASELINE]
    noise = fmean(distance(a.dev_losses, b.dev_losses) for a, b in combinations(ddp, 2))
    found = {}
    for way, of_way in curves.items():
        distances = [distance(a.dev_losses, b.dev_losses) for a, b in zip(of_way, ddp)]
        offsets = [a - b for mine, theirs in zip(of_way, ddp) for a, b in zip(mine.dev_losses, theirs.dev_losses)]
        found[way] = {"mean_distance": fmean(distances), "mean_offset": fmean(offsets), "between_seeds": noise}
    return found


def show(curves: dict[str, list[Curve]], compared: dict[str, dict[str, float]]) -> None:
    columns = [
        ("way", "way"),
        ("dev loss at the end", lambda row: ", ".join(f"{curve.dev_losses[-1]:.4f}" for curve in row["curves"])),
        ("dev accuracy", lambda row: ", ".join(f"{curve.dev_accuracy:.1%}" for curve in row["curves"])),
        ("distance from DDP", lambda row: "{mean_distance:.4f} (offset {mean_offset:+.4f})".format(**row)),
        ("between seeds", "between_seeds", ".4f"),
        ("MB sent a step", lambda row: sum(row["curves"][0].sent_bytes.values()) or None, ".2f", 1e6),
    ]
    rows = ({"way": way, "curves": of_way} | compared[way] for way, of_way in curves.items())
    print_table("bf16 mixed precision: a small BERT on SST-2", columns, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with train.tsv and dev.tsv")
    parser.add_argument("--steps", type=int, default=Run.steps)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "bf16_ways.json")
    arguments = parser.parse_args()
    run = Run(steps=arguments.steps, evaluate_every=min(Run.evaluate_every, arguments.steps))
    PRELOADED_MODULES.extend(["accelerate", "transformers.models.bert.modeling_bert", "hf_zero.integrations.plugin"])
    # Leave out the folders, which only exist on this machine.
    about = describe_run(argparse.Namespace(steps=arguments.steps, seeds=arguments.seeds))
    curves: dict[str, list[Curve]] = {way: [] for way in WAYS}
    for seed in range(arguments.seeds):
        for way in WAYS:
            job = {"folder": str(arguments.folder), "way": way, "seed": seed, "run": run}
            curves[way].append(on_ranks(train, WORLD_SIZE, limit_s=TIME_LIMIT_S, **job)[0])
    compared = compare(curves)
    show(curves, compared)
    kept = {way: [asdict(curve) for curve in of_way] for way, of_way in curves.items()}
    write_record(arguments.out, {"run": about | asdict(run), "compared": compared, "curves": kept})
    print(f"kept in {arguments.out}")
    # Pass if no way is farther from DDP than DDP with another seed.
    return int(any(found["mean_distance"] > found["between_seeds"] for found in compared.values()))


if __name__ == "__main__":
    sys.exit(main())
