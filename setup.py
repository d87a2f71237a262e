"""Metadata that pyproject.toml cannot hold: URLs of the repository, the README's links, and the wheel's bill of materials.

`HF_ZERO_URL=https://HOST/OWNER/REPOSITORY python -m build` sets the URL of the repository. Without the variable there
are no URLs, and the README's links to other files become plain text: a registry shows the README without these files.
"""

import json
import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

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


def bill_of_materials(name: str, version: str, requirements: list[str]) -> str:
    """The CycloneDX document of the wheel, which bundles no other code: the package and its requirements.

    Without a time or a random number, so that two builds make the same bytes.
    """
    own = f"pkg:pypi/{name}@{version}"
    required = [(re.split(r"[^\w.-]", each, maxsplit=1)[0], each) for each in sorted(requirements)]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": name,
                "version": version,
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": [
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{other}",
                "name": other,
                "purl": f"pkg:pypi/{other}",
                "properties": [{"name": "requirement", "value": requirement}],
            }
            for other, requirement in required
        ],
        "dependencies": [{"ref": own, "dependsOn": [f"pkg:pypi/{other}" for other, _ in required]}],
    }
    return json.dumps(document, indent=2) + "\n"


class WheelWithBill(bdist_wheel):
    """Adds the bill of materials to the wheel's metadata, in the folder that PEP 770 reserves for it."""

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        super().egg2dist(egginfo_path, distinfo_path)
        metadata = self.distribution.metadata
        text = bill_of_materials(metadata.get_name(), metadata.get_version(), self.distribution.install_requires)
        bill = Path(distinfo_path, "sboms", "hf_zero.cdx.json")
        bill.parent.mkdir(exist_ok=True)
        bill.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    where = os.environ.get("HF_ZERO_URL", "").rstrip("/")
    [said] = re.findall(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    setup(
        cmdclass={"bdist_wheel": WheelWithBill},
        long_description=long_description(where, said),
        long_description_content_type="text/markdown",
        project_urls=project_urls(where, said),
    )
