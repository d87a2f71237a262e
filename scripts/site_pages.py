"""mkdocs hooks for the site: pages made from the code and from files outside of `docs/`, with working links."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer
import typer.cli
from mkdocs.structure.files import File, Files

import hf_zero
from hf_zero.cli.app import app

ROOT = Path(__file__).resolve().parent.parent

GROUPS = {
    "Ways in": ("ZeroPlugin", "ZeroTrainingArguments", "with_zero", "ZeroCallback", "ZeroEngine", "launch"),
    "Settings": ("ZeroConfig", "ConfigError"),
    "Models and their parameters": ("engine_of", "gathered", "unsharded", "init", "parallel_config"),
    "Long runs": ("last_good_state", "same_global_batch", "GradScaler", "Rescue", "RunRecorder"),
    "Tools": ("doctor", "make_plan", "migrate", "parity"),
}
"""The public names, grouped as on the page of the API."""

REPOSITORY_FILES = ("CITATION.cff", "LICENSE")
"""Files in the repository's root that the README links to."""

LOGO = "logo.svg"
_LOGO = """<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 24 24' fill='white'>
<rect width='24' height='24' rx='4' fill='#4051b5'/>
<path d='M3 4h18v3H3z'/><path d='M3 9h5v3H3zm0 5h5v3H3zm0 5h5v3H3z'/><path d='M10 9h5v3h-5z' opacity='.5'/>
</svg>
"""
"""Whole parameters, and a rank's shards of what stages 1 to 3 split."""

STYLE = "site.css"
_STYLE = """/* A plan is 87 characters wide: it fits the column of text. */
.md-typeset pre > code { font-size: 0.74em; }
"""

CARDS = """<div class="grid cards" markdown>

- **[Quick start](#quick-start)**: install, train a first model, save it
- **[Which stage?](planning.md)**: memory and time of each stage, before a run
- **[Recipes](recipes/index.md)**: embedder, reranker, classifiers, SFT, LoRA, DPO, GRPO
- **[Coming from DDP, FSDP or DeepSpeed](coming-from.md)**: settings and calls by name
- **[Checkpoints and the Hub](checkpoints-and-hub.md)**: save, resume, convert, push
- **[Errors by message](troubleshooting.md)**: what you saw, why, and what to do

</div>
"""
"""The cards of the home page, above the quick start."""

LOG_KEYS = {
    "gradients-and-reports.md": "Figures in Trainer's log",
    "report.md": "In TensorBoard, W&B, trackio and MLflow",
}
"""Pages with sections about the keys of a run's log."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside of `docs/`, and the files named by pages."""
    for name, text in made_pages().items():
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, LOGO, content=_LOGO))
    files.append(File.generated(config, STYLE, content=_STYLE))
    for name in REPOSITORY_FILES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for path in sorted(path for folder in ("configs", "scripts/recipes") for path in (ROOT / folder).rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Redirects links to pages of the site, links configs and recipes to files, and adds a recipe's script to its page."""
    markdown = re.sub(r"\]\(\.\./README\.md(#[^)]*)?\)", lambda found: f"](index.md{found[1] or ''})", markdown)
    markdown = re.sub(r"\]\((notebooks/[\w-]+)\.ipynb\)", r"](\1.md)", markdown)
    if page.file.src_uri.startswith("recipes/") and page.file.name != "index":
        script = ROOT / "scripts" / Path(page.file.src_uri).with_suffix(".py")
        markdown += f"\n## The script\n\n```python\n{script.read_text(encoding='utf-8')}```\n"
    top = "../" * page.file.src_uri.count("/")
    return re.sub(r"`((?:configs|scripts/recipes)/[\w/]+\.\w+)`", rf"[`\1`]({top}\1)", markdown)


def made_pages() -> dict[str, str]:
    """Returns the name of a page → its Markdown."""
    return {
        "index.md": _home(_in_docs((ROOT / "README.md").read_text(encoding="utf-8"))),
        "pages.md": _in_docs((ROOT / "docs" / "README.md").read_text(encoding="utf-8")),
        "changelog.md": _in_docs((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")),
        "contributing.md": _in_docs((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")),
        "results.md": _in_docs((ROOT / "scripts" / "bench" / "RESULTS.md").read_text(encoding="utf-8")),
        "security.md": _in_docs((ROOT / ".github" / "SECURITY.md").read_text(encoding="utf-8")),
        "api.md": api_page(),
        "cli.md": typer.cli.get_docs_for_click(
            obj=(command := typer.main.get_command(app)), ctx=typer.Context(command), name="hf-zero"
        ),
        "log-keys.md": log_keys_page(),
        **{
            f"notebooks/{path.stem}.md": notebook_page(path)
            for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
        },
    }


def _home(readme: str) -> str:
    """Returns the README with cards above its quick start.

    Raises:
        ValueError: the README has no quick start.
    """
    first, heading, rest = readme.partition("\n## Quick start\n")
    if not heading:
        raise ValueError("README.md has no section `## Quick start`, above which the home page has its cards.")
    return f"{first}\n{CARDS}{heading}{rest}"


def _in_docs(text: str) -> str:
    """Returns a file of the repository's root with its links to `docs/` adjusted to a page there."""
    places = {
        "](docs/README.md": "](pages.md",
        "](docs/": "](",
        "](../../docs/": "](",
        "](CONTRIBUTING.md": "](contributing.md",
        "](CHANGELOG.md": "](changelog.md",
        "](.github/SECURITY.md": "](security.md",
        "](../docs/": "](",
        "](scripts/bench/RESULTS.md": "](results.md",
    }
    for here, there in places.items():
        text = text.replace(here, there)
    return text


def api_page() -> str:
    """Returns the page of the public names, for mkdocstrings.

    Raises:
        ValueError: a public name is in no group.
    """
    listed = {name for names in GROUPS.values() for name in names}
    if left := set(hf_zero.__all__) - {"__version__"} - listed:
        raise ValueError(f"{sorted(left)} are public, and GROUPS of {__file__} has them in no group.")
    parts = ["# Python API\n\nThe public names of `hf_zero`, with what each takes, returns and raises.\n"]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [f"::: hf_zero.{name}\n" for name in names]
    return "\n".join(parts)


def log_keys_page() -> str:
    """Returns the sections about keys of the log, from their pages.

    Raises:
        ValueError: a page has no such section.
    """
    parts = ["# Keys of the log\n"]
    for name, title in LOG_KEYS.items():
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        _, heading, rest = text.partition(f"## {title}\n")
        if not heading:
            raise ValueError(f"docs/{name} has no section {title!r}, which LOG_KEYS of {__file__} names.")
        section = rest.partition("\n## ")[0]
        parts.append(f"## {title}\n{section}")
    return "\n".join(parts)


def notebook_page(path: Path) -> str:
    """Returns a notebook with its stored outputs as Markdown; pictures become part of the page."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(
                    f"![The picture that this cell draws](data:image/png;base64,{''.join(data['image/png']).strip()})"
                )
            elif text := "".join(output.get("text", data.get("text/plain", ()))).rstrip():
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + f"\n\n[The notebook]({path.name}) runs on two CPU cores, without network.\n"
