"""The house's floors: a file imports its own room or floors below, and nothing goes round in circles."""

import ast
from pathlib import Path

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


def test_imports_point_down():
    rooms = {module: room(module) for module in GRAPH if room(module)}
    homeless = sorted(module for module, name in rooms.items() if name not in FLOOR)
    assert not homeless, f"in no room of the house: {homeless}"
    upwards = [
        f"{module} (floor {FLOOR[name]}) imports {imported} (floor {FLOOR[rooms[imported]]})"
        for module, name in sorted(rooms.items())
        for imported in sorted(GRAPH[module] & rooms.keys())
        if FLOOR[rooms[imported]] > FLOOR[name] or (FLOOR[name] == 0 and rooms[imported] != name)
    ]
    assert not upwards, "imports of a floor above, or of another room on the ground floor:\n" + "\n".join(upwards)


def test_libraries_are_known_where_they_belong_only():
    strangers = []
    for module, names in sorted(GRAPH.items()):
        known = {name.split(".")[0] for name in names}
        refused = set() if room(module) in HUGGING_FACE_ROOMS else known & {"transformers", "accelerate", "datasets"}
        if room(module) == "layout":
            refused |= known & {"torch"}
        if room(module) not in {None, "kernels"}:
            refused |= known & {"triton"}
        strangers += [f"{module} imports {name}" for name in sorted(refused)]
    assert not strangers, "\n".join(strangers)


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
