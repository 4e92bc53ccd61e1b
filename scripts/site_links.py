"""Checks a built site: every link and picture is there, anchors too, and nothing is loaded from outside."""

from __future__ import annotations

import re
import sys
import urllib.parse
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["check_site"]

_OUTSIDE = re.compile(r"(?:[a-z]+:)?//")
# What leads outside is a link that a reader may follow; what is shown or run has to be here.
_LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
# It is served at any address, so its links begin at the top of a site whose address nobody knows here.
_ANYWHERE = "404.html"


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in {"id", "name"} and value:
                self.ids.add(value)
            elif name in {"href", "src"} and value is not None:
                self.links.append((tag, name, value))


def check_site(folder: Path) -> Iterator[str]:
    """What is wrong, a line each."""
    pages = {
        path.resolve(): _Page(path.read_text()) for path in sorted(folder.rglob("*.html")) if path.name != _ANYWHERE
    }
    for path, page in pages.items():
        for tag, name, link in page.links:
            problem = _problem(path, pages, tag, name, link)
            if problem:
                yield f"{path.relative_to(folder.resolve())}: {link}: {problem}"


def _problem(path: Path, pages: dict[Path, _Page], tag: str, name: str, link: str) -> str:
    if _OUTSIDE.match(link):
        return "it is loaded from outside" if (tag, name) in _LOADED else ""
    parts = urllib.parse.urlsplit(link)
    if parts.scheme:
        return ""
    target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return "there is no such file"
    anchor = urllib.parse.unquote(parts.fragment)
    # The theme's own script makes some of them.
    if anchor and target in pages and anchor not in pages[target].ids and not anchor.startswith("__"):
        return "there is no such heading"
    return ""


def main() -> int:
    """Print what is wrong in the site that is named, one line each."""
    problems = list(check_site(Path(sys.argv[1])))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
