"""Draws the first half of a run's report as docs/figures/report.svg, for light and for dark pages. Needs Chromium.

    apt-get install chromium
    python scripts/report_picture.py outputs/gpt2/zero_report.html 1400

The SVG contains one screenshot for each color scheme, and shows the one of the reader's. Two parts of the page are next to each
other, because the page is long and narrow; the second part begins at the given pixel.
"""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

from PIL import Image

TO = Path(__file__).parents[1] / "docs" / "figures" / "report.svg"
WIDTH, HEIGHT = 770, 1380
"""Pixels of a part of the page."""
_TITLE = "The first half of a report: answers, loss, throughput, where time went, one step and memory"
_SCHEMES = {"dark": 0, "light": 1}
"""Chromium's values of `preferredColorScheme`."""
_FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync --hide-scrollbars"


def screenshot(page: Path, scheme: str, second: int, folder: Path) -> bytes:
    """Returns a PNG of two parts of a page in a color scheme: from the top, and from the pixel `second`."""
    frame = f"border: 0; width: {WIDTH}px; height: {4 * HEIGHT}px"
    parts = (
        f"<div style='float: left; overflow: hidden; width: {WIDTH}px; height: {HEIGHT}px'>"
        f"<iframe src='{page.resolve().as_uri()}' style='{frame}; margin-top: {-begin}px'></iframe></div>"
        for begin in (0, second)
    )
    both, picture = folder / "both.html", folder / f"{scheme}.png"
    both.write_text(f"<meta name='color-scheme' content='light dark'><body style='margin: 0'>{''.join(parts)}</body>")
    command = [
        "chromium",
        *_FLAGS.split(),
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={2 * WIDTH},{HEIGHT}",
    ]
    command += [f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}", f"--screenshot={picture}", both.as_uri()]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    packed = io.BytesIO()
    # 64 colors need a third of the bytes.
    Image.open(picture).convert("RGB").quantize(64).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def main() -> None:
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_file():
        sys.exit(f"usage: {sys.argv[0]} zero_report.html 1400")
    size = f"width='{2 * WIDTH}' height='{HEIGHT}'"
    images = []
    with tempfile.TemporaryDirectory() as folder:
        for scheme in _SCHEMES:
            data = base64.b64encode(screenshot(Path(sys.argv[1]), scheme, int(sys.argv[2]), Path(folder))).decode()
            images.append(f"<image class='{scheme}' {size} href='data:image/png;base64,{data}'/>")
    TO.write_text(
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} viewBox='0 0 {2 * WIDTH} {HEIGHT}' role='img'>\n"
        f"<title>{escape(_TITLE)}</title>\n"
        "<style>.dark { display: none } @media (prefers-color-scheme: dark) "
        "{ .dark { display: inline } .light { display: none } }</style>\n" + "\n".join(images) + "\n</svg>\n"
    )
    print(f"{TO}: {TO.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
