"""Every private name of torch, transformers and accelerate that the package uses is listed, is needed, and is there."""

import ast
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from packaging.version import Version
from pictures import PACKAGE
from torch import nn

from hf_zero.integrations.accelerator import ZeroAcceleratorMixin
from hf_zero.integrations.seams import REPLACED_CLASSES, SEAMS, Seam
from hf_zero.integrations.trainer import ZeroTrainerMixin

TESTS = {path.name: path for path in Path(__file__).parents[1].rglob("test_*.py")}

# Private by their spelling, and documented by Python.
OF_PYTHON = {"_exit", "_getframe", "_current_frames", "_fields"}

# torch's module of its C++ parts: what is taken of it is listed.
MODULES = {"_C"}

# Classes of others whose private names count wherever they are used, even where a class of ours has a name like them.
ANYWHERE = (nn.Module(), torch.optim.Optimizer, torch.Tensor, torch.amp.GradScaler)
IN_INTEGRATIONS = (
    transformers.Trainer,
    transformers.TrainingArguments,
    transformers.PreTrainedModel,
    Accelerator,
    AcceleratorState,
    ParallelismConfig,
)
# Ours that stand before a class of others, and so override its methods.
OVERRIDING = ("ZeroTrainerMixin", "ZeroAcceleratorMixin", "ZeroPlugin", "_OverShards", "GradScaler")


# Functions that are given an attribute's name.
TAKE_NAMES = ("getattr", "hasattr", "setattr", "attrgetter", "replaced")

# What a name is used for that makes it another package's, however it is spelled.
OF_OTHERS = ("import", "replaced()")


def is_private(name: str) -> bool:
    """Of another package, by its spelling; attributes that we put on others' objects are marked as ours."""
    ours = name.startswith(("__", "_hf_zero")) or name in OF_PYTHON | MODULES
    return name.startswith("_") and not ours


def is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def names_of(*owners: object) -> set[str]:
    """Private names that owners have, or give their instances."""
    found = {name for owner in owners for name in dir(owner)}
    for owner in owners:
        found.update(re.findall(r"self\.(_\w+)(?:: [^=\n]+)? = ", _source(owner)) if inspect.isclass(owner) else ())
    return set(filter(is_private, found))


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Path below the package, without `.py`, → the nodes of its code that tell a name; a walk takes as long as reading it."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Attribute, ast.Name, ast.ImportFrom, ast.Call)
    return {
        str(path.relative_to(PACKAGE).with_suffix("")): [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)
        ]
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def defined_in(nodes: list[ast.AST], theirs: set[str]) -> set[str]:
    """Names that a file gives to functions, classes, variables and attributes of `self`, but for overrides of `theirs`."""
    overrides = {
        id(node)
        for kind in nodes
        if isinstance(kind, ast.ClassDef) and kind.name in OVERRIDING
        for each in kind.body
        for node in ([each.target] if isinstance(each, ast.AnnAssign) else [each])
        if getattr(node, "name", getattr(node, "id", None)) in theirs
    }
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and id(node) not in overrides:
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if is_name(node.value, "self") else set()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in overrides:
            found.add(node.id)
    return found


def used_in(nodes: list[ast.AST]) -> set[tuple[str, str]]:
    """(name, of what) of private attributes that a file reads or writes, of private names that it imports, and of overrides."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            found.add((node.attr, ast.unparse(node.value)))
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
            is_inside = any(is_private(part) for part in (node.module or "").split("."))
            found |= {(alias.name, "import") for alias in node.names if is_inside or is_private(alias.name)}
        elif isinstance(node, ast.ClassDef) and node.name in OVERRIDING:
            found |= {(each.name, "override") for each in node.body if isinstance(each, ast.FunctionDef)}
        elif isinstance(node, ast.Call) and is_name(node.func, *TAKE_NAMES):
            names = {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
            is_replaced = is_name(node.func, "replaced")
            found |= {(name, "replaced()" if is_replaced and name.startswith("__") else "") for name in names}
    return {(name, owner) for name, owner in found if is_private(name) or owner in OF_OTHERS}


@cache
def foreign_uses() -> dict[str, set[str]]:
    """Private name of another package → files that use it."""
    theirs = names_of(*ANYWHERE)
    of_doors = theirs | names_of(*IN_INTEGRATIONS)
    own = set().union(*(defined_in(found, of_doors) for found in nodes().values()))
    found = defaultdict(set)
    for path, its_nodes in nodes().items():
        known = of_doors if path.startswith("integrations") else theirs
        here = defined_in(its_nodes, known)
        for name, owner in used_in(its_nodes):
            if owner == "override":
                is_theirs = name in known
            else:
                is_ours = name in own - known or (name in here and owner == "self")
                is_theirs = owner in OF_OTHERS or not is_ours
            if is_theirs:
                found[name].add(path)
    return found


def covers(seam: Seam, path: str) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in seam.where)


def test_every_private_name_of_another_package_is_listed():
    unlisted = {
        f"{path}.py uses {name}"
        for name, paths in foreign_uses().items()
        for path in paths
        if not any(name in seam.names and covers(seam, path) for seam in SEAMS)
    }
    assert not unlisted, "list in hf_zero/integrations/seams.py: " + "; ".join(sorted(unlisted))


def test_what_is_listed_is_used():
    alone = [
        f"{name} of {seam.owner}"
        for seam in SEAMS
        for name in seam.names
        if not any(covers(seam, path) for path in foreign_uses().get(name, ()))
    ]
    idle = [f"{seam.owner} in {place}" for seam in SEAMS for place in seam.where if not _is_entered_from(seam, place)]
    assert not alone and not idle, f"not used: {alone + idle}"


def _is_entered_from(seam: Seam, place: str) -> bool:
    paths = {path for name in seam.names for path in foreign_uses().get(name, ())}
    return any(path == place or path.startswith(f"{place}/") for path in paths)


def test_classes_of_objects_are_replaced_where_it_is_listed():
    found = {
        path
        for path, its_nodes in nodes().items()
        for node in its_nodes
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    }
    # By name: in a loop of `setattr`, or by object's own descriptor.
    found |= {
        str(path.relative_to(PACKAGE).with_suffix(""))
        for path in PACKAGE.rglob("*.py")
        if '"__class__"' in path.read_text(encoding="utf-8")
    }
    assert found == set(REPLACED_CLASSES)


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{seam.owner} {seam.names[0]}")
def test_it_is_still_there(seam):
    module, _, name = seam.owner.partition(":")
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    installed = importlib.metadata.version(module.partition(".")[0])
    if Version(installed) < Version(seam.since or installed):
        pytest.skip(f"{module} {installed} does without; since {seam.since}")
    if "NCCL" in name and not torch.distributed.is_nccl_available():
        pytest.skip("torch is built without NCCL")
    owner = pkgutil.resolve_name(seam.owner if name else module)
    # Attributes that only instances have are in the source of their class.
    written = "\n".join(map(_source, inspect.getmro(owner))) if inspect.isclass(owner) else ""
    gone = [each for each in seam.names if not hasattr(owner, each) and each not in written]
    assert not gone, f"{seam.owner} has no {', '.join(gone)} any more. It was taken for this: {seam.why}"


@cache
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        # Written in C.
        return ""


def test_named_tests_exist():
    told = [seam.test for seam in SEAMS] + [text.rpartition("; ")[2] for text in REPLACED_CLASSES.values()]
    for each in told:
        file, _, name = each.partition("::")
        text = TESTS[file].read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, each


def stock_and_own_methods() -> list[tuple[str, Callable, Callable]]:
    """(name, method of accelerate's or transformers' class, ours that stands before it)."""
    pairs = ((Accelerator, ZeroAcceleratorMixin), (transformers.Trainer, ZeroTrainerMixin))
    return [
        (f"{mixin.__name__}.{name}", getattr(stock, name), own)
        for stock, mixin in pairs
        for cls in mixin.__mro__[:-1]
        for name, own in vars(cls).items()
        if inspect.isfunction(own) and not name.startswith("__") and hasattr(stock, name)
    ]


HIDDEN = {"ZeroAcceleratorMixin.log"}
"""accelerate's decorator hides the arguments."""

STATIC = {"ZeroAcceleratorMixin.trigger_sync_in_backward"}
"""accelerate's takes no `self`."""


def returns_a_value(function: Callable) -> bool:
    [body] = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    inner = {
        id(node)
        for each in ast.walk(body)
        if each is not body and isinstance(each, ast.FunctionDef)
        for node in ast.walk(each)
    }
    outer = [node for node in ast.walk(body) if id(node) not in inner]
    return any(
        isinstance(node, ast.Yield) or (isinstance(node, ast.Return) and node.value is not None) for node in outer
    )


def test_a_method_that_stands_before_anothers_takes_and_returns_the_same():
    found = stock_and_own_methods()
    assert len(found) > 40
    wrong = []
    for name, stock, own in (each for each in found if each[0] not in HIDDEN):
        theirs, ours = (list(inspect.signature(inspect.unwrap(each)).parameters.values()) for each in (stock, own))
        kinds = {each.kind for each in ours}
        takes_all = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
        named = [(each.name, each.default, each.kind) for each in ours]
        expected = [(each.name, each.default, each.kind) for each in theirs]
        if not takes_all and named[name in STATIC :][: len(expected)] != expected:
            wrong.append(f"{name}{inspect.signature(own)} stands before {inspect.signature(stock)}")
        if returns_a_value(stock) and not returns_a_value(own):
            wrong.append(f"{name} returns nothing, and the one that it stands before a value")
    assert not wrong, "\n".join(wrong)
