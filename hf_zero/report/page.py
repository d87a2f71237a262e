"""The report as one HTML file that needs nothing else: readable on a phone, in the dark and on paper."""

import os
import time
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from .document import Report
from .draw import draw
from .log_file import PAGE_NAME
from .make_report import make_report

_TEMPLATE = Path(__file__).with_name("page.html")


def render_page(report: Report) -> str:
    """The page's text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals["draw"] = draw
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(report=report, made=time.strftime("%Y-%m-%d %H:%M"))


def write_page(folder: Path, path: Path | None = None) -> Path:
    """Writes the page of the run in `folder`, by default beside its log; returns where it is. A former page is replaced.

    Raises:
        ReportError: there is nothing to report on.
    """
    text = render_page(make_report(folder))
    path = path or folder / PAGE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
    return path
