"""The house's floors: a file imports its own room or floors below, and nothing goes round in circles."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "hf_zero"

FLOOR = {
    "config": 0,
    "layout": 0,
    "device": 0,
    "read_ahead": 0,
    "kernels": 1,
    "comm": 2,
    "offload": 3,
    "engine": 4,
    "checkpoint": 5,
    "plan": 6,
    "diagnose": 7,
    "integrations": 8,
}
HUGGING_FACE_ROOMS = {"diagnose", "integrations"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Absolute names of what a file imports, at any depth of its code; `from .a import b` gives both a and a.b."""
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names.add(source)
            names.update(f"{source}.{alias.name}" for alias in node.names)
    return names


FILES = sorted(PACKAGE.rglob("*.py"))
GRAPH = {module_name(path): imports_of(path) for path in FILES}


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "hf_zero" else None


@pytest.mark.parametrize("module", sorted(m for m in GRAPH if room(m)))
def test_imports_point_down(module):
    assert room(module) in FLOOR, f"{module} is in no room of the house"
    for imported in GRAPH[module]:
        if imported in GRAPH and room(imported):
            assert FLOOR[room(imported)] <= FLOOR[room(module)], f"{module} imports {imported}, a floor above it"
    if FLOOR[room(module)] == 0:
        others = {room(name) for name in GRAPH[module] if name in GRAPH and room(name)} - {room(module)}
        assert not others, f"{module} is on the ground floor and imports {others}"


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_hugging_face_is_known_upstairs_only(module):
    known = {name.split(".")[0] for name in GRAPH[module]}
    if room(module) not in HUGGING_FACE_ROOMS:
        assert not known & {"transformers", "accelerate", "datasets"}, f"{module} knows Hugging Face libraries"
    if room(module) == "layout":
        assert "torch" not in known
    if room(module) not in {None, "kernels"}:
        assert "triton" not in known


def test_no_circles():
    edges = {module: {name for name in names if name in GRAPH and name != module} for module, names in GRAPH.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for imported in edges[module]:
                # A package's own __init__ only names its rooms, lazily.
                if imported != "hf_zero":
                    visit(imported, (*path, module))
            done.add(module)

    for module in edges:
        if module != "hf_zero":
            visit(module, ())
