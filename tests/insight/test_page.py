"""The page: self-contained, safe with any name, and working in a browser."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.insight.examples import example, with_hot_patch
from vitrail.insight import patch_attention as packing
from vitrail.insight.explanation import explanation_page
from vitrail.insight.page import describe_omissions

HOSTILE = (
    "\"><img src=x onerror=\"document.title='hit'\"></script><script>document.title='hit'</script>"
)


class Reader(HTMLParser):
    """What a browser would see: tags with their attributes, and text by tag."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], False
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag == "script"
        self.scripts += [""] * self.inside

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def one():
    return with_hot_patch(example(name="fish.jpg"), 1, 2)


@pytest.fixture(scope="module")
def html(one):
    return explanation_page([one, example("grey", name="other.png")])


@pytest.fixture(scope="module")
def hostile():
    names = (HOSTILE, "\u202egnp", "a\nb", "x" * 300, "日本")
    return explanation_page([example(names=names, target=0, name=f"{HOSTILE}.jpg")], title=HOSTILE)


def test_the_page_loads_nothing_and_runs_one_script(html):
    read = Reader(html)
    assert not {"iframe", "object", "embed", "form", "link", "base", "video"} & {
        tag for tag, _ in read.tags
    }
    attributes = [(name, value) for _, found in read.tags for name, value in found.items()]
    assert not [name for name, _ in attributes if name.startswith("on")]
    for name, value in attributes:
        if name in ("src", "href", "srcset"):
            assert value.startswith("data:image/")
    assert "url(" not in html and "@import" not in html and "http://" not in html
    policy = next(found["content"] for _, found in read.tags if "http-equiv" in found)
    digest = base64.b64encode(hashlib.sha256(read.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert f"script-src 'sha256-{digest}';" in policy
    assert len(read.scripts) == 2  # the data, which no browser runs, and the script


def test_the_page_holds_the_maps(one, html):
    data = json.loads(Reader(html).scripts[0])["images"][0]
    levels = np.frombuffer(base64.b64decode(data["levels"]), np.uint8)
    assert np.array_equal(
        levels.reshape(one.patch_attention.levels.shape), one.patch_attention.levels
    )
    row_max = np.frombuffer(base64.b64decode(data["rowMax"]), "<f4")
    assert np.array_equal(
        row_max.reshape(one.patch_attention.row_max.shape), one.patch_attention.row_max
    )


def test_hostile_names_are_text_on_the_page(hostile):
    read = Reader(hostile)
    assert len(read.scripts) == 2
    assert not [found for tag, found in read.tags if tag == "img" and found.get("src") == "x"]
    labels = [label for label, _ in json.loads(read.scripts[0])["images"][0]["top"]]
    assert HOSTILE in labels and r"a\nb" in labels and r"\u202egnp" in labels


def test_an_image_fits_into_its_bytes():
    assert packing.MAX_BYTES * 4 / 3 <= 4e6
    one = example(max_bytes=8 * 17 * 16)
    assert describe_omissions(one) == ("To keep this page small, 1 of 3 layers show single heads.")
    assert describe_omissions(example()) == "" and describe_omissions(example(layers=[1])) == ""


def test_the_page_names_what_it_omits():
    one = example(max_bytes=3 * 17 * 16)
    assert describe_omissions(one) == (
        "To keep this page small, 2 of 3 layers are shown, only the mean over heads is shown."
    )


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture
def visit(browser, need, tmp_path):
    """Opens a page: what went wrong in it, and what it asked the network for, must be nothing."""
    need("chromium")
    wrong, opened = [], []

    def go(html, **settings):
        (tmp_path / "page.html").write_text(html)
        tab = browser.new_page(**settings)
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda request: wrong.append(request.url))
        tab.goto(f"file://{tmp_path}/page.html")
        opened.append(tab)
        return tab

    yield go
    for tab in opened:
        tab.close()
    fine = ("file://", "data:", "Canvas2D: Multiple readback")  # the last by these tests
    assert not [words for words in wrong if not words.startswith(fine)]


def colours(tab, selector="#over"):
    """The pixels of a canvas."""
    return tab.eval_on_selector(
        selector,
        "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]",
    )


def over(tab, row, column, rows=4, columns=4):
    box = tab.locator("#frame").bounding_box()
    x = box["x"] + (column + 0.5) * box["width"] / columns
    tab.mouse.move(x, box["y"] + (row + 0.5) * box["height"] / rows)


def test_moving_over_a_patch_shows_its_attention(visit, one, html):
    tab = visit(html)
    over(tab, 0, 3)
    first, said = colours(tab), tab.inner_text("#status")
    over(tab, 2, 1)
    assert colours(tab) != first
    assert "row 0, column 3" in said and "row 2, column 1" in tab.inner_text("#status")


def test_the_colours_are_those_of_the_patch(visit, one, html):
    tab = visit(html)
    over(tab, 2, 1)
    layer, head = map(int, tab.get_attribute("#matrix [aria-pressed=true]", "data-map").split())
    row = one.patch_attention.weights(layer, head)[1 + 2 * 4 + 1]
    density = colours(tab)[3::4]
    assert int(np.argmax(density)) == int(np.argmax(row))
    order = np.argsort(row)
    assert (np.diff(np.array(density)[order]) >= 0).all()


def test_clicking_a_small_map_chooses_layer_and_head(visit, one, html):
    tab = visit(html)
    over(tab, 2, 1)
    tab.click("[data-map='0 2']")
    assert "Layer 0, head 2" in tab.inner_text("#status")
    number = one.patch_attention.maps.index((0, 2))
    maximum = one.patch_attention.row_max[number, 1 + 9]
    assert tab.inner_text("#high") == f"{100 * maximum:.1f}\u00a0%"


def test_small_maps_follow_the_patch(visit, html):
    tab = visit(html)
    over(tab, 0, 0)
    before = colours(tab, "[data-map='0 1'] canvas")
    over(tab, 3, 3)
    assert colours(tab, "[data-map='0 1'] canvas") != before


def test_methods_can_be_switched(visit, one, html):
    tab = visit(html)
    tab.click(f"[data-mode='{one.method}']")
    density = np.array(colours(tab)[3::4])
    assert density.argmax() == 1 * 4 + 2 and (density > 0).sum() == 1
    over(tab, 1, 2)
    assert "row 1, column 2 has 100.0\u00a0% of the sum" in tab.inner_text("#status")
    tab.click("[data-mode=query]")
    assert "[CLS] gives" in tab.inner_text("#status")


def test_keys_move_the_patch(visit, html):
    tab = visit(html)
    over(tab, 1, 1)
    tab.focus("#frame")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight"):
        tab.keyboard.press(key)
    assert "row 2, column 3" in tab.inner_text("#status")
    tab.keyboard.press("Space")
    assert tab.locator("#over").is_hidden()


def test_a_click_pins_the_patch(visit, html):
    tab = visit(html)
    over(tab, 1, 1)
    tab.mouse.down()
    tab.mouse.up()
    over(tab, 3, 0)
    assert "row 1, column 1" in tab.inner_text("#status")


def test_a_tap_chooses_the_patch_on_a_phone_and_nothing_is_wider_than_it(visit, html):
    tab = visit(html, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    box = tab.locator("#frame").bounding_box()
    tab.touchscreen.tap(box["x"] + 0.1 * box["width"], box["y"] + 0.9 * box["height"])
    assert "row 3, column 0" in tab.inner_text("#status")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_another_image_can_be_chosen(visit, html):
    tab = visit(html)
    tab.click("#strip button:nth-child(2)")
    assert tab.inner_text("#where") == "other.png"
    assert tab.locator("#photo").get_attribute("alt") == "other.png"


def test_without_scripts_the_overview_is_there(visit, html):
    tab = visit(html, java_script_enabled=False)
    assert tab.locator("img.still").count() == 2
    assert tab.locator("img.still").first.bounding_box()["width"] > 300
    assert tab.locator("#all").is_hidden()


def test_hostile_names_do_nothing_in_a_browser(visit, hostile):
    tab = visit(hostile)
    assert tab.title() != "hit"
    assert tab.inner_text("#where").endswith(f"{HOSTILE}.jpg")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1280


def test_an_unescaped_name_would_be_caught(browser, need, tmp_path, hostile):
    need("chromium")
    careless = re.sub(r"<meta http-equiv[^>]*>", "", hostile).replace(
        "<title>", "<title>x</title>" + HOSTILE
    )
    (tmp_path / "page.html").write_text(careless)
    tab = browser.new_page()
    tab.goto(f"file://{tmp_path}/page.html")
    title = tab.title()
    tab.close()
    assert title == "hit"


def test_a_script_that_was_changed_does_not_run(browser, need, tmp_path, html):
    need("chromium")
    (tmp_path / "page.html").write_text(html.replace('"use strict";', '"use strict"; ;'))
    tab = browser.new_page()
    tab.goto(f"file://{tmp_path}/page.html")
    hidden = tab.locator("#all").is_hidden()
    tab.close()
    assert hidden


def test_merged_patches_are_selected_as_cells(visit, monkeypatch):
    monkeypatch.setattr(packing, "MAX_CELLS", 4)
    tab = visit(explanation_page([example()]))
    over(tab, 1, 0, 2, 2)
    assert "row 1, column 0" in tab.inner_text("#status")
    assert "a cell covers 2 x 2 patches" in tab.inner_text("#note")
    tab.click("[data-mode=relevance]")
    assert "row 2, column 0" in tab.inner_text("#status")


def test_the_page_opens_at_the_hottest_patch(visit, one):
    tab = visit(explanation_page([one]))
    assert "row 1, column 2" in tab.inner_text("#status")
