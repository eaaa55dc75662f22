"""The report of a run: its content, its safety, and what happens if something is missing."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.run.conftest import SMALL
from tests.run.fabricated import Shelf, images, write_run
from vitrail.display import figures
from vitrail.display.page import load_templates
from vitrail.display.text import format_percent, printable
from vitrail.errors import UserError
from vitrail.run.report import make
from vitrail.run.report.gallery import (
    IMAGES_PER_CELL,
    MAX_PAIRS,
    MAX_TABLE_CLASSES,
    ThumbnailAlbum,
    confusion_cells,
    round_robin,
)
from vitrail.run.report.page import THUMBNAIL_BUDGET
from vitrail.run.storage import predictions
from vitrail.run.storage.journal import read_journal
from vitrail.run.storage.record import read_reasons, read_run
from vitrail.zoo.file import load_model

HOSTILE = ['"><img src=x onerror="document.title=1">', "new\nline \u202ertl", "$\\frac{$ 猫 " * 20]


class Reader(HTMLParser):
    """What a browser would see: tags with their attributes, and text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def made(folder, names, **how):
    """The page of a fabricated run, as text."""
    source = images(names, each=how.pop("each", 8), side=how.pop("side", 24))
    write_run(folder, source, **how)
    return make.write_report(folder, Shelf(source)).path.read_text()


@pytest.fixture(autouse=True)
def lightly(monkeypatch):
    """Figures are drawn but not rendered, which takes most of the time; the pages below do."""
    monkeypatch.setattr(figures, "to_png", lambda figure: b"\x89PNG")
    monkeypatch.setattr(figures, "to_svg", lambda figure: "<svg></svg>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "three"


@pytest.fixture(scope="module")
def html(folder):
    return made(folder, ["cat", "dog", "emu"], each=40)


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
    return made(tmp_path_factory.mktemp("run") / "nasty", HOSTILE, each=20, accuracy=0.4)


def words(html):
    """The text of a page without its style and script, in single spaces."""
    body = re.sub(r"<(style|script|svg).*?</\1>", " ", html, flags=re.DOTALL)
    return " ".join(" ".join(Reader(body).text).split())


# content


def test_the_accuracy_has_its_confidence_interval(folder, html):
    score = json.loads((folder / "metrics.json").read_text())["test"]
    low, high = score["interval"]
    wrong = round(30 * (1 - score["accuracy"]))
    told = words(html)
    assert f"{format_percent(score['accuracy'])} accuracy on 30 test images: {wrong} errors" in told
    assert f"kind is {100 * low:.1f} to {format_percent(high)}" in told


def test_nearly_all_is_not_rounded_to_all():
    assert [format_percent(r) for r in (1.0, 0.9999, 0.9996, 0.91)] == [
        *("100.0 %", "99.99 %", "99.96 %", "91.0 %")
    ]


def test_every_figure_is_also_a_file(folder, html):
    names = {path.stem for path in (folder / "figures").iterdir()}
    wanted = {"loss", "accuracy", "confusion_train", "confusion_val", "calibration"}
    assert names == wanted | {"positions", "filters", "attention_distance", "augmented"}
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in (folder / "figures").iterdir())


def test_the_matrix_on_the_page_is_the_confusion(folder, html):
    rows = re.findall(r'<tr><th scope="row">(.*?)</tr>', html, re.DOTALL)
    shown = [[int(n) for n in re.findall(r">(\d+)<", row)] for row in rows]
    kept = predictions.load_predictions(folder)
    assert shown[:3] == kept.confusion("val").tolist()
    assert shown[3:] == kept.confusion("train").tolist()


def test_every_cell_that_can_be_clicked_has_its_images(html):
    read = Reader(html)
    links = [a["href"][1:] for a in read.all("a") if a.get("class") == "cell"]
    panels = [div["id"] for div in read.all("div") if div.get("class") == "panel"]
    assert links and sorted(links) == sorted(panels)


def test_every_link_has_a_target(html):
    read = Reader(html)
    ids = {attributes["id"] for _, attributes in read.tags if "id" in attributes}
    assert {a["href"][1:] for a in read.all("a")} <= ids


def test_the_reasons_and_the_command_are_there(folder, html):
    told = words(html)
    assert "batch 128: <b>at least</b> eight steps" in told
    assert f"vitrail train --recipe {folder / 'recipe.toml'}" in told
    assert "all settings" in told


def test_the_most_confident_errors_come_first(folder, html):
    part = html[html.index('id="errors"') : html.index('id="explanations"')]
    sure = [int(n) for n in re.findall(r"</b>, (\d+) %", part)]
    assert sure == sorted(sure, reverse=True) and len(sure) > 3


def test_calibration_is_shown_before_and_after(html):
    assert "After temperature scaling with 1.30 , fitted on validation images" in words(html)


def test_the_ring_marks_the_epoch_that_was_kept(folder, html):
    record = read_run(folder)
    (mark,) = make.accuracy_chart(record, load_model(folder / "model.safetensors")).marks
    assert (mark.x, mark.y) == (40, 40 / 90)


# safety


@pytest.mark.parametrize("page", ["html", "nasty"])
def test_the_page_loads_nothing_and_runs_only_its_own_script(request, page):
    html = request.getfixturevalue(page)
    read = Reader(html)
    assert len(read.all("script")) == 1
    assert not {"iframe", "object", "embed", "form", "link", "base"} & {tag for tag, _ in read.tags}
    for name, value in ((n, v) for _, found in read.tags for n, v in found.items()):
        assert not name.startswith("on")
        if name in ("src", "srcset", "data", "xlink:href", "href"):
            assert value.startswith(("data:image/", "#"))
    policy = next(tag["content"] for tag in read.all("meta") if "http-equiv" in tag)
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy


def test_hostile_names_are_text(nasty):
    read = Reader(nasty)
    assert not [tag for tag in read.all("img") if tag["src"] == "x"]
    assert printable(HOSTILE[1]) in "".join(read.text) and "\u202e" not in nasty
    assert HOSTILE[0] in "".join(read.text)


def test_without_escaping_a_name_would_be_a_tag(tmp_path, monkeypatch):
    def trusting(folder):
        environment = load_templates.__wrapped__(folder)  # not the one that is cached
        environment.autoescape = False
        return environment

    monkeypatch.setattr("vitrail.run.report.page.load_templates", trusting)
    html = made(tmp_path / "run", HOSTILE, each=8, accuracy=0.4)
    assert [tag for tag in Reader(html).all("img") if tag["src"] == "x"]


def test_two_and_a_thousand_classes_fit(tmp_path):
    few = made(tmp_path / "few", ["a", "b"], each=40)
    many = made(tmp_path / "many", [f"class {n}" for n in range(400)], each=8, accuracy=0.5)
    assert few.count('<th scope="row">') == 4
    assert many.count('<th scope="row">') == 0 and "true class" in many
    assert many.count('class="panel"') <= 2 * MAX_PAIRS
    assert len(many) < 6_000_000


def test_thumbnails_stop_at_the_budget():
    source = images(["a", "b"], each=40, side=100)
    album = ThumbnailAlbum(source, budget=20_000)
    album.add(range(80))
    assert 2 < len(album.cards) < 40
    assert sum(len(card["image"]) for card in album.cards.values()) < 30_000
    assert THUMBNAIL_BUDGET < 4_000_000


def test_one_huge_image_does_not_hide_the_others(monkeypatch):
    source = images(["a", "b"], each=4, side=100)
    large, small = int(source.sizes.argmax()), int(source.sizes.argmin())
    monkeypatch.setattr("vitrail.run.report.gallery.MAX_READ", int(source.sizes[large]) - 1)
    album = ThumbnailAlbum(source, budget=10**6)
    album.add([large, small])
    assert list(album.cards) == [small]


def test_every_cell_has_an_image_before_any_has_two():
    assert list(round_robin([[1, 2, 3], [4], [5, 6]], 2)) == [1, 4, 5, 2, 6]


def test_errors_are_most_confident_first_and_correct_predictions_least():
    seen = predictions.SplitPredictions(
        items=torch.arange(5),
        labels=torch.tensor([0, 0, 0, 0, 1]),
        predicted=torch.tensor([0, 0, 1, 1, 1]),
        probability=torch.zeros(5),
        calibrated=torch.tensor([0.9, 0.6, 0.5, 0.8, 0.7]),
    )
    found = {(cell.label, cell.predicted): cell.indices for cell in confusion_cells(seen, 2)}
    assert found == {(0, 0): [1, 0], (0, 1): [3, 2], (1, 1): [4]}


def test_of_many_classes_the_most_confused_pairs_can_be_opened():
    labels = torch.arange(MAX_TABLE_CLASSES + 1).repeat(3)
    predicted = labels.clone()
    predicted[5] = 7
    predicted[[6, MAX_TABLE_CLASSES + 7]] = 8
    blank = torch.zeros(len(labels))
    seen = predictions.SplitPredictions(
        items=labels, labels=labels, predicted=predicted, probability=blank, calibrated=blank
    )
    found = confusion_cells(seen, MAX_TABLE_CLASSES + 1)
    assert [(cell.label, cell.predicted) for cell in found] == [(6, 8), (5, 7)]
    assert IMAGES_PER_CELL >= 2


# missing or damaged files


def test_without_the_data_the_page_has_no_images_and_says_why(tmp_path):
    source = images(["a", "b"], each=20)
    write_run(tmp_path / "run", source)
    done = make.write_report(tmp_path / "run")
    html = done.path.read_text()
    assert not done.has_images and "does not exist" in done.missing
    assert "The images cannot be shown: " in words(html)
    assert "data:image" not in html[html.index('id="errors"') : html.index('id="classes"')]
    assert "Explanations" not in html


def test_changed_data_is_not_shown(tmp_path, monkeypatch):
    write_run(tmp_path / "run", images(["a", "b"], each=20))
    other = images(["a", "b"], each=24)
    monkeypatch.setattr("vitrail.run.report.make.open_run_data", lambda *_: other)
    assert "has changed since this run" in make.write_report(tmp_path / "run").missing


def test_an_unfinished_run_shows_its_curves(tmp_path):
    source = images(["a", "b"], each=20)
    folder = write_run(tmp_path / "run", source)
    for name in ("metrics.json", "predictions.safetensors"):
        (folder / name).unlink()
    html = make.write_report(folder, Shelf(source)).path.read_text()
    assert "Not finished: 60 of 60 steps." in words(html)
    assert 'id="learning"' in html and 'id="confusion"' not in html


def test_a_run_with_an_empty_log_has_a_page(tmp_path):
    source = images(["a", "b"], each=20)
    folder = write_run(tmp_path / "run", source)
    for name in ("metrics.json", "predictions.safetensors", "log.jsonl"):
        (folder / name).unlink()
    assert "Not finished: 0 of 60 steps." in words(
        make.write_report(folder, Shelf(source)).path.read_text()
    )


def test_a_finished_run_without_predictions_or_data_has_a_page(tmp_path):
    folder = write_run(tmp_path / "run", images(["a", "b"], each=20))
    (folder / "predictions.safetensors").unlink()
    made = make.write_report(folder)
    assert not made.has_images and "accuracy on test images" in words(made.path.read_text())


def test_a_log_without_training_accuracy_can_be_drawn(tmp_path):
    source = images(["a", "b"], each=20)
    folder = write_run(tmp_path / "run", source)
    text = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(re.sub(r'"train_accuracy": [\d.]+, ', "", text))
    assert 'id="learning"' in make.write_report(folder, Shelf(source)).path.read_text()


@pytest.mark.parametrize("key", ["loss", "seconds", "images_per_s", "kind", "val_accuracy"])
def test_a_damaged_line_of_the_log_is_skipped(tmp_path, key):
    source = images(["a", "b"], each=20)
    folder = write_run(tmp_path / "run", source)
    whole = (folder / "log.jsonl").read_text()
    torn = re.sub(rf'"{key}": [^,}}]+', f'"{key}": "x"', whole, count=1)
    (folder / "log.jsonl").write_text(torn)
    lines = read_journal(folder / "log.jsonl")
    assert len(lines) == len(whole.splitlines()) - 1
    assert 'id="learning"' in make.write_report(folder, Shelf(source)).path.read_text()


@pytest.mark.parametrize(
    ("name", "damage", "answer"),
    [
        ("predictions.safetensors", lambda old: b"no", "is damaged"),
        ("predictions.safetensors", lambda old: old[:-1] + b"\x7f", "its checksum differs"),
        (
            "predictions.safetensors",
            lambda old: old.replace(b"temperature", b"temperaturf"),
            "is damaged",
        ),
        ("metrics.json", lambda old: b"{", "is damaged"),
        ("metrics.json", lambda old: b"[]", "is damaged"),
        ("recipe.toml", lambda old: b"= 3", "is not valid TOML"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, name, damage, answer):
    source = images(["a", "b"], each=20)
    path = write_run(tmp_path / "run", source) / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=answer) as error:
        make.write_report(tmp_path / "run", Shelf(source))
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_a_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match="is not a run folder: it has no recipe"):
        make.write_report(tmp_path)


# runs


def test_a_run_ends_with_its_report(digits):
    done = digits(report=True)
    kept = read_run(done.folder)
    assert (done.folder / "report.html").read_text().rstrip().endswith("</html>")
    assert set(kept.predictions.splits) == {"train", "val", "test"}
    assert kept.predictions.splits["test"].accuracy == done.metrics["test"]["accuracy"]
    assert kept.predictions.metadata["environment"]["torch"] == torch.__version__


def test_images_that_the_run_skipped_are_skipped_in_its_report(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    rng, data = np.random.default_rng(0), tmp_path / "data"
    for split, count in {"train": 8, "val": 3, "test": 3}.items():
        for name in ("dark", "light"):
            (data / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 120, (80, 96, 3), np.uint8) + 130 * (name == "light")
                path = data / split / name / f"{number}.jpg"
                Image.fromarray(pixels.astype(np.uint8)).save(path)
    for name in ("train/dark/0.jpg", "val/light/0.jpg"):
        (data / name).write_bytes(b"")
    changes = {
        "vit": {"width": 16, "depth": 1, "heads": 1},
        "train": {"steps": 3, "batch": 4},
        "data": {"workers": 0, "skip_broken": True},
    }
    done = vitrail.train(data, out=tmp_path / "run", settings=changes, quiet=True)
    wanted = {"attention_distance.png", "augmented.png"}
    drawn = {path.name for path in (done.folder / "figures").iterdir()}
    assert wanted <= drawn and (done.folder / "report.html").is_file()
    again = make.write_report(done.folder)
    assert again.has_images and {path.name for path in again.figures} == drawn


def test_a_report_that_fails_does_not_fail_the_run(digits, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("out of ink")

    monkeypatch.setattr("vitrail.run.report.make.render_report", broken)
    done = digits(report=True)
    assert (done.folder / "metrics.json").exists()
    assert "its report could not be made: out of ink; `vitrail report" in caplog.text


def test_missing_predictions_are_computed_again(digits):
    done = digits(report=True)
    before = predictions.load_predictions(done.folder)
    (done.folder / "predictions.safetensors").unlink()
    make.write_report(done.folder)
    after = predictions.load_predictions(done.folder)
    for split in ("train", "val", "test"):
        assert torch.equal(before.splits[split].predicted, after.splits[split].predicted)
    assert before.metadata == after.metadata


def test_a_report_does_not_evaluate_test_images_that_the_run_did_not(digits):
    done = digits(report=True, test=False)
    (done.folder / "predictions.safetensors").unlink()
    make.write_report(done.folder)
    assert set(predictions.load_predictions(done.folder).splits) == {"train", "val"}


def test_a_report_that_a_kill_prevented_is_made_by_resume(digits):
    done = digits()
    assert not (done.folder / "report.html").exists()
    vitrail.resume(done.folder, quiet=True)
    assert (done.folder / "report.html").is_file()


def test_the_recipe_contains_its_reasons_and_the_requested_settings(digits):
    reasons = read_reasons(digits().folder / "recipe.toml")
    assert reasons[0].startswith("digits: 1,412 grey training images")
    assert any(reason.startswith("augmentation") for reason in reasons)
    assert "train.steps 30" in reasons[-1] and reasons[-1].startswith("requested: ")


def test_training_accuracy_is_counted_over_the_epoch(digits):
    lines = read_journal(digits().folder / "log.jsonl")
    rates = [line["train_accuracy"] for line in lines if line["kind"] == "epoch"]
    assert [rate * images % 1 for rate, images in zip(rates, (22 * 64, 8 * 64), strict=True)] == [
        pytest.approx(0, abs=1e-6)
    ] * 2
    assert 0.05 < rates[0] < rates[1] < 1


def test_predictions_are_loaded_as_they_were_saved(tmp_path):
    source = images(["a", "b"], each=20)
    folder = write_run(tmp_path / "run", source)
    kept = predictions.load_predictions(folder)
    seen = kept.splits["val"]
    assert np.array_equal(source.labels[seen.items.numpy()], seen.labels.numpy())
    assert seen.labels.dtype == torch.int64 and seen.probability.dtype == torch.float32
    assert (folder / "predictions.safetensors").stat().st_size < 10_000


def test_resume_without_report_writes_none(digits):
    done = digits()
    assert not (done.folder / "report.html").exists()
    assert SMALL["train"]["steps"] == done.metrics["steps"]
    assert vitrail.resume(done.folder, report=False, quiet=True).metrics == done.metrics


# style


def test_figures_have_the_palette_of_the_page():
    css = (load_templates(make.__file__).loader.searchpath[1]) + "/look.css"
    with open(css) as file:
        light = file.read().split("@media")[0]
    found = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light))
    assert {name: found[name] for name in figures.PALETTE} == figures.PALETTE
