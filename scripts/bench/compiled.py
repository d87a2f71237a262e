"""Compiled models at each stage: losses, graph breaks, recompilations and host time next to DDP compiled in the same way.

    nice python scripts/bench/compiled.py                                      # all cells: an hour of CPU time on two cores
    nice python scripts/bench/compiled.py --families gpt2 --ways flag --stages 2 3
    nice python scripts/bench/compiled.py --json scripts/bench/results/compiled.json

Two gloo ranks train tiny models of transformers in fp32. Each cell is one family, one way of compiling, one backend and at most
one addition such as LoRA. A cell trains under DDP first and then at each stage, in the same processes. A file that exists keeps
the rows that a run does not measure again, and each row has its commit. `--missing` continues an interrupted run: it measures the
cells without rows of the present commit.

Reported for each stage: the largest difference of a loss to DDP; graph breaks whose stack is inside a layer, in excess of DDP's;
graphs with a line of hf_zero; graphs that are compiled after the second step; and the process time of a step in proportion to
DDP's. Exits with status 1 if a stage raised an error.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from engines import say_where_ranks_are
from harness import ROOT, describe_run, on_ranks, read_options, write_record
from ranks import PRELOADED_MODULES, RankFailedError, RanksTimedOutError
from tables import report_of
from torch import nn

import hf_zero

STEPS = 30
WARM_STEPS = 2
"""Steps in which graphs may be compiled: the second has shapes and state that the first one did not have."""
_VOCABULARY, _LENGTH, _WIDTH, _ROWS = 60, 16, 32, 2
_LIMIT_S = 3600  # limit for one start of ranks, on a machine with other work
_PACKAGE = str(Path(hf_zero.__file__).parent)

Batch = dict[str, torch.Tensor]

# ---- families ----


def _tokens(generator: torch.Generator, first: int = 3) -> torch.Tensor:
    return torch.randint(first, _VOCABULARY, (_ROWS, _LENGTH), generator=generator)


def _language(generator: torch.Generator) -> Batch:
    ids = _tokens(generator)
    return {"input_ids": ids, "labels": ids}


def _translation(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)}


def _classes(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 3, (_ROWS,), generator=generator)


def _classification(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _classes(generator)}


def _images(generator: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(_ROWS, 3, 16, 16, generator=generator), "labels": _classes(generator)}


def _speech(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(_ROWS, 8, 2 * _LENGTH, generator=generator), "labels": _tokens(generator)}


class Family(NamedTuple):
    """Names of classes of transformers, the config's arguments, and a function to draw a batch."""

    model: str
    config: str
    sizes: dict[str, Any]
    batch: Callable[[torch.Generator], Batch]


_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDTHS = {"hidden_size": _WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TOKENS = {"vocab_size": _VOCABULARY, "max_position_embeddings": _LENGTH}
_SIDES = {
    **{f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
    "d_model": _WIDTH,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
}
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": _VOCABULARY, "n_positions": 2 * _LENGTH, "n_embd": _WIDTH, "n_layer": 2, "n_head": 2, **_SPECIAL}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        _language,
    ),
    "bert": Family(
        "BertForSequenceClassification",
        "BertConfig",
        {**_WIDTHS, **_NO_DROPOUT, **_TOKENS, "num_labels": 3},
        _classification,
    ),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**_WIDTHS, **_TOKENS, **_SPECIAL, "cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2},
        _language,
    ),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", {**_WIDTHS, **_TOKENS, **_SPECIAL}, _language),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": _VOCABULARY, "d_model": _WIDTH, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
        _translation,
    ),
    "bart": Family("BartForConditionalGeneration", "BartConfig", {**_SIDES, **_TOKENS, **_SPECIAL}, _translation),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {**_WIDTHS, **_NO_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 3},
        _images,
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_SIDES, **_SPECIAL, "vocab_size": _VOCABULARY, "num_mel_bins": 8, "max_source_positions": _LENGTH}
        | {"max_target_positions": 2 * _LENGTH, "begin_suppress_tokens": None, "suppress_tokens": None},
        _speech,
    ),
}


def _make_model(family: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    made = FAMILIES[family]
    model = getattr(transformers, made.model)(getattr(transformers, made.config)(**made.sizes))
    model.config.use_cache = False
    return model.train()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the layers in the model's lists, without layers inside another layer."""
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and not any(module in set(layer.modules()) for layer in found):
            found += module
    return found


# ---- ways of compiling, and additions ----


def _wrap(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend)


def _in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def _layers(model: nn.Module, backend: str) -> nn.Module:
    for layer in layers_of(model):
        layer.compile(backend=backend)
    return model


def _forwards(model: nn.Module, backend: str) -> nn.Module:
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, backend=backend)
    return model


_BY_HAND: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "torch.compile(model)": _wrap,
    "model.compile()": _in_place,
    "layer.compile()": _layers,
    "layer.forward =": _forwards,
}
FLAG, PLUGIN, REGIONS, LOSS = "Trainer's flag", "plugin", "plugin, by regions", "loss function"
WAYS = {
    "flag": FLAG,
    "plugin": PLUGIN,
    "regions": REGIONS,
    "wrap-before": "torch.compile(model), before",
    "wrap-after": "torch.compile(model), after",
    "in-place-before": "model.compile(), before",
    "in-place-after": "model.compile(), after",
    "layers-before": "layer.compile(), before",
    "layers-after": "layer.compile(), after",
    "forwards-before": "layer.forward =, before",
    "forwards-after": "layer.forward =, after",
    "loss": LOSS,
}
"""Names on the command line → names in tables. `before` and `after` refer to `accelerator.prepare`."""

ADDITIONS = ("checkpointing", "lora", "bf16", "evaluation", "generate", "offload", "sp_size")


class Cell(NamedTuple):
    """The model, the way of compiling, and an addition."""

    family: str
    way: str
    backend: str = "aot_eager"
    addition: str = ""


def all_cells() -> list[Cell]:
    every = [Cell(family, "plugin") for family in FAMILIES]
    by_way = [Cell(family, way) for family in ("gpt2", "bert") for way in WAYS]
    by_backend = [Cell(family, "plugin", backend) for family in ("gpt2", "bert") for backend in ("eager", "inductor")]
    # At stage 3 layers are compiled, and their graphs add in another order than a whole model's. Here DDP compiles layers, too.
    by_layer = [Cell(family, "layers-before") for family in ("t5", "bart", "whisper")]
    by_layer += [Cell("gpt2", "layers-before", "inductor")]
    added = [Cell("gpt2", "plugin", addition=addition) for addition in ADDITIONS]
    return list(dict.fromkeys([*every, *by_layer, *by_way, *by_backend, *added]))


# ---- what dynamo does, counted ----


class Dynamo:
    """Counts graphs, graphs with a line of hf_zero, and graph breaks inside layers."""

    def __init__(self, layers: list[nn.Module]) -> None:
        from torch._dynamo import output_graph

        self.graphs = self.of_hf_zero = 0
        self._output_graph, self._stock = output_graph.OutputGraph, output_graph.OutputGraph.call_user_compiler
        self._forwards = {}
        for layer in layers:
            code = inspect.unwrap(type(layer).forward).__code__
            last = max(line for *_, line in code.co_lines() if line is not None)
            self._forwards[code.co_filename, code.co_firstlineno] = last

    def __enter__(self) -> Dynamo:
        torch._dynamo.reset()
        torch._dynamo.utils.graph_break_reasons.clear()
        stock = self._stock

        def call_user_compiler(graph: Any, module: torch.fx.GraphModule, *arguments: Any) -> Any:
            self.graphs += 1
            self.of_hf_zero += any(_PACKAGE in str(node.meta.get("stack_trace")) for node in module.graph.nodes)
            return stock(graph, module, *arguments)

        self._output_graph.call_user_compiler = call_user_compiler
        return self

    def __exit__(self, *_: object) -> None:
        self._output_graph.call_user_compiler = self._stock

    @property
    def breaks_in_layers(self) -> int:
        return sum(any(map(self._is_in_layer, each.user_stack)) for each in torch._dynamo.utils.graph_break_reasons)

    def _is_in_layer(self, frame: traceback.FrameSummary) -> bool:
        return any(
            frame.filename == file and first <= (frame.lineno or 0) <= last
            for (file, first), last in self._forwards.items()
        )


class Outcome(NamedTuple):
    losses: list[float]
    graphs: list[int]
    seconds: list[float]
    breaks_in_layers: int
    of_hf_zero: int


# ---- one run, in each rank ----


def train(rank: int, world_size: int, *, cell: Cell, stages: list[int], folder: str) -> dict[str, Outcome]:
    """Trains under DDP, and then at each stage. If a stage raises an error on this rank, the run ends with the error."""
    say_where_ranks_are(rank, world_size)
    cell = Cell(*cell)
    return {
        "DDP" if stage is None else str(stage): _trained(rank, cell, stage, f"{folder}/{stage}")
        for stage in (None, *stages)
    }


def _trained(rank: int, cell: Cell, stage: int | None, folder: str) -> Outcome:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    gc.collect()
    model = _make_model(cell.family)
    if cell.addition == "lora":
        from peft import LoraConfig, get_peft_model

        targets = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **targets))
    if cell.addition == "checkpointing":
        # The name since transformers 5.24, and the one before.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    settings: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # Make each layer a unit, however small.
        settings["unit_bytes"] = 0
        if cell.addition == "bf16":
            # Otherwise stage 3 gathers in bfloat16, and its gradients are rounded.
            settings["param_dtype"] = "float32"
    if cell.addition == "offload":
        settings["offload"] = {"optimizer": "cpu"}
        settings["offload"] |= {"params": "cpu"} if stage == 3 else {}
    with Dynamo(layers_of(model)) as dynamo:
        train_by = _by_trainer if cell.way == "flag" else _by_loop
        losses, graphs, seconds = train_by(rank, cell, model, None if stage is None else settings, dynamo, folder)
        return Outcome(losses, graphs, seconds, dynamo.breaks_in_layers, dynamo.of_hf_zero)


def _by_trainer(
    rank: int, cell: Cell, model: nn.Module, settings: dict | None, dynamo: Dynamo, folder: str
) -> tuple[list[float], list[int], list[float]]:
    from transformers import Trainer, TrainingArguments

    losses, graphs, seconds = [], [], []

    class Recording(Trainer):
        def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
            seconds.append(time.process_time())
            loss = super().training_step(*arguments, **named)
            losses.append(loss.item())
            graphs.append(dynamo.graphs)
            return loss

    generator = torch.Generator().manual_seed(5)
    batches = [FAMILIES[cell.family].batch(generator) for _ in range(2 * STEPS)]
    data = [{name: values[row] for name, values in batch.items()} for batch in batches for row in range(_ROWS)]
    off = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0.0}
    compiles = {"torch_compile": True, "torch_compile_backend": cell.backend}
    arguments = {"max_steps": STEPS, "per_device_train_batch_size": _ROWS, **off, **compiles}
    own = [] if settings is None else [hf_zero.ZeroCallback(hf_zero.ZeroConfig.of(settings))]
    Recording(model, TrainingArguments(folder, **arguments), train_dataset=data, callbacks=own).train()
    return losses, graphs, [after - before for before, after in pairwise(seconds)]


def _by_loop(
    rank: int, cell: Cell, model: nn.Module, settings: dict | None, dynamo: Dynamo, folder: str
) -> tuple[list[float], list[int], list[float]]:
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    given: dict[str, Any] = {"cpu": True}
    is_compiled = True
    sizes = {}
    if cell.addition == "sp_size":
        # DDP does not support such sequences. Compare with uncompiled ones.
        is_compiled, settings, sizes = settings is not None, settings or {"stage": 2}, {"sp_size": 2}
    if cell.way in ("plugin", "regions") and is_compiled:
        regions = {"use_regional_compilation": cell.way == "regions"}
        given["dynamo_plugin"] = TorchDynamoPlugin(backend=cell.backend, **regions)
    if cell.addition == "bf16":
        given["mixed_precision"] = "bf16"
    if settings is not None:
        given["parallelism_config"] = hf_zero.ZeroPlugin(hf_zero.ZeroConfig.of(settings), **sizes)
    accelerator = Accelerator(**given)
    way, _, when = WAYS[cell.way].partition(", ")
    compiles = _BY_HAND.get(way)
    if compiles and when == "before":
        model = compiles(model, cell.backend)
    trained = [p for p in model.parameters() if p.requires_grad]
    called, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    if compiles and when == "after":
        called = compiles(called, cell.backend)
    loss_of = nn.functional.cross_entropy
    if cell.way == "loss":
        loss_of = torch.compile(loss_of, backend=cell.backend)
    generator = torch.Generator().manual_seed(0 if sizes else rank)
    losses, graphs, seconds = [], [], []
    for step in range(STEPS):
        batch = FAMILIES[cell.family].batch(generator)
        began_s = time.process_time()
        if cell.way == "loss":
            logits = called(input_ids=batch["input_ids"]).logits
            loss = loss_of(logits.flatten(0, -2), batch["labels"].flatten())
        else:
            loss = called(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began_s)
        losses.append(loss.item())
        if step in (0, WARM_STEPS + 2):
            losses += _between_steps(accelerator, called, cell, batch)
        graphs.append(dynamo.graphs)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return losses, graphs, seconds


def _between_steps(accelerator: Any, called: nn.Module, cell: Cell, batch: Batch) -> Iterator[float]:
    """Evaluates or generates between training steps, with shapes unknown to the compiled training step."""
    if cell.addition not in ("evaluation", "generate"):
        return
    called.eval()
    with torch.no_grad():
        if cell.addition == "evaluation":
            yield called(**{name: values[:1] for name, values in batch.items()}).loss.item()
        else:
            model = accelerator.unwrap_model(called)
            prompt = batch["input_ids"][:, :4]
            found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
            yield from map(float, found.flatten().tolist())
    called.train()


# ---- rows and tables ----


def _row(cell: Cell, stage: str, ours: Outcome, ddp: Outcome) -> dict[str, Any]:
    timed = slice(STEPS // 3, None)
    return {
        **cell._asdict(),
        "stage": stage,
        "loss_difference": max(abs(a - b) for a, b in zip(ours.losses, ddp.losses, strict=True)),
        "breaks_in_layers": max(0, ours.breaks_in_layers - ddp.breaks_in_layers),
        "of_hf_zero": ours.of_hf_zero,
        "graphs": ours.graphs[-1],
        "graphs_of_ddp": ddp.graphs[-1],
        "graphs_later": ours.graphs[-1] - ours.graphs[WARM_STEPS - 1],
        "graphs_later_of_ddp": ddp.graphs[-1] - ddp.graphs[WARM_STEPS - 1],
        "step_ms": 1e3 * median(ours.seconds[timed]),
        "to_ddp": median(ours.seconds[timed]) / median(ddp.seconds[timed]),
        "error": None,
    }


def measure(cell: Cell, stages: list[int]) -> list[dict[str, Any]]:
    """Returns one row per stage. If a stage fails, each stage runs again in its own processes."""
    with tempfile.TemporaryDirectory(prefix="compiled-") as folder:
        try:
            found = on_ranks(train, 2, limit_s=_LIMIT_S, cell=tuple(cell), stages=stages, folder=folder)
        except (RankFailedError, RanksTimedOutError) as error:
            if len(stages) > 1:
                return [row for stage in stages for row in measure(cell, [stage])]
            return [{**cell._asdict(), "stage": str(stages[0]), "error": str(error)[-3000:]}]
    by_rank = [[_row(cell, str(stage), each[str(stage)], each["DDP"]) for stage in stages] for each in found]
    # Take the worse of the two ranks for each figure.
    return [
        {
            name: max(values) if isinstance(values[0], (int, float)) else values[0]
            for name in rows[0]
            for values in [[row[name] for row in rows]]
        }
        for rows in zip(*by_rank)
    ]


def main(arguments: list[str] | None = None) -> int:
    backends = ["eager", "aot_eager", "inductor"]
    options = read_options(
        __doc__,
        arguments,
        families=(list(FAMILIES), None, list(FAMILIES)),
        ways=(list(WAYS), None, list(WAYS)),
        backends=(backends, None, backends),
        additions=(["none", *ADDITIONS], None, ["none", *ADDITIONS]),
        stages=([0, 1, 2, 3], None),
        missing=(False, "skip cells whose rows in the file have the present commit and no error"),
    )
    path = options.json or ROOT / "outputs" / "bench" / "compiled.json"
    # Otherwise each rank of each cell imports these for seconds.
    PRELOADED_MODULES.extend(["torch._dynamo", "torch._functorch.aot_autograd", "transformers.trainer", "accelerate"])
    PRELOADED_MODULES.append("hf_zero.integrations.plugin")
    failed = False
    for cell in all_cells():
        is_wanted = cell.family in options.families and cell.way in options.ways and cell.backend in options.backends
        if not is_wanted or (cell.addition or "none") not in options.additions:
            continue
        run = describe_run(options)
        if options.missing and _is_measured(path, cell, options.stages, run["commit"]):
            continue
        began_s = time.monotonic()
        rows = [{**row, "commit": run["commit"]} for row in measure(cell, options.stages)]
        failed |= any(row["error"] for row in rows)
        for row in rows:
            print(*cell, row["stage"], row["error"] or {name: row[name] for name in list(row)[5:-2]}, sep="  ")
        print(f"{time.monotonic() - began_s:.0f} s", flush=True)
        # Write after each cell, so a killed run keeps the earlier ones.
        write_record(path, _with_rows(path, run | {"load_after": os.getloadavg()[0]}, rows))
    print(report_of(json.loads(path.read_text())))
    return int(failed)


def _is_measured(path: Path, cell: Cell, stages: list[int], commit: str) -> bool:
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    found = [row for row in kept if tuple(row[name] for name in Cell._fields) == cell and row.get("commit") == commit]
    return {str(stage) for stage in stages} <= {row["stage"] for row in found if not row["error"]}


def _with_rows(path: Path, run: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the file's record with these rows, which replace the rows of the same cells and stages."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in (*Cell._fields, "stage"))

    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    by_key = {key(row): row for row in [*kept, *rows]}
    order = {tuple(cell): place for place, cell in enumerate(all_cells())}
    ordered = sorted(by_key.values(), key=lambda row: (order.get(key(row)[:-1], len(order)), row["stage"]))
    return {**run, "kind": "compiled", "rows": ordered}


if __name__ == "__main__":
    sys.exit(main())
