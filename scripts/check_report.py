#!/usr/bin/env python3
"""Look at a report in a headless Chromium, in light and in dark, and take a picture of each.

Nothing but the file may be asked for, no error may be logged, each plot must have an extent and paint something, and
text and lines must stand out against the page (WCAG 2.2, 1.4.3 and 1.4.11). The browser is one of the system
(`apt-get install chromium-headless-shell` or `chromium`), or the one that CHROMIUM names; playwright only drives it.

    python scripts/check_report.py outputs/my_draft/report.html --pictures pictures
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCHEMES = ("light", "dark")
TEXT_CONTRAST, LINE_CONTRAST = 4.5, 3.0
# Grid lines and axes only guide the eye.
LOOK = """
() => {
  const channels = (css) => css.match(/[\\d.]+/g).map(Number);
  const luminance = (css) => {
    const [r, g, b] = channels(css).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const opaque = (css) => css.startsWith('rgb') && (channels(css).length < 4 || channels(css)[3] > 0);
  const paper = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const css = getComputedStyle(e).backgroundColor;
      if (opaque(css)) return css;
    }
    return 'rgb(255, 255, 255)';
  };
  const shown = (element) => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.height > 0;
  };
  document.querySelectorAll('details').forEach((e) => { e.open = true; });
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, owner = node.parentElement;
    if (!node.data.trim() || ['STYLE', 'SCRIPT', 'style', 'defs'].includes(owner.tagName) || !shown(owner)) continue;
    const style = getComputedStyle(owner), color = owner.closest('svg') ? style.fill : style.color;
    texts.push({ text: node.data.trim().slice(0, 40), contrast: contrast(color, paper(owner)) });
  }
  const plots = [...document.querySelectorAll('figure')].map((figure) => {
    const box = figure.querySelector('svg').getBoundingClientRect();
    const series = [...figure.querySelectorAll('[style*="--series"]')];
    const drawn = series.filter((e) => { const b = e.getBoundingClientRect(); return b.width + b.height > 0; });
    const lines = drawn.map((e) => {
      const style = getComputedStyle(e);
      return contrast(opaque(style.stroke) ? style.stroke : style.fill, paper(figure));
    });
    return { title: figure.getAttribute('aria-label'), width: box.width, height: box.height,
             series: drawn.length, contrast: Math.min(...lines) };
  });
  return { texts, plots, paper: paper(document.body), scripts: document.scripts.length,
           wide: document.documentElement.scrollWidth > document.documentElement.clientWidth };
}
"""


@dataclass
class Seen:
    """What the browser saw of a page in one colour scheme."""

    scheme: str
    texts: list[dict[str, Any]] = field(default_factory=list)
    plots: list[dict[str, Any]] = field(default_factory=list)
    paper: str = ""
    scripts: int = 0
    wide: bool = False
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Return what is wrong, a line each."""
        found = [f"console: {message}" for message in self.messages]
        found += [f"request: {url}" for url in self.requests]
        found += ["the page has a script"] * bool(self.scripts)
        found += ["the page is wider than the window"] * self.wide
        found += ["there is no plot"] * (not self.plots)
        for plot in self.plots:
            name = f"plot {plot['title']!r}"
            if plot["width"] < 100 or plot["height"] < 50:
                found.append(f"{name} is {plot['width']:.0f} × {plot['height']:.0f} pixels")
            if not plot["series"]:
                found.append(f"{name} paints nothing")
            elif plot["contrast"] < LINE_CONTRAST:
                found.append(f"{name}: a line's contrast is {plot['contrast']:.2f}, below {LINE_CONTRAST}")
        found += [
            f"text {text['text']!r}: contrast {text['contrast']:.2f}, below {TEXT_CONTRAST}"
            for text in self.texts
            if text["contrast"] < TEXT_CONTRAST
        ]
        return [f"{self.scheme}: {line}" for line in found]


def find_browser() -> str | None:
    """Return the Chromium that CHROMIUM names, or the first on PATH."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in BROWSERS if (path := shutil.which(name))), None)


def look(
    report: Path, browser: str, pictures: Path | None = None, width: int = 1100, height: int | None = None
) -> list[Seen]:
    """Open ``report`` in each scheme and return what was seen.

    Args:
        report: The HTML file.
        browser: The Chromium to start.
        pictures: Folder that gets ``<name>_<scheme>.png``.
        width: Of the window, in pixels.
        height: Pixels of the pictures from the page's top; all of it by default.
    """
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as playwright:
        # Chromium as root has no sandbox; what it opens here is a file of ours that runs no script.
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for scheme in SCHEMES:
            page = chromium.new_page(color_scheme=scheme, viewport={"width": width, "height": height or 800})
            seen, address = Seen(scheme), report.resolve().as_uri()
            page.on("console", lambda message, seen=seen: seen.messages.append(message.text))
            page.on("pageerror", lambda error, seen=seen: seen.messages.append(str(error)))
            page.on("request", lambda request, seen=seen: seen.requests.append(request.url))
            page.goto(address)
            if pictures is not None:
                page.screenshot(path=str(pictures / f"{report.stem}_{scheme}.png"), full_page=height is None)
            vars(seen).update(page.evaluate(LOOK))
            seen.requests = [url for url in seen.requests if url != address]
            found.append(seen)
            page.close()
        chromium.close()
    return found


def main() -> int:
    """Look, print what is wrong, and return 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="where to put the pictures")
    parser.add_argument("--width", type=int, default=1100, metavar="PIXELS", help="of the window (default: 1100)")
    parser.add_argument("--height", type=int, metavar="PIXELS", help="of the pictures (default: the whole page)")
    args = parser.parse_args()
    browser = find_browser()
    if browser is None:
        print("no Chromium: apt-get install chromium-headless-shell, or set CHROMIUM to one", file=sys.stderr)
        return 2
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
    seen = look(args.report, browser, args.pictures, args.width, args.height)
    problems = [line for one in seen for line in one.problems()]
    print("\n".join(problems) or f"{args.report}: {len(seen[0].plots)} plots, {len(seen[0].texts)} texts, all readable")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
