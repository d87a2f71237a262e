"""The site that `bash scripts/docs.sh` builds: every page is reached, and every link on it leads somewhere."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from launching import ROOT

import hf_zero

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Page(HTMLParser):
    """The targets of a page's links, pictures and scripts, its anchors, and its text."""

    def __init__(self, path: Path):
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        self.targets |= {value for name in ("href", "src") if (value := said.get(name))}
        self.anchors |= {value for name in ("id", "name") if (value := said.get(name))}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    for module in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason="the site is built with the extra `docs`: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "scripts/docs.sh", "build", "--site-dir", folder]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def links_of(path: Path, page: Page, site: Path) -> Iterator[tuple[str, Path, str]]:
    """Each link to a place of the site: as it stands there, the file, and the anchor in it."""
    for target in page.targets:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        below = site if parts.path.startswith("/") else path.parent
        file = (below / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
        yield target, file / "index.html" if file.is_dir() else file, parts.fragment


def test_every_link_leads_to_a_file_and_an_anchor_of_the_site(site, pages):
    followed = 0
    for path, page in pages.items():
        for target, file, anchor in links_of(path, page, site):
            assert file.is_file(), f"{path.relative_to(site)}: {target}"
            assert not anchor or file not in pages or anchor in pages[file].anchors, (
                f"{path.relative_to(site)}: {target}"
            )
            followed += 1
    assert followed > 1000


def test_every_page_is_reached_from_the_first_one(site, pages):
    reached, left = set(), [site / "index.html"]
    while left:
        path = left.pop()
        if path in pages and path not in reached:
            reached.add(path)
            left += [file for _, file, _ in links_of(path, pages[path], site)]
    assert set(pages) - reached == {site / "404.html"}


def test_no_page_asks_another_host_for_anything(pages):
    for path, page in pages.items():
        shown = re.findall(r"<(?:script|img|link|iframe)\b[^>]*", path.read_text(encoding="utf-8"))
        assert not [tag for tag in shown if re.search(r"(?:src|href)=.?(?:https?:)?//", tag)], path
        assert "```" not in page.text, f"{path}: a block of code that Markdown has not taken"


def test_the_reference_has_every_public_name_and_every_command(site, pages):
    anchors = pages[site / "api" / "index.html"].anchors
    assert {f"hf_zero.{name}" for name in hf_zero.__all__} - {"hf_zero.__version__"} <= anchors
    from hf_zero.cli.app import app

    commands = {command.name or command.callback.__name__ for command in app.registered_commands if not command.hidden}
    assert {f"hf-zero-{name}" for name in commands} <= pages[site / "cli" / "index.html"].anchors
