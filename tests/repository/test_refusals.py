"""Every refusal of a training run stands in docs/what-is-refused.md: refusals are collected from the code."""

import ast
import re
from collections.abc import Iterator

from pictures import PACKAGE

PAGE = (PACKAGE.parent / "docs" / "what-is-refused.md").read_text(encoding="utf-8")

PLACES = (
    "buckets",
    "engine",
    "optimizer",
    "sequence",
    "stage3",
    "step",
    *(
        f"integrations/{name}.py"
        for name in (
            *("plugin", "accelerator", "announce", "arguments", "environment", "trainer"),
            *("callers", "clean_end", "recorded_runs", "run_record", "step_watch"),
            *(
                "loss_scaler",
                "no_sync",
                "same_loops",
                "skipped_steps",
                "split_models",
                "state_folder",
                "without_engine",
            ),
            *("uneven_inputs", "unmodified"),
        )
    ),
)
"""What refuses a training run, below the package."""

ROWS = {
    "before a launcher forked process": "that was built before `notebook_launcher`",
    "this Accelerator was built before it": "that was built before `notebook_launcher`",
    "a forked process cannot use CUDA": "CUDA in a process that a launcher forked",
    "attention for context parallelism": "context parallelism (`cp_size`)",
    "experts get tokens of": "`sp_size` above 1 with `ep_size` above `tp_size`",
    "does not divide the {} ranks of this run": "an `sp_size` that does not divide",
    "does not divide the {} ranks{} of this run": "an `sp_size` that does not divide",
    "share a sequence": "batches that differ between the ranks of a sequence",
    "attends with {}": "with a value for each head",
    "attends without a mask": "attention outside of transformers' interface",
    "does not attend through": "attention outside of transformers' interface",
    "sp_size is {}, and {} {}": "models without a loss for each token",
    "holds no model of transformers": "modules without a model of transformers",
    "how to cut the argument": "other arguments with a value for each token",
    "a training forward has": "`use_cache`, `logits_to_keep`",
    "dimensions, and sp_size": "a mask of more than 2 dimensions",
    "returns its outputs by name": "`return_dict=False`",
    "adds up a sequence's gradients": "| `comm.sync_every`: a sequence's",
    "cannot be combined with sp_size": "| `out_of_memory: halve`: not built yet for the ranks of a sequence",
    "gathered from two steps": "call outside of the model's forward",
    "steps without the engine: it was prepared": "an optimizer prepared without its model",
    "steps without the engine:": "or steps without it",
    "is of class {}: {}. Two engines": "models in DDP, DataParallel or FSDP",
    "Two engines cannot own one model": "FSDP, DeepSpeed, Megatron-LM, XLA",
    "two engines cannot own one model": "FSDP, DeepSpeed, Megatron-LM, XLA",
    "also has parameters of no model, or of a second one": "One optimizer over several models, or over parameters of no model",
    "is trained together with another model": "One optimizer over several models, or over parameters of no model",
    "does not support several models": "with `accelerator.join_uneven_inputs`",
    "resize_embeddings resizes only one": "`resize_embeddings` of one of them",
    "needs other parameters to update a parameter": "optimizers that look at all parameters together",
    "needs whole parameters for its update": "optimizers that need whole parameters",
    "so it cannot be stepped over shards": "LBFGS, LOMO, SparseAdam",
    "contains another optimizer": "Optimizers that have another in them",
    "closure": "`optimizer.step(closure)` of classes from outside of torch",
    ".step() would update parameters": "was built after `prepare`",
    "was prepared without its optimizer": "A model prepared without its optimizer",
    "holds none of the parameters": "over parameters of no prepared model",
    "parameters that are not in the model": "parameters that are not in its model",
    "is held by two optimizers": "a parameter in two optimizers",
    "is not a trained parameter of this engine": "parameters that are not in its model",
    "were added to the optimizer": "added to the optimizer afterwards",
    "while gradients wait for a step": "`add_param_group` while gradients wait",
    "add_param_group during training needs": "or with `sp_size` or `tp_size` above 1",
    "received a parameter that the optimizer already has": "a parameter in two optimizers",
    "no parameter of the model requires": "A model that trains nothing",
    "on the meta device": "on the meta device",
    "belongs to a lazy module": "parameters of lazy modules",
    "but buckets hold dense tensors": "sparse and nested ones",
    "buffers are sent as dense tensors": "buffers that are sparse or DTensors",
    "that is not an nn.Parameter": "a tensor in it that is no Parameter",
    "is trained in {}, but buckets hold": "Trained parameters of complex numbers",
    "without loss scaling": "float16 parameters without a scaler",
    "can be unscaled only once": "unscaling before all micro-batches",
    "cannot read or change": "pickling or replacing `p.grad`; reading it within a backward",
    "was set by hand": "replacing `p.grad`",
    "is needed for a second step": "without `zero_grad()` between",
    "under no_sync and never reduced": "all in `no_sync`",
    "this state dict is from": "another rank's or run's `state_dict`",
    "returns only the state of": "`torch.save(optimizer.state_dict())`",
    "were edited after the last optimizer.step()": "writes to what `optimizer.param_groups` holds",
    "was edited both as": "both as `optimizer.state[p]`",
    "writes to the parameters in its": "Optimizers with `train()` and `eval()`",
    "LocalSGD": "`LocalSGD`",
    "parameters of several models": "Clipping parameters of several models",
    "parameters from optimizer.param_groups": "a norm of gradients in `optimizer.param_groups`",
    "of a gradient in optimizer.param_groups": "a norm of gradients in `optimizer.param_groups`",
    "the last backward ended with an error{} after some": "backward that ended with an error",
    "the gradient norm is": "NaN or infinite gradients",
    "have diverged": "copies that have diverged",
    "has changed by itself": "values that one rank alone has and that changed by themselves",
    "received different values than other ranks sent": "messages that changed on their way",
    "{} of {} was written to on": "optimizer state that some ranks edit only in part",
    "one bit of {} of {} has changed": "values that one rank alone has and that changed by themselves",
    "do not train the same model": "ranks that differ in model, config, data",
    "got different values on the ranks": "`load_state_dict` of different values",
    "modified by an inplace operation": "a graph from before a step",
    "create_graph": "create_graph=True",
    "inside a backward, for example by a gradient hook": "inside a backward, from a hook",
    "torch.jit": "Modules of `torch.jit`",
    "which wraps other tensors": "and gradients of such classes",
    "is a trained {}, which": "that are wrapper subclasses of tensors",
    "keeps its values in inner tensors": "a base whose weights keep their values in tensors",
    "is not quantized yet": "Weights of bitsandbytes' layers that are not quantized yet",
    "an evaluation repacked": "four-bit weights that bitsandbytes has repacked",
    "in the buckets of another ZeroEngine": "A second `ZeroEngine`",
    "max_norm": "with `max_norm` above stage 0",
    "two tensors in the same memory": "in the memory of another parameter",
    "edited through `.data` or numpy, which leaves no trace, and the optimizer": "Edits through `.data` of a parameter that",
    "a forward has": "Edits of weights inside a forward",
    "was edited inside `gathered` without": "edits inside `gathered` without",
    "was edited in place while it was sharded": "edits inside `gathered` without",
    "whole parameters would take": "whole parameters that do not fit",
    "inside `gathered` or `unsharded`": "a step inside `gathered` or `unsharded`",
    "needs the values of": "reads of its values on one rank",
    "(stage 3) cannot be {}": "pickling and moving",
    "cannot be moved or cast": "moving (`.to`, `.cpu()`)",
    "no longer in the engine's memory": "`load_state_dict(assign=True)`",
    "as after merge_and_unload": "`merge_and_unload` after `prepare`",
    "was frozen when": "unfrozen afterwards",
    "elements when it was prepared": "another number of elements",
    "cannot be resized during training": "`resize_embeddings`, `resize_token_embeddings`",
    "a hook of DDP": "`comm_hook`",
    "processes were requested": "one-process runs started by mistake",
    "was not installed: accelerate": "a `ZeroPlugin` that accelerate ignored",
    "ended without the engine": "ended without the engine",
    "got two different configs": "two configs for one run or Trainer",
    "both split the model": "two configs for one run or Trainer",
    "the cast is set twice": "together with mixed precision that casts",
    "fp8": "arithmetic in fp8",
    "`rounding: stochastic`": "`rounding: stochastic` for parameters other than bfloat16",
    "`moments: ": "`moments: 8bit` with float64",
    "`stage: auto` works only": "`stage: auto`, `report`, `out_of_memory: halve` in a loop",
    "`report` works only": "`stage: auto`, `report`, `out_of_memory: halve` in a loop",
    "repeats forwards and backwards": "`stage: auto`, `report`, `out_of_memory: halve` in a loop",
    "`report: true` writes": "`report: true` in an Accelerator without",
    "`comm.sync_every` is {}, but the model": "| `comm.sync_every`: all ranks of a copy",
    "with a model that is split over ranks": "| `out_of_memory: halve`: not built yet for the ranks of a copy",
    "`comm.shard_group_size` is {}, and": "`comm.shard_group_size`, `comm.secondary_shard` where",
    "`comm.secondary_shard` is {}, and": "`comm.shard_group_size`, `comm.secondary_shard` where",
    "quantize float32 and 16-bit": "with float64 parameters",
    "different batches": "batches that differ between the ranks of a copy",
    "is not split over ranks": "copies that have diverged",
    "DTensor": "DTensors other than Shard and Replicate",
    "other parameters over ranks": "DTensors other than Shard and Replicate",
    "tp_size": "`tp_size` of the plugin other than",
    "which is the name of the fp32 copies": "that calls its state `master`",
    "a trial step cannot determine the state": "whose state no trial step shows",
    "join_uneven_inputs takes models that were": "of models without optimizers",
    "batch norms": "`accelerator.join_uneven_inputs`",
    "join_uneven_inputs": "`accelerator.join_uneven_inputs`",
    "hyperparameter_search": "`Trainer.hyperparameter_search`",
}
"""Words of a message → words of the page; the first that fit."""

NO_REFUSALS = {
    "in lists, tuples or dicts is damaged": "a damaged checkpoint",
    "sp_size is {}; allowed": "the value of a setting",
    "in the script's ParallelismConfig": "arguments of a call",
    "needs input_ids or inputs_embeds": "arguments of a call",
    "Pass an object: ": "arguments of a call",
    "parallelism_config is a ZeroCallback": "arguments of a call",
    "in Trainer's callbacks. Pass": "arguments of a call",
    "It takes a model and its optimizers": "arguments of a call",
    "the same config object": "an error that hf_zero has noticed in time",
    "pass only one of the two": "arguments of a call",
    "with_zero takes": "arguments of a call",
    "attach first, then prepare": "order of two calls",
    "plugin.attach got": "arguments of a call",
    "got no model": "arguments of a call",
    "did not find its Trainer": "order of two calls",
    "`unit_modules` is": "the value of a setting",
    "`kernels: always`": "the value of a setting",
    "has no resize_token_embeddings": "arguments of a call",
    "that save_state wrote": "a folder that is not there, or is another's",
    "that accelerator.save_state wrote": "a folder that is not there, or is another's",
    "save_state() was called without": "a folder that is not there, or is another's",
    "Pass another name to save_state": "a folder that is not there, or is another's",
    "already exists. Set": "a folder that is not there, or is another's",
    "a checkpoint of DeepSpeed or FSDP": "a folder that is not there, or is another's",
    "with a scheduler of DeepSpeed": "a folder that is not there, or is another's",
    "was computed while its layer's parameters were sharded": "an error that hf_zero has noticed in time",
}
"""Words of a message → what it is about, where it refuses nothing that would do elsewhere."""


MOST_WORDS = 35
"""Of an error's own text, a formatted value counted as one word."""

DIALECT = (
    *("please report this", "came to different collectives", "that comes alone", "do the like", "does the like"),
    *("whatever the", "who looks", "as it lies", "in vain", "put away", "hand over"),
)
"""Words that a PyTorch user must read twice; none stands in an error."""


def messages_in(node: ast.AST) -> Iterator[str]:
    """The texts below a node, with {} for what varies."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(value.value if isinstance(value, ast.Constant) else "{}" for value in node.values)
    else:
        for inner in ast.iter_child_nodes(node):
            yield from messages_in(inner)


def refusals() -> dict[str, str]:
    """Message → the file that makes an error of it."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if not any(place == each or place.startswith(f"{each}/") for each in PLACES):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            kind = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            # An AssertionError is a fault of the package's own.
            if kind.endswith("Error") and kind != "AssertionError":
                found |= {text: place for text in messages_in(node) if re.match(r"hf_zero( config)?: ", text)}
    return found


def test_every_refusal_of_a_run_has_its_row():
    collected = refusals()
    assert len(collected) > 80
    used, missing = set(), []
    for message, place in collected.items():
        words = next((words for words in (*NO_REFUSALS, *ROWS) if words in message), None)
        used.add(words)
        if words is None:
            missing.append(f"{place}: {message}")
    assert not missing, "a row in docs/what-is-refused.md, and here: " + "\n".join(missing)
    idle = [words for words in (*ROWS, *NO_REFUSALS) if words not in used]
    assert not idle, f"no message of the code has these words: {idle}"
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    absent = [words for words in ROWS.values() if not any(words in row for row in rows)]
    assert not absent, f"no row of the page has these words: {absent}"


def raised() -> Iterator[tuple[str, str]]:
    """(file and line, text) of each error that is raised with a text of its own."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and node.exc is not None:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", " ".join(messages_in(node.exc))


def test_an_error_is_short_and_in_the_words_of_the_field():
    found = list(raised())
    assert len(found) > 400
    long = [f"{place} ({len(text.split())} words): {text}" for place, text in found if len(text.split()) > MOST_WORDS]
    assert not long, "\n".join(long)
    strange = [f"{place}: {words!r}" for place, text in found for words in DIALECT if words in text]
    assert not strange, "\n".join(strange)


TAKE_PURPOSES = (
    "exchange",
    "barrier",
    "inside",
    "start_swap",
    "synchronize",
    "lent",
    "meet",
    "gathered",
    "use_copies",
)


def texts() -> Iterator[tuple[str, str]]:
    """(file and line, text) of each string of the package that is no docstring."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in bare | parts:
                yield from ((f"{path.relative_to(PACKAGE)}:{node.lineno}", text) for text in messages_in(node))


def purposes() -> Iterator[tuple[str, str]]:
    """(file and line, name) of each collective that is named in words: messages put "the" before these."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            named = [word.value for word in node.keywords if word.arg in ("purpose", "kind")]
            if isinstance(node.func, ast.Attribute) and node.func.attr in TAKE_PURPOSES:
                named += node.args
            found = (
                text
                for value in named
                if isinstance(value, ast.Constant | ast.JoinedStr)
                for text in messages_in(value)
            )
            yield from ((f"{path.relative_to(PACKAGE)}:{node.lineno}", text) for text in found)


def test_no_message_says_a_word_twice_or_puts_an_article_before_another():
    found = [(place, text) for place, text in texts() if " " in text]
    assert len(found) > 2000
    twice = re.compile(r"(?i)(?<![\w'-])([a-z]+) \1(?![\w'-])|\b(a|an|the) (a|an|the) |\b(in|to|of) (in|of|to) ")
    wrong = [f"{place}: {text!r}" for place, text in found if twice.search(text)]
    assert not wrong, "\n".join(wrong)
    names = list(purposes())
    assert len(names) > 30
    # "the the model's state dict", "in the a layer's place"
    wrong = [f"{place}: {name!r}" for place, name in names if re.match(r"(?i)(a|an|the|in|to|what|how|whether) ", name)]
    assert not wrong, "a name that fits after `the`: " + "\n".join(wrong)
