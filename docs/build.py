"""Builds the site: `python -m docs.build` writes build/site, which opens without a server.

Pages come from docs/ and book/; settings, API and benchmarks are generated from the package and
from bench/results. Links to files of the repository lead to pages with their source.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from latex2mathml.converter import convert as to_mathml

from docs.check import find_broken_links
from docs.reference import api_page, benchmarks_page, settings_page
from vitrail.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PAGES, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
NAVIGATION = {  # pages by section, in order; a page that is not named here ends its section
    "Guides": [
        *("quick-start", "your-data", "multi-label", "fine-tuning", "from-scratch", "pretraining"),
        *("weights", "backbones", "evaluation", "trust", "explaining", "heads", "similar"),
        *(
            "search",
            "export",
            "serving",
            "planning",
            "many-machines",
            "python",
            "scikit-learn",
            "troubleshooting",
        ),
    ],
    "Book": [
        *("index", "before-you-start", "how-it-works", "sixty-lines", "how-it-learns"),
        *("learning-without-labels", "what-it-sees", "paper-figures", "how-sure", "into-the-world"),
        *("what-can-happen", "teaching"),
    ],
    "Reference": ["settings", "api", "benchmarks"],
}
REFERENCE = {  # a generated page: the words of docs/index.md that link to it on the site
    "settings": "every setting",
    "api": "every public function",
    "benchmarks": "all benchmarks",
}
FOLDERS = {"Guides": "", "Book": "book", "Reference": "reference"}
SHIM = "https://unpkg.com/iframe-worker/shim"  # makes the search work without a server
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
MATH = re.compile(r"\$\$(.+?)\$\$|(?<![\w$\\])\$([^$\n]+?)\$(?![\w$])", re.DOTALL)
CAPTION = re.compile(r"^(!\[[^\n]*\)\n\n\*(?:[^\n]|\n(?!\n))*\*)$", re.MULTILINE)  # below a picture
LINK = re.compile(r"(?P<start>!?\[[^\]]*\]\()(?P<target>[^)\s]+)(?P<end>\))")


def main() -> None:
    for folder in (PAGES, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    write_pages()
    config = write_config()
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "-f", config.name],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    config.unlink()
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    use_own_shim()
    if broken := find_broken_links(SITE):
        sys.exit("\n".join(broken))
    print(f"{len(list(SITE.rglob('*.html')))} pages: {(SITE / 'index.html').relative_to(ROOT)}")


def write_pages() -> None:
    """Fills build/docs with all pages, also the generated ones, and with what they link to."""
    sources: set[Path] = set()
    for folder in ("docs", "book"):
        target = PAGES if folder == "docs" else PAGES / "book"
        for path in sorted((ROOT / folder).glob("*.md")):
            write_page(target / path.name, convert_page(path.read_text(), path, sources))
    home = PAGES / "index.md"
    write_page(home, link_reference(home.read_text()))
    for page in (settings_page, api_page, benchmarks_page):
        name = page.__name__.removesuffix("_page")
        write_page(PAGES / "reference" / f"{name}.md", page())
    for path in sorted(sources):
        write_page(source_page(path), format_source(path))
    shutil.copytree(ROOT / "docs" / "assets", PAGES / "assets")
    shutil.copytree(ROOT / "book" / "figures", PAGES / "book" / "figures")
    for plot in (ROOT / "bench" / "results").glob("*.svg"):
        shutil.copy(plot, PAGES / "reference")


def link_reference(text: str) -> str:
    """The start page with links to the generated pages, which only the site has."""
    for name, words in REFERENCE.items():
        if text.count(words) != 1:
            raise UserError(f"docs/index.md says {words!r} {text.count(words)} times, not once")
        text = text.replace(words, f"[{words}](reference/{name}.md)")
    return text


def write_page(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def convert_page(text: str, path: Path, sources: set[Path]) -> str:
    """A page of the repository as Zensical reads it; adds linked files to `sources`."""
    text = re.sub(r"^<!-- (include|not run|test)[^>]*-->\n", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=[^\n])\n(?=```\w)", "\n\n", text)  # GitHub needs no empty line
    text = text.replace("<details>", '<details markdown="1">')
    text = CAPTION.sub(r"\1\n{: .caption }", text)
    parts = CODE.split(text)
    parts[::2] = [MATH.sub(format_math, part) for part in parts[::2]]
    return LINK.sub(lambda match: redirect_link(match, path, sources), "".join(parts))


def format_math(match: re.Match[str]) -> str:
    """A formula as MathML, which browsers draw without a script."""
    display = "block" if match[1] else "inline"
    formula = to_mathml((match[1] or match[2]).strip(), display=display)
    formula = formula.replace("*", "&#x2A;").replace("_", "&#x5F;")
    formula = formula.replace("<mi>ln</mi>", '<mi>ln</mi><mspace width="0.17em" />')
    if match[1]:
        return f"\n{formula}\n"
    # At the start of a line, Markdown takes <math> for a block, but not <span>.
    starts_line = match.string[: match.start()].endswith("\n")
    return f"<span>{formula}</span>" if starts_line else formula


def redirect_link(match: re.Match[str], page: Path, sources: set[Path]) -> str:
    """The link as the site needs it: pages stay pages, other files become pages of their source."""
    target, hash_mark, anchor = match["target"].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return match[0]
    file = (page.parent / target).resolve()
    if not file.exists() or not file.is_relative_to(ROOT):
        raise UserError(f"{page.relative_to(ROOT)} links to {target}, which does not exist")
    if file.is_relative_to(ROOT / "book" / "figures") or file.is_relative_to(ROOT / "docs/assets"):
        place = PAGES / file.relative_to(ROOT / "docs" if "assets" in file.parts else ROOT)
    elif file.suffix == ".md" and file.parent in (ROOT / "docs", ROOT / "book"):
        place = place_of(file)
    else:
        sources.add(file)
        place = source_page(file)
    link = os.path.relpath(place, place_of(page).parent)
    return match["start"] + link + hash_mark + anchor + match["end"]


def place_of(page: Path) -> Path:
    """Where a page of docs/ or book/ is in build/docs."""
    return PAGES / page.relative_to(ROOT / "docs" if page.parent.name == "docs" else ROOT)


def source_page(file: Path) -> Path:
    return PAGES / "source" / file.relative_to(ROOT).with_name(file.name + ".md")


def format_source(path: Path) -> str:
    """The page of a source file, or of a folder with its files."""
    name = path.relative_to(ROOT)
    if path.is_dir():
        modules = sorted(file for file in path.iterdir() if file.suffix in (".py", ".toml"))
        lines = [f"- `{file.name}`" for file in modules if file.name != "__init__.py"]
        return f"# {name}/\n\n" + "\n".join(lines) + "\n"
    language = {".py": "python", ".toml": "toml", ".md": "markdown"}.get(path.suffix, "text")
    return f'# {name}\n\n````{language} linenums="1"\n{path.read_text()}````\n'


def write_config() -> Path:
    """mkdocs.yml with the navigation, beside the original, where Zensical wants it."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    config["nav"] = [{"Home": "index.md"}, *navigation()]
    path = ROOT / "mkdocs.built.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def use_own_shim() -> None:
    """Replaces the one script that Zensical loads from another host by the file in assets."""
    for page in SITE.rglob("*.html"):
        own = os.path.relpath(SITE / "assets" / "iframe-worker.js", page.parent)
        page.write_text(page.read_text().replace(SHIM, own))


def navigation() -> Iterator[dict[str, Any]]:
    for section, order in NAVIGATION.items():
        folder = PAGES / FOLDERS[section]
        stems = {path.stem for path in folder.glob("*.md")} - ({"index"} - set(order))
        ranks = {stem: rank for rank, stem in enumerate(order)}
        pages = sorted(stems, key=lambda stem: (ranks.get(stem, len(order)), stem))
        yield {section: [str((folder / f"{stem}.md").relative_to(PAGES)) for stem in pages]}


if __name__ == "__main__":
    main()
