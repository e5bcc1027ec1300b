"""How long the chat page takes to show a conversation of 2,000 turns, in a headless browser.

python -m tests.server.page_paint
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import localrt
from tests.conftest import write_tiny_model
from tests.server.conftest import serving
from tests.server.scripted import write_long

TURNS, RUNS = 2000, 7
TEXT = "A **sentence** of an answer, with `code` and a [link](https://x.example).\n\n" * 8
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "history.db")
        id = write_long(file, [f"{number}: {TEXT}" for number in range(TURNS)])
        Path(folder, "model").mkdir()
        with (
            localrt.load(write_tiny_model(Path(folder, "model")), draft="off") as model,
            serving(model, history=file) as running,
            sync_playwright() as driver,
        ):
            browser = driver.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            paints, whole = [], []
            for _ in range(RUNS):
                page = browser.new_page()
                page.goto(f"{running.url}/#conv_{id}")
                page.locator("article").nth(29).wait_for()
                paints.append(page.evaluate(PAINT))
                whole.append(page.evaluate("performance.now()"))
                page.close()
            for what, times in (("first paint", paints), ("last part shown", whole)):
                spread = f"{min(times):.0f} to {max(times):.0f}"
                print(f"{what}: {statistics.median(times):.0f} ms ({spread})")


if __name__ == "__main__":
    main()
