"""The metadata that depend on where the repository lies: its URLs and the README's links. The rest is in pyproject.toml.

`HF_ZERO_URL=https://HOST/OWNER/REPOSITORY python -m build` names the place. Without the variable there are no URLs, and the
README's links to other files become plain text: a registry shows the README without the files beside it.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def long_description(url: str, version: str) -> str:
    """The README, whose links and pictures lead to the tag of this version below `url`."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if not url:
            return "" if picture else text
        return f"{picture}[{text}]({url}/{'raw' if picture else 'blob'}/v{version}/{target})"

    return LINK.sub(absolute, (ROOT / "README.md").read_text(encoding="utf-8"))


def project_urls(url: str, version: str) -> dict[str, str]:
    """The links that a registry shows beside the README; none without `url`."""
    if not url:
        return {}
    tree = f"{url}/blob/v{version}"
    return {
        "Repository": url,
        "Documentation": f"{tree}/docs/README.md",
        "Changelog": f"{tree}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


if __name__ == "__main__":
    where = os.environ.get("HF_ZERO_URL", "").rstrip("/")
    [said] = re.findall(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    setup(
        long_description=long_description(where, said),
        long_description_content_type="text/markdown",
        project_urls=project_urls(where, said),
    )
