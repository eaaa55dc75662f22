"""The page of a run in a real browser: clicks, sorting, no network, no complaints."""

import pytest

from tests.run.fabricated import Shelf, images, write_run
from vitrail.display.page import load_templates
from vitrail.run.report import make

HOSTILE = ['"><img src=x onerror="document.title=1">', "new\nline", "x" * 300]
PHONE = {"viewport": {"width": 390, "height": 844}}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report whose class and file names are hostile."""
    folder, source = tmp_path_factory.mktemp("run") / "run", images(HOSTILE, each=40)
    write_run(folder, source, accuracy=0.5)
    return make.write_report(folder, Shelf(source)).path


@pytest.fixture
def browse(need, browser, page):
    """Opens the page: `browse(**settings)`; afterwards nothing may have gone wrong on it."""
    need("chromium")
    complaints, contexts = [], []

    def open_page(path=page, **settings):
        contexts.append(browser.new_context(**settings))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: network(request.url, complaints))
        tab.goto(path.as_uri())
        tab.complaints = complaints
        return tab

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """A report of a thousand classes, some with long names."""
    names = [f"class {n}" + ", called by many names" * (n % 50 == 0) for n in range(1000)]
    folder, source = tmp_path_factory.mktemp("run") / "run", images(names, each=4)
    write_run(folder, source, accuracy=0.5)
    return make.write_report(folder, Shelf(source)).path


def network(url, complaints):
    if not url.startswith(("file:", "data:")):
        complaints.append(url)


@pytest.mark.slow
def test_a_click_on_a_cell_shows_its_images(browse):
    tab = browse()
    cell = tab.locator("#confusion td.w a.cell").first
    panel = tab.locator(cell.get_attribute("href"))
    assert not panel.is_visible()
    cell.click()
    picture = panel.locator("img").first
    assert panel.is_visible() and picture.evaluate("image => image.naturalWidth") == 24
    other = tab.locator("#confusion td.r a.cell").first
    other.click()
    assert not panel.is_visible() and tab.locator(other.get_attribute("href")).is_visible()
    assert tab.complaints == []


@pytest.mark.slow
def test_a_click_shows_images_without_javascript_too(browse):
    tab = browse(java_script_enabled=False)
    cell = tab.locator("#confusion td.w a.cell").first
    cell.click()
    assert tab.locator(cell.get_attribute("href")).locator("img").first.is_visible()
    assert tab.locator("#classes td").first.is_visible()


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 5])
def test_the_table_sorts_both_ways(browse, number):
    tab = browse()
    column = tab.locator(f"#classes tbody td:nth-child({number})")

    def values():
        return column.evaluate_all("cells => cells.map(cell => Number(cell.dataset.value))")

    button = tab.locator(f"#classes th:nth-child({number}) button")
    button.click()
    assert values() == sorted(values())
    button.click()
    assert values() == sorted(values(), reverse=True) and len(set(values())) > 1
    assert tab.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, PHONE, {"color_scheme": "dark"}])
def test_nothing_sticks_out_and_no_name_runs(browse, settings):
    tab = browse(**settings)
    width = "document.documentElement.scrollWidth - window.innerWidth"
    assert tab.evaluate(width) <= 0
    assert tab.title() == "Nano/4 on made up"
    assert tab.complaints == []


@pytest.mark.slow
def test_two_classes_with_long_names_fit_a_phone(browse, tmp_path):
    source = images([f"{name} with a name that goes on and on" for name in "ab"], each=40)
    path = make.write_report(write_run(tmp_path / "run", source), Shelf(source)).path
    tab = browse(path, **PHONE)
    ends = "those => those.map(one => one.getBoundingClientRect().right)"
    for part in (".matrix", "#classes td:nth-child(5)"):
        assert max(tab.locator(part).evaluate_all(ends)) <= PHONE["viewport"]["width"]


@pytest.mark.slow
def test_a_thousand_classes_fit_a_phone(browse, crowd):
    tab = browse(crowd, **PHONE)
    assert tab.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    assert tab.locator("#classes tbody tr").count() == 1000
    tab.locator("#confusion a.cell").first.click()
    assert tab.locator(".panel.open img").first.is_visible()
    assert tab.complaints == []


@pytest.mark.slow
def test_a_thousand_classes_fit_on_paper(browse, crowd):
    tab = browse(crowd, viewport={"width": 718, "height": 1047})  # A4 without its margins
    tab.emulate_media(media="print")
    assert tab.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
    ends = "rows => rows.map(row => row.getBoundingClientRect().right).filter(Boolean)"
    shown = tab.locator("#classes tbody tr").evaluate_all(ends)
    assert len(shown) == 60 and max(shown) <= 718  # the worst of them
    assert tab.complaints == []


@pytest.mark.slow
def test_an_unescaped_name_or_another_script_would_be_noticed(browse, page, tmp_path, monkeypatch):
    def trusting(folder):
        environment = load_templates.__wrapped__(folder)  # not the one that is cached
        environment.autoescape = False
        return environment

    monkeypatch.setattr("vitrail.run.report.page.load_templates", trusting)
    source = images(HOSTILE, each=40)
    bad = make.write_report(write_run(tmp_path / "run", source, accuracy=0.5), Shelf(source)).path
    tab = browse(bad)
    assert any("Content Security Policy" in words for words in tab.complaints)
    changed = tmp_path / "changed.html"
    changed.write_text(page.read_text().replace('"use strict";', '"use strict"; '))
    before = len(tab.complaints)
    assert not browse(changed).locator("html.js").count()
    assert len(tab.complaints) > before
