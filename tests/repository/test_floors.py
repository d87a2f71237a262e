"""Imports point to lower layers and have no cycles, and the figures of readability do not get worse."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import count_house
import torch.distributed as dist
from layers import LAYER
from pictures import PACKAGE, imports_of, module_name

from hf_zero.extras import EXTRAS

# Pairs that a floor alone would not keep apart.
STRANGERS = {
    ("arithmetic", "forecast"),
    ("checkpoint", "forecast"),
    ("checkpoint", "arithmetic"),
    ("checkpoint", "comm"),
    ("checkpoint", "presence"),
}
STRANGERS |= {
    (ground, other) for ground in LAYER for other in LAYER if ground != other and LAYER[ground] == LAYER[other] == 0
}
STRANGERS |= {
    ("comm", "checkpoint"),
    ("comm", "forecast"),
    ("presence", "checkpoint"),
    ("presence", "forecast"),
    ("offload", "checkpoint"),
    ("offload", "forecast"),
    ("engine", "checkpoint"),
    ("stage3", "checkpoint"),
    ("step", "checkpoint"),
}

# What strangers may import of each other all the same: it needs no process group.
SHARED = {("checkpoint", "hf_zero.comm.all_or_none")}

# Libraries, and the only folders that may import them.
LIBRARIES = {
    "transformers": {"diagnose", "foreign", "hub", "integrations", "planner", "cli", "sequence"},
    "accelerate": {"diagnose", "foreign", "hub", "integrations", "planner", "cli"},
    "datasets": {"diagnose", "foreign", "hub", "integrations", "planner", "cli"},
    "triton": {"kernels", "wire"},
}

FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imports() -> dict[str, set[str]]:
    """What each module imports."""
    return {module: set(imports_of(path)) for module, path in FILES.items()}


def edges() -> list[tuple[str, str]]:
    """Imports of files by files. A package's own __init__ only names its folders, lazily."""
    return [
        (module, name)
        for module, names in imports().items()
        for name in sorted(names)
        if name in FILES and "hf_zero" not in (module, name) and name != module
    ]


def folder(module: str) -> str | None:
    """`stage3` of hf_zero.stage3.unsharding."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "hf_zero" else None


def circle_of(arrows: dict[str, set[str]]) -> list[str]:
    """One circle of a directed graph, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(arrows[node]):
            if circle := visit(other, [*path, node]):
                return circle
        done.add(node)
        return []

    return next((circle for node in sorted(arrows) if (circle := visit(node, []))), [])


def test_imports_point_down():
    wrong = [f"{module} belongs to no layer" for module in FILES if module != "hf_zero" and folder(module) not in LAYER]
    for module, imported in edges():
        ours, theirs = folder(module), folder(imported)
        is_strange = (ours, theirs) in STRANGERS and (ours, imported) not in SHARED
        if LAYER[theirs] > LAYER[ours] or is_strange:
            wrong.append(f"{module} imports {imported}")
    for module, names in imports().items():
        libraries = {name.split(".")[0] for name in names}
        wrong += [
            f"{module} imports {name}"
            for name in libraries & set(LIBRARIES)
            if folder(module) not in {None, *LIBRARIES[name]}
        ]
        wrong += [f"{module} imports torch" for name in libraries & {"torch"} if folder(module) == "layout"]
    assert not wrong, "\n".join(wrong)


def test_the_core_imports_no_extra():
    wrong = [
        f"{module} imports {imported}: ask for it by `extra(...)` of hf_zero/extras.py"
        for module, imported in edges()
        if folder(module) not in EXTRAS and folder(imported) in EXTRAS
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_goes_in_circles():
    arrows = defaultdict(set)
    for module, imported in edges():
        arrows[module].add(imported)
    assert not circle_of(arrows), " -> ".join(circle_of(arrows))


# ---- calls of torch's store: a store that is silent holds them up without end ----

STORE_FILE = "hf_zero.presence.store"

NAMES_A_STORE = {*(name for name in vars(dist) if name.endswith("Store")), "_get_default_store", "underlying_store"}

STORES_FOR_TORCH = {("hf_zero.diagnose.link_ranks", "FileStore")}
"""Made for `init_process_group`, and called by torch alone."""

STORE_CALLS = {
    ("Keys.check", "check"),
    ("Keys.find_bytes", "check"),
    ("Keys.find_bytes", "get"),
    ("Keys.set", "set"),
    ("Keys.add", "add"),
    ("Keys.delete", "delete_key"),
    ("StoreThread.connection", "clone"),
}
"""Each is made in the thread of a `StoreThread`, for which other threads wait with a limit."""


def stores_named_in(tree: ast.AST) -> set[str]:
    names = (getattr(node, field, None) for node in ast.walk(tree) for field in ("id", "attr", "name"))
    return NAMES_A_STORE.intersection(names)


def calls_of_a_store(tree: ast.Module) -> set[tuple[str, str]]:
    """Qualified names of functions, and the methods of torch's stores that each calls."""
    of_store = {name for name in dir(dist.Store) if not name.startswith("_")}
    found = set()
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)):
        functions = owner.body if isinstance(owner, ast.ClassDef) else [owner]
        for function in (node for node in functions if isinstance(node, ast.FunctionDef)):
            name = f"{owner.name}.{function.name}" if function is not owner else owner.name
            called = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
            methods = (func for func in called if isinstance(func, ast.Attribute) and func.attr in of_store)
            found |= {(name, f.attr) for f in methods if ast.unparse(f.value) not in {"self._calls", "os.environ"}}
    return found


def test_torchs_store_is_called_in_one_file_and_always_with_a_time_limit():
    trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items()}
    named = {(module, name) for module, tree in trees.items() for name in stores_named_in(tree)}
    wrong = {pair for pair in named if pair[0] != STORE_FILE} - STORES_FOR_TORCH
    assert not wrong, f"use `Keys` of {STORE_FILE}, whose calls have a time limit: {sorted(wrong)}"
    assert calls_of_a_store(trees[STORE_FILE]) == STORE_CALLS


def test_a_call_of_a_store_elsewhere_would_be_found():
    code = "from torch import distributed as d\ndef f(store):\n    return d.PrefixStore('p', store).check(['k'])"
    assert stores_named_in(ast.parse(code)) == {"PrefixStore"} and calls_of_a_store(ast.parse(code)) == {("f", "check")}


# ---- the house: what a reader has before them is no more than it was counted last, with a little slack ----


def grown(counts: dict[str, int]) -> list[str]:
    return [
        f"{row}: {count_house.LAST[row]} when counted last, {count} now"
        for row, count in counts.items()
        if row in count_house.LAST and count > count_house.SLACK * count_house.LAST[row]
    ]


def test_interfaces_settings_and_private_names_have_not_grown():
    assert not grown(count_house.count_files())


STEMS = "initial minim normal optim organ parametr penal quant recogn serial summar synchron util"
BRITISH = re.compile(
    rf"(?:{STEMS.replace(' ', '|')})is(?:e|es|ed|er|ing|ation)|(?:behavi|col|fav|neighb)our|labelled|modelling",
    re.IGNORECASE,
)


def test_texts_and_names_have_american_spelling():
    root = PACKAGE.parent
    folders = [root / name for name in ("hf_zero", "scripts", "tests", "docs", "configs", ".github")]
    files = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in (".py", ".md", ".yaml", ".yml", ".sh")
    ]
    texts = {path: path.read_text() for path in [*files, *root.glob("*.md")] if path != Path(__file__)}
    assert len(texts) > 500
    found = {str(path): words for path, text in texts.items() if (words := BRITISH.findall(text + path.name))}
    assert not found


def test_a_row_that_grows_beyond_its_last_count_is_named():
    assert set(count_house.LAST) <= set(count_house.AIMS)
    one_more_interface = count_house.LAST["interfaces (ABC, Protocol)"] + 2
    assert grown({"interfaces (ABC, Protocol)": one_more_interface}) and not grown(count_house.LAST)
