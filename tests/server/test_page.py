"""The page in a real browser: an image goes in, answers and reasons come out."""

import io
import re
import time

import numpy as np
import pytest

from tests.inference.test_trust import calibrated, weights
from tests.server.conftest import CLASSES, picture, write_model
from vitrail.insight.methods import FAST
from vitrail.server.assets import PAGE

__all__ = ["calibrated", "weights"]

HOSTILE = "<img src=x onerror=\"document.title='hit'\">"
TOKEN = "0123456789abcdef0123"


@pytest.fixture
def visit(browser, need, server):
    """Opens the page: nothing may go wrong in it, and nothing may come from elsewhere."""
    need("chromium")
    wrong, opened = [], []

    def go(where=server, **settings):
        tab = browser.new_page(**settings)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("request", lambda request: wrong.append(request.url))
        tab.goto(where.url)
        opened.append((tab, where.url))
        return tab

    yield go
    fine = ("data:", "blob:", *(url for _, url in opened))
    for tab, _ in opened:
        tab.close()
    ignored = ("Failed to load resource: the server responded with a status of 4",)
    assert not [words for words in wrong if not words.startswith((*fine, *ignored))]


def show(tab, body=None):
    """Gives the page an image and waits for its explanation."""
    file = {"name": "bird.jpg", "mimeType": "image/jpeg", "buffer": body or picture((64, 48))}
    tab.set_input_files("#file", file)
    tab.wait_for_selector("#modes button:nth-child(3)")
    tab.wait_for_selector("#matrix canvas")
    return tab


def wait_for_text(tab, selector, text):
    """The policy of the page forbids what `wait_for_function` does."""
    from playwright.sync_api import expect

    expect(tab.locator(selector)).to_contain_text(text, timeout=30_000)


def over(tab, row, column, size=4):
    tab.locator("#frame").scroll_into_view_if_needed()
    box = tab.locator("#frame").bounding_box()
    x = box["x"] + (column + 0.5) * box["width"] / size
    tab.mouse.move(x, box["y"] + (row + 0.5) * box["height"] / size)


def test_an_image_is_answered_and_explained(visit, server):
    tab = show(visit())
    answer = server.call("/predict", picture((64, 48))).json
    first = tab.locator("#bars button").first
    assert first.inner_text().split() == [
        answer["label"],
        f"{100 * answer['probability']:.1f}",
        "%",
    ]
    assert tab.inner_text("#reasons-title") == f"Why {answer['label']}?"
    names = tab.locator("#modes button").all_inner_texts()
    assert {name.strip("-.0123456789 \n") for name in names[2:]} == set(FAST)
    assert re.search(r"Faithfulness on this image .*: -?\d", tab.inner_text("#status"))
    card = tab.inner_text("#card")
    assert "75.0\u00a0% (60.0\u00a0% to 90.0\u00a0%)" in card and "zoo" in card


def test_moving_over_a_patch_shows_where_it_looks(visit):
    tab = show(visit())
    tab.click("[data-mode=patch]")
    over(tab, 0, 3)
    said = tab.inner_text("#status")
    over(tab, 2, 1)
    assert "Row 0, column 3" in said and "Row 2, column 1" in tab.inner_text("#status")
    tab.click("[data-map='0 1']")
    over(tab, 2, 2)
    assert tab.inner_text("#status").startswith("Layer 0, head 1: Row 2, column 2 gives")


def test_why_not_another_class(visit, server):
    tab = show(visit())
    worst = server.call("/predict?top=4", picture((64, 48))).json["top"][-1]["label"]
    tab.fill("#class", worst.upper())
    tab.click("#why button")
    wait_for_text(tab, "#summary", worst)
    assert tab.inner_text("#reasons-title") == f"Why not {worst}?"
    tab.fill("#class", "unicorn")
    tab.click("#why button")
    assert tab.inner_text("#error") == 'No class is called "unicorn".'


def test_erasing_patches_changes_the_probability(visit, server):
    tab = show(visit())
    tab.click("#erase")
    over(tab, 1, 0)
    tab.mouse.down()
    over(tab, 1, 1)
    over(tab, 1, 2)
    tab.mouse.up()
    wait_for_text(tab, "#change", "without 3")
    answer = server.call("/predict?mask=4,5,6&top=4", picture((64, 48))).json
    label = tab.inner_text("#change").split(":")[0]
    now = next(one["probability"] for one in answer["top"] if one["label"] == label)
    assert f"{100 * now:.1f}\u00a0% without 3." in tab.inner_text("#change")
    tab.click("#restore")
    assert tab.inner_text("#change") == ""


def test_keys_and_roles_work_without_a_mouse(visit):
    tab = show(visit())
    tab.click("#erase")
    tab.focus("#frame")
    for key in ("ArrowUp",) * 4 + ("ArrowLeft",) * 4 + ("ArrowDown", "ArrowRight", "Enter"):
        tab.keyboard.press(key)
    assert "Row 1, column 1 is erased. 1 of 16" in tab.inner_text("#status")
    assert tab.get_attribute("#status", "aria-live") == "polite"
    for button in tab.locator("button:visible").all():
        assert (
            button.get_attribute("aria-label")
            or button.inner_text().strip()
            or button.locator("img[alt]").count()
        )
    assert tab.locator("#bars [role=listitem] button[aria-pressed=true]").count() == 1


def test_a_phone_is_wide_enough_and_a_finger_erases(visit):
    tab = visit(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    show(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab.tap("#erase")
    tab.locator("#frame").scroll_into_view_if_needed()
    box = tab.locator("#frame").bounding_box()
    tab.touchscreen.tap(box["x"] + 0.9 * box["width"], box["y"] + 0.1 * box["height"])
    wait_for_text(tab, "#change", "without 1")
    assert "Row 0, column 3 is erased" in tab.inner_text("#status")


def test_a_dropped_or_pasted_image_is_read(visit):
    tab = visit()
    tab.wait_for_selector("#card dd")
    for event, key in (("drop", "dataTransfer"), ("paste", "clipboardData")):
        tab.evaluate(
            """([event, key, bytes]) => {
                const data = new DataTransfer();
                data.items.add(new File([new Uint8Array(bytes)], "a.png", {type: "image/png"}));
                const kind = event === "drop" ? DragEvent : ClipboardEvent;
                document.getElementById("bars").replaceChildren();
                document.dispatchEvent(new kind(event, {[key]: data, bubbles: true}));
            }""",
            [event, key, list(picture(format="PNG"))],
        )
        tab.wait_for_selector("#bars button")


def test_a_run_offers_examples(visit, start, tmp_path):
    for name in CLASSES:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for seed in range(12):
            (tmp_path / "photos" / name / f"{seed}.png").write_bytes(
                picture(seed=seed, format="PNG")
            )
    write_model(tmp_path / "model.safetensors", source=tmp_path / "photos")
    (tmp_path / "recipe.toml").touch()
    server = start(tmp_path, examples=3)
    end = time.monotonic() + 20
    while not (examples := server.call("/examples").json) and time.monotonic() < end:
        time.sleep(0.05)
    tab = visit(server)
    first = tab.locator("#examples button").first
    assert first.locator("img").get_attribute("alt") == f"example: {examples[0]['label']}"
    assert tab.locator("#examples button").count() == 3
    first.click()
    tab.wait_for_selector("#matrix canvas")


def test_an_odd_image_is_flagged(visit, start, calibrated):
    file = {"name": "stripes.npy", "mimeType": "application/octet-stream"}
    stream = io.BytesIO()
    np.save(stream, np.tile(np.array([0, 255], np.uint8), (8, 4)))
    server = start(calibrated)
    odd = server.call("/predict", stream.getvalue()).json["odd"]
    tab = visit(server)
    tab.wait_for_selector("#card dd")
    tab.set_input_files("#file", {**file, "buffer": stream.getvalue()})
    tab.wait_for_selector("#bars button")
    assert odd and "unlike the training images" in tab.inner_text("#odd")


def test_what_is_not_an_image_is_one_line(visit):
    tab = visit()
    tab.wait_for_selector("#card dd")
    file = {"name": "a.jpg", "mimeType": "image/jpeg", "buffer": b"hello"}
    tab.set_input_files("#file", file)
    tab.wait_for_selector("#error:visible")
    assert tab.inner_text("#error").startswith("not an image")


def test_a_token_is_asked_for(visit, start):
    tab = visit(start(token=TOKEN))
    tab.wait_for_selector("#login:visible")
    tab.fill("#token", TOKEN)
    tab.keyboard.press("Enter")
    show(tab)
    assert tab.locator("#login").is_hidden()


def test_hostile_class_names_are_text(visit, start, tmp_path):
    names = [HOSTILE, *CLASSES[1:]]
    tab = show(visit(start(write_model(tmp_path / "model.safetensors", classes=names))))
    tab.fill("#class", HOSTILE)
    tab.click("#why button")
    wait_for_text(tab, "#reasons-title", "<img")
    assert tab.title() != "hit"


def test_the_page_names_only_its_own_files():
    for file in PAGE.iterdir():
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!\S*\$)|@import|url\(|eval\(|innerHTML", text), file.name
        assert "onclick=" not in text and "style=" not in text
