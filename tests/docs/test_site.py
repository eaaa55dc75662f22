"""The site: it builds, its links and anchors lead somewhere, and its reference is complete."""

import json
import re
from dataclasses import fields, is_dataclass
from typing import Literal

import pytest

import vitrail
from docs import build, reference
from docs.check import find_broken_links
from vitrail.errors import UserError
from vitrail.run.recipe import SECTIONS


@pytest.mark.slow
def test_the_site_builds_and_works_without_a_network():
    build.main()  # exits if a link or an anchor is broken, or a script comes from another host
    for folder, target in (("docs", build.SITE), ("book", build.SITE / "book")):
        for page in (build.ROOT / folder).glob("*.md"):
            assert (target / f"{page.stem}.html").exists(), page.name
    index = (build.SITE / "search.js").read_text()  # a script, because file:// cannot fetch JSON
    assert "Vision Transformer" in index and (build.SITE / "assets" / "iframe-worker.js").exists()
    page = (build.SITE / "book" / "how-it-works.html").read_text()
    assert page.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') >= 5
    assert "$$" not in page


def test_the_start_page_links_to_the_reference():
    page = build.ROOT / "docs" / "index.md"
    text = build.link_reference(page.read_text())
    for name in build.NAVIGATION["Reference"]:
        assert f"](reference/{name}.md)" in text
    with pytest.raises(UserError, match="says 'every setting' 0 times"):
        build.link_reference("nothing")


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("missing.html", "does not exist"),
        ("other.html#missing", "no such anchor"),
        ("#missing", "no such anchor"),
    ],
)
def test_a_broken_link_is_found(link, reason, tmp_path):
    (tmp_path / "page.html").write_text(f'<p id="here"><a href="{link}">x</a>')
    (tmp_path / "other.html").write_text('<h2 id="title">x</h2><a href="page.html#here">x</a>')
    (broken,) = find_broken_links(tmp_path)
    assert broken.startswith("page.html") and reason in broken


def test_a_script_of_another_host_is_found(tmp_path):
    (tmp_path / "page.html").write_text('<script src="https://example.org/x.js"></script>')
    assert "another host" in find_broken_links(tmp_path)[0]


def test_a_link_to_a_missing_file_stops_the_build():
    page = build.ROOT / "docs" / "quick-start.md"
    with pytest.raises(UserError, match=r"links to nowhere\.md, which does not exist"):
        build.convert_page("[x](nowhere.md)", page, set())


def test_code_is_left_alone():
    page = build.ROOT / "docs" / "quick-start.md"
    text = "```sh\necho $A $B\n```\n\nand `$x$`\n"
    assert build.convert_page(text, page, set()) == text


def test_a_formula_at_the_start_of_a_line_stays_in_its_paragraph():
    page = build.ROOT / "book" / "how-sure.md"
    text = build.convert_page("The loss is\n$x$, and\n\n$y$ is $z$.\n", page, set())
    lines = [line for line in text.splitlines() if "<math" in line]
    assert len(lines) == 2 and not [line for line in lines if line.startswith("<math")]


def test_a_caption_below_a_picture_has_its_style():
    page = build.ROOT / "docs" / "index.md"
    picture = "![x](../book/figures/gallery.jpg)\n\n"
    caption = "*Ten photos, and\n*every* number.*"
    assert build.convert_page(f"{picture}{caption}\n\nx\n", page, set()) == (
        f"![x](book/figures/gallery.jpg)\n\n{caption}\n{{: .caption }}\n\nx\n"
    )
    assert "caption" not in build.convert_page(f"{picture}It draws *x* here.\n", page, set())


def test_a_link_to_a_source_file_leads_to_its_page():
    sources = set()
    page = build.ROOT / "book" / "how-it-works.md"
    text = build.convert_page("[vit](../vitrail/model/vit.py)", page, sources)
    assert text == "[vit](../source/vitrail/model/vit.py.md)"
    assert sources == {build.ROOT / "vitrail" / "model" / "vit.py"}


def test_every_setting_is_in_the_reference():
    page = reference.settings_page()
    for section, cls in SECTIONS.items():
        for field in fields(cls):
            if f"{section}.{field.name}" not in SECTIONS:
                assert f"| `{section}.{field.name}` |" in page
    assert "peak learning rate" in page  # the comment beside the field
    assert "| `train.log_every` | int | `10` |" in page
    assert "``" not in page  # an empty default


def test_every_public_name_is_in_the_reference():
    page = reference.api_page()
    for name in vitrail.__all__:
        assert f"### `{name}`\n" in page
        if is_dataclass(getattr(vitrail, name)):
            assert "| field | meaning |" in page
    assert "#### `Classifier.explain`" in page and "- `minutes`: time until" in page


def test_signatures_show_types_without_quotes():
    def load(path: "str | int", labels: Literal["one", "many"] | None = None) -> "bool": ...

    assert reference.format_signature("load", load) == (
        'load(path: str | int, labels: Literal["one", "many"] | None = None) -> bool'
    )
    assert not re.search(r"Optional\[|Union\[|NoneType", reference.api_page())


def test_every_measured_table_is_in_the_reference():
    page = reference.benchmarks_page().replace("&nbsp;", " ")
    for path in reference.RESULTS.glob("*.json"):
        assert json.loads(path.read_text()) and path.with_suffix(".md").read_text() in page
