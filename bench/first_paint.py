"""How long is it until a browser paints the page at `/`?

Method: headless Chromium opens the page of a server with the mock engine. In each round it has
        never been there before, then it opens the page once more with what it has kept. The first
        contentful paint is Chromium's own figure, from the start of the navigation.
Run:    make ui-test; PYTHONPATH=bench:.venv/ui python bench/first_paint.py --rounds 10
"""

import shutil
from typing import Any

from support.report import Quantity, Report, parser
from support.servers import headrace

FIRST, AGAIN = "first visit", "second visit"
PAINT = """() => new Promise((resolve) => new PerformanceObserver((list) => {
    for (const entry of list.getEntriesByName("first-contentful-paint")) resolve(entry.startTime)
}).observe({type: "paint", buffered: true}))"""


def paint_ms(page: Any, url: str) -> float:
    """Open the page; return when it was painted."""
    page.goto(url)
    found: float = page.evaluate(PAINT)
    return found


def main() -> None:
    """Run and print the report."""
    args = parser(__doc__, rounds=10).parse_args()
    report = Report("first_paint", args)
    took: dict[str, list[float]] = {FIRST: [], AGAIN: []}
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        report.miss("Chromium: it takes Debian's package chromium, and playwright")
        report.finish()
        return
    with headrace("--engine", "mock") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        report.versions["chromium"] = browser.version
        for number in range(args.rounds + 1):
            context = browser.new_context()
            page = context.new_page()
            for visit in took:
                found = paint_ms(page, server.url)
                if number:  # the first round is thrown away
                    took[visit].append(found)
            context.close()
        browser.close()
    report.add(Quantity("first contentful paint", "ms", took))
    report.finish()


if __name__ == "__main__":
    main()
