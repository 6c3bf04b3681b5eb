"""Take a screenshot of a page of `jaxgpt inspect` with Chromium, as for the README.

jaxgpt inspect runs/python-char --prompt $'def read(self, path):\n    return self.' --html page.html
python docs/tools/screenshot.py page.html docs/img/inspector.png
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(page: str, picture: str) -> None:
    """Write a picture of the first screen of a page."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1200, "height": 800})
        tab.goto(Path(page).resolve().as_uri())
        tab.wait_for_timeout(500)  # time for the page to compute its layout, in ms
        tab.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
