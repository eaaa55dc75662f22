"""Finds broken links: every link, picture and anchor of the built pages, without a network."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("source", "src")}


class Page(HTMLParser):
    """The anchors and the links of one page."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []  # what the browser fetches by itself
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        for name in ("id", "name"):
            if value := values.get(name):
                self.anchors.add(value)
        if tag == "link" and values.get("rel") not in ("stylesheet", "icon"):
            return
        for name in ("href", "src"):
            if (tag, name) in LOADED and values.get(name):
                self.loaded.append(values[name] or "")
            elif tag == "a" and values.get(name):
                self.links.append(values[name] or "")


def find_broken_links(site: Path) -> list[str]:
    """One line for each link that leads nowhere, and for each file of another host."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    return [
        f"{path.relative_to(site)}: {link}: {reason}"
        for path, page in pages.items()
        for link in [*page.links, *page.loaded]
        if (reason := explain_broken_link(link, link in page.loaded, path, pages, site))
    ]


def explain_broken_link(
    link: str, loaded: bool, path: Path, pages: dict[Path, Page], site: Path
) -> str:
    """Why a link is broken; empty if it is not."""
    parts = urlsplit(link)
    if parts.scheme == "data":
        return ""
    if parts.scheme or parts.netloc:
        return "is loaded from another host" if loaded else ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if parts.path.startswith("/"):
        target = site / parts.path.lstrip("/")
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return "the file does not exist"
    if parts.fragment and target in pages and parts.fragment not in pages[target].anchors:
        return "the page has no such anchor"
    return ""
