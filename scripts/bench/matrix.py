"""Tests every way in and every save with the installed releases: losses and saved weights next to DDP's.

    python scripts/bench/matrix.py oldest                            # under this name, into outputs/bench/matrix.json
    python scripts/bench/matrix.py oldest --parts plugin flag        # two of its parts
    python scripts/bench/matrix.py oldest --json scripts/bench/results/matrix.json

Two gloo ranks on this machine, tiny models, four steps: a minute of CPU time. `scripts/matrix.sh` makes the environments and
runs this script in each. An existing file keeps its other rows, and a row of the same releases keeps its other parts.

Exits with status 1 if a part has failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import ranks
import torch
from harness import ROOT, describe_run, on_ranks, read_options, write_record
from tables import report_of

_STEPS, _SAVED = 4, 2
_LIMIT_S = 280  # limit for one start of ranks, on a machine with other work
_VOCABULARY = 60
_COMMAND = [sys.executable, "-c", "from hf_zero.cli.app import main; main()"]
_SCRIPTS = ROOT / "tests" / "run" / "scripts"
_ARGUMENTS = {
    "max_steps": _STEPS,
    "save_steps": _SAVED,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "seed": 3,
    # Clip above any norm: a clip that scales would add the squares of gradients in a different order from DDP.
    "max_grad_norm": 100.0,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
}


class Trained(NamedTuple):
    """Losses of the steps on rank 0, and a digest of the saved weights."""

    losses: list[float]
    weights: str


# ---- jobs, each run by two ranks ----


def _as_launched(rank: int, world_size: int) -> None:
    """Sets the variables of a launcher. The ranks are connected already, and accelerate only looks for an address."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": _VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 32}
    # No dropout: a resumed loop has a different random state, because a data loader draws from it when it begins.
    sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0))


def _texts(rows: int = 64) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, _VOCABULARY, (rows, 16), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{number}": number for number in range(3, _VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        found.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def _saved_weights(folder: Path) -> str:
    """Returns the digest of all safetensors files in a model's folder and its subfolders, by the names of the weights."""
    from safetensors.torch import load_file

    files = [path for path in sorted(folder.rglob("*.safetensors")) if "checkpoint-" not in str(path)]
    assert files, f"no weights were saved in {folder}"
    return _digest({name: tensor for path in files for name, tensor in load_file(path).items()})


def _run_trainer(trainer: Any, folder: str, resume: str | None = None) -> Trained:
    trainer.train(resume_from_checkpoint=resume)
    saved = Path(folder) / "model"
    trainer.save_model(str(saved))
    torch.distributed.barrier()
    return Trained([each["loss"] for each in trainer.state.log_history if "loss" in each], _saved_weights(saved))


def _opened(door: str, arguments_class: type, folder: str) -> tuple[Any, list[Any]]:
    """Returns the training arguments and callbacks of a way in: "", `flag SETTINGS` or `callback SETTINGS`."""
    import hf_zero

    kind, _, settings = door.partition(" ")
    arguments = {**_ARGUMENTS, "output_dir": folder}
    if kind == "flag":
        return hf_zero.with_zero(arguments_class)(zero=settings, **arguments), []
    callbacks = [hf_zero.ZeroCallback(hf_zero.ZeroConfig.of(settings))] if kind else []
    return arguments_class(**arguments), callbacks


def train_trainer(rank: int, world_size: int, folder: str, door: str, resume: str | None, adapts: bool) -> Trained:
    _as_launched(rank, world_size)
    from transformers import Trainer, TrainingArguments

    arguments, callbacks = _opened(door, TrainingArguments, folder)
    model = _gpt2()
    if adapts:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        targets = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **targets))
    return _run_trainer(
        Trainer(model=model, args=arguments, train_dataset=_texts(), callbacks=callbacks), folder, resume
    )


def train_sft(rank: int, world_size: int, folder: str, door: str, resume: str | None) -> Trained:
    _as_launched(rank, world_size)
    import trl
    from datasets import Dataset

    arguments, callbacks = _opened(door, trl.SFTConfig, folder)
    rows = Dataset.from_list([{"text": " ".join(f"w{each}" for each in row["input_ids"].tolist())} for row in _texts()])
    words = {"processing_class": _tokenizer(), "train_dataset": rows}
    return _run_trainer(trl.SFTTrainer(model=_gpt2(), args=arguments, callbacks=callbacks, **words), folder, resume)


def train_sentences(rank: int, world_size: int, folder: str, door: str, resume: str | None) -> Trained:
    _as_launched(rank, world_size)
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.losses import CosineSimilarityLoss
    from transformers import BertConfig, BertModel

    plain = Path(folder) / "plain"
    if rank == 0:
        torch.manual_seed(0)
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        BertModel(BertConfig(vocab_size=_VOCABULARY, **sizes)).save_pretrained(plain)
        _tokenizer().save_pretrained(plain)
    torch.distributed.barrier()
    arguments, callbacks = _opened(door, st.SentenceTransformerTrainingArguments, folder)
    model = st.SentenceTransformer(str(plain), device="cpu")
    pairs = [" ".join(f"w{each}" for each in row["input_ids"].tolist()) for row in _texts()]
    rows = Dataset.from_dict({"a": pairs, "b": pairs[::-1], "score": [place % 3 / 2 for place in range(len(pairs))]})
    loss = CosineSimilarityLoss(model)
    trainer = st.SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=rows, loss=loss, callbacks=callbacks
    )
    return _run_trainer(trainer, folder, resume)


def train_loop(rank: int, world_size: int, folder: str, door: str, resume: str | None, sp_size: int = 1) -> Trained:
    """Runs a loop of accelerate, which saves its state after two steps, or resumes from this state."""
    _as_launched(rank, world_size)
    from accelerate import Accelerator

    import hf_zero

    plugin = hf_zero.ZeroPlugin(hf_zero.ZeroConfig.of(door), sp_size=sp_size) if door else None
    accelerator = Accelerator(parallelism_config=plugin)
    model = _gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(_texts(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(resume)
        loader = accelerator.skip_first_batches(loader, _SAVED)
    losses: list[float] = []
    for step, batch in enumerate(loader, 1 + (_SAVED if resume else 0)):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == _SAVED:
            accelerator.save_state(f"{folder}/state")
        if step == _STEPS:
            break
    accelerator.save_model(model, f"{folder}/model")
    accelerator.wait_for_everyone()
    return Trained(losses, _saved_weights(Path(folder) / "model"))


def train_alone(rank: int, world_size: int, folder: str, door: str, resume: str | None) -> Trained:
    """Runs a loop on torch.distributed. `resume` is a checkpoint of the model only."""
    from hf_zero import ZeroEngine

    model = _gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped = model if door else torch.nn.parallel.DistributedDataParallel(model)
    engine = ZeroEngine(model, [optimizer], door) if door else None
    losses: list[float] = []
    rows = torch.stack([row["input_ids"] for row in _texts()])[rank::world_size]
    for ids in rows.split(4)[:_STEPS]:
        loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = _digest({name: value.clone() for name, value in model.state_dict().items()})
    if engine is not None:
        engine.close()
    return Trained(losses, weights)


def run_stock(rank: int, world_size: int, script: str, words: list[str]) -> None:
    """Runs a script under DDP."""
    _as_launched(rank, world_size)
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


# ---- parts: a way in with its saves, and its comparison ----


def _trained(
    job: Callable[..., Trained], folder: Path, door: str, resume: str | None = None, world_size: int = 2, **more: Any
) -> Trained:
    folder.mkdir(parents=True, exist_ok=True)
    said = {"folder": str(folder), "door": door, "resume": resume, **more}
    return on_ranks(job, world_size, limit_s=_LIMIT_S, **said)[0]


def _same(what: str, found: Any, stock: Any) -> None:
    assert found == stock, f"{what}: {found}, and {stock} under DDP"


def _compare(job: Callable[..., Trained], folder: Path, doors: tuple[str, ...], state: str, **more: Any) -> None:
    """Asserts that losses and saved weights of each way in equal DDP's, also after a resume from the state at step two."""
    stock = _trained(job, folder / "stock", "", **more)
    assert len(stock.losses) == _STEPS, stock
    for place, door in enumerate(doors):
        ours = folder / f"ours{place}"
        _same(door, _trained(job, ours, door, **more), stock)
        if state:
            resumed = _trained(job, ours, door, str(ours / state), **more)
            _same(
                f"{door}, resumed",
                (resumed.losses[-(_STEPS - _SAVED) :], resumed.weights),
                (stock.losses[_SAVED:], stock.weights),
            )


def _consolidated(source: Path, folder: Path) -> str:
    """Runs `hf-zero consolidate` on a checkpoint; returns the digest of the model folder."""
    command = [*_COMMAND, "consolidate", str(source), str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return _saved_weights(folder)


_NEAR = 1e-5
_WHOLE, _SHARDED = "stage=2", "stage=3,checkpoint.layout=sharded"


def run_unmodified(folder: Path) -> None:
    """Tests `hf-zero run`, in new interpreters and with accelerate's launcher."""
    script, losses = str(_SCRIPTS / "trainers.py"), {}
    for zero in (None, "stage=2"):
        out = folder / str(zero)
        words = ["--kind", "subclass", "--losses", f"{out}.json", "--output_dir", str(out)]
        words += [word for name, value in _ARGUMENTS.items() for word in (f"--{name}", str(value))]
        if zero is None:
            on_ranks(run_stock, 2, limit_s=_LIMIT_S, script=script, words=words)
        else:
            launched = ["run", "--zero", zero, "--cpu", "--num-processes", "2", script, *words]
            command = [*_COMMAND, *launched]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S)
            assert done.returncode == 0, done.stderr[-3000:]
        losses[zero] = (json.loads(Path(f"{out}.json").read_text()), _saved_weights(out))
    _same("hf-zero run", losses["stage=2"], losses[None])


def run_flag(folder: Path) -> None:
    _compare(train_trainer, folder, (f"flag {_WHOLE}", f"flag {_SHARDED}"), f"checkpoint-{_SAVED}", adapts=False)


def run_callback(folder: Path) -> None:
    _compare(train_trainer, folder, ("callback 1", f"callback {_SHARDED}"), f"checkpoint-{_SAVED}", adapts=False)
    whole = _consolidated(folder / "ours1" / f"checkpoint-{_STEPS}", folder / "consolidated")
    _same("hf-zero consolidate", whole, _saved_weights(folder / "stock" / "model"))


def run_plugin(folder: Path) -> None:
    _compare(train_loop, folder, (_WHOLE, _SHARDED), "state")


def run_sequences(folder: Path) -> None:
    """Compares sequences over two ranks with one rank without the engine."""
    stock = _trained(train_loop, folder / "stock", "", world_size=1)
    ours = _trained(train_loop, folder / "ours", "stage=3", sp_size=2)
    # Ranks add up the parts of a loss and of gradients in a different order from one rank.
    far = max(abs(a - b) / b for a, b in zip(ours.losses, stock.losses, strict=True))
    assert far < _NEAR, f"sp_size=2: losses {ours.losses}, and {stock.losses} on one rank"


def run_alone(folder: Path) -> None:
    _compare(train_alone, folder, ("stage=1", "stage=2", "stage=3"), "")


def run_sft(folder: Path) -> None:
    _compare(train_sft, folder, (f"flag {_WHOLE}",), f"checkpoint-{_SAVED}")


def run_lora(folder: Path) -> None:
    _compare(train_trainer, folder, (f"callback {_SHARDED}",), f"checkpoint-{_SAVED}", adapts=True)


def run_sentences(folder: Path) -> None:
    _compare(train_sentences, folder, (f"callback {_WHOLE}",), f"checkpoint-{_SAVED}")


class Part(NamedTuple):
    run: Callable[[Path], None]
    package: str | None = None


PARTS = {
    "hf-zero run": Part(run_unmodified),
    "flag": Part(run_flag),
    "callback": Part(run_callback),
    "plugin": Part(run_plugin),
    "sp_size": Part(run_sequences),
    "ZeroEngine": Part(run_alone),
    "TRL's SFT": Part(run_sft, "trl"),
    "PEFT's LoRA": Part(run_lora, "peft"),
    "sentence-transformers": Part(run_sentences, "sentence_transformers"),
}


def _outcomes(wanted: list[str]) -> Iterator[dict[str, Any]]:
    for name in wanted:
        part, began_s = PARTS[name], time.monotonic()
        outcome, error = "passed", None
        if part.package and find_spec(part.package) is None:
            outcome = "not installed"
        else:
            with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
                try:
                    part.run(Path(folder))
                except Exception as raised:
                    # Continue with the next parts. The exit status reports the failure.
                    outcome, error = "failed", str(raised)[-3000:]
        print(f"{name}: {outcome}, {time.monotonic() - began_s:.0f} s", *([error] if error else []), flush=True)
        yield {"part": name, "outcome": outcome, "seconds": round(time.monotonic() - began_s, 1), "error": error}


def main(arguments: list[str] | None = None) -> int:
    options = read_options(__doc__, arguments, words=([], "a name for these releases"), parts=list(PARTS))
    [name] = options.words
    options.json = options.json or ROOT / "outputs" / "bench" / "matrix.json"
    ranks.PRELOADED_MODULES += [part.package for name in options.parts if (part := PARTS[name]).package]
    failed = False
    for part in _outcomes(options.parts):
        failed |= part["outcome"] == "failed"
        record = _with_part(options.json, describe_run(options), name, part)
        # Write after each part, so an interrupted run keeps the earlier ones.
        write_record(options.json, record)
    print(report_of(record))
    return int(failed)


def _with_part(path: Path, run: dict[str, Any], name: str, part: dict[str, Any]) -> dict[str, Any]:
    """Returns the new content of the file: its rows, with this part in the row of this name."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    before = rows.get(name, {})
    kept = before["parts"] if before.get("versions") == run["versions"] else []
    by_name = {each["part"]: each for each in [*kept, part]}
    row = {what: run[what] for what in ("python", "versions", "commit", "date")}
    row["parts"] = [by_name[each] for each in PARTS if each in by_name]
    return {**run, "kind": "matrix", "rows": rows | {name: row}}


if __name__ == "__main__":
    sys.exit(main())
