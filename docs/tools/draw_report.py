"""Draw the top of a report as a small picture, for README.md: ``python docs/tools/draw_report.py REPORT OUT.png``.

Needs Chromium. The picture in the repository is the report of ``make demo``: runs/demo/train/report.html.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

SIZE = (1200, 940)
COLOURS = 64


def draw_report(report: Path, out: Path) -> None:
    """Take a screenshot in light colours and reduce its number of colours."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Install Chromium first, for example: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "page.png"
        light = report.read_text(encoding="utf-8").replace('<html lang="en">', '<html lang="en" data-theme="light">')
        page.write_text(light, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=3000"]
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        subprocess.run(
            [browser, *options, size, f"--screenshot={picture}", page.as_uri()],
            check=True,
            timeout=60,
            capture_output=True,
        )
        Image.open(picture).convert("RGB").quantize(COLOURS).save(out, optimize=True)


if __name__ == "__main__":
    draw_report(Path(sys.argv[1]), Path(sys.argv[2]))
