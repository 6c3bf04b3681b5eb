"""Take the screenshot of the site in the README, with Chromium.

Usage: `python docs/tools/screenshot.py build/site docs/img/site.png`
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PAGE, SECTION = "course/attention.html", "#the-causal-mask"


def main(site: str, picture: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        page.goto((Path(site) / PAGE).resolve().as_uri())
        page.evaluate("section => document.querySelector(section).scrollIntoView()", SECTION)
        page.wait_for_timeout(500)  # time for the sidebar to scroll, in ms
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
