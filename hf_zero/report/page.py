"""Writes a report as one self-contained HTML file, readable on a phone, in dark mode and on paper."""

import time
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from ..checkpoint.files import replace_file
from ..checkpoint.structure import PAGE_NAME
from .curves import Report
from .figures import draw
from .sections import make_report

_TEMPLATE = Path(__file__).with_name("page.html")


def render_page(report: Report) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals["draw"] = draw
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(report=report, made=time.strftime("%Y-%m-%d %H:%M"))


def write_page(folder: Path, path: Path | None = None) -> Path:
    """Writes the page of the run in `folder`, by default next to its log, and returns the path. A previous page is replaced.

    Raises:
        ReportError: the folder has no data for a report.
    """
    text = render_page(make_report(folder))
    path = path or folder / PAGE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)
    return path
