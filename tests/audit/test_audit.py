"""The audit of a data set: the scan, the findings and the page."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.data.bad import HOSTILE, NAMES, bad_folder, put
from tests.data.fakes import Fake, arrays, encoded, photo, photos
from tests.data.samples import class_folders, tar
from vitrail.audit import page as audit_page
from vitrail.audit.audit import audit_scan
from vitrail.audit.duplicates import find_duplicates
from vitrail.audit.page import MAX_GROUPS, render_audit
from vitrail.audit.scan import scan_images
from vitrail.data.config import AUGMENT_PRESETS, DataConfig, Preprocess
from vitrail.data.image import load_image
from vitrail.data.loader import Loader
from vitrail.data.open import open_data
from vitrail.data.preview import choose_per_class, load_into_memory, preview_augmentation
from vitrail.data.source import split_indices
from vitrail.display.text import printable
from vitrail.errors import UserError
from vitrail.run.auto import summarise

PLAN = {"settings": {"train": {"lr": 0.01}}, "reasons": ["batch 4: <few> images"]}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    return bad_folder(tmp_path_factory.mktemp("data") / "bad")


@pytest.fixture
def scan(bad):
    return scan_images(open_data(bad), workers=0)


@pytest.fixture
def audited(scan):
    return audit_scan(scan)


def names(scan, items):
    return {scan.source.ids[item].rpartition("/")[2] for item in items}


def paths(scan, groups):
    return [[scan.source.ids[item] for item in group] for group in groups]


def finding(audited, name):
    return next((one for one in audited.findings if one.name == name), None)


# what is scan


def test_every_broken_file_is_named_with_its_reason(scan):
    told = {scan.source.ids[item]: why for item, why in scan.broken.items()}
    assert told == {
        "train/cat/bomb.png": "12000 x 12000 is 144 megapixels, over the limit of 100",
        "train/cat/empty.jpg": "empty file",
        "train/cat/flipped.png": told["train/cat/flipped.png"],  # in Pillow's words
        "train/cat/half.jpg": "truncated",
        "train/cat/words.jpg": "not an image; wanted JPEG, PNG, WebP, AVIF, GIF, BMP, TIFF or .npy",
    }
    assert told["train/cat/flipped.png"].startswith("damaged")


def test_what_is_broken_is_what_training_would_refuse(scan):
    loader = Loader(scan.source, Preprocess(size=64), DataConfig(workers=0), progress=False)
    with pytest.raises(UserError) as error:
        loader.prepare()
    assert str(error.value).startswith(f"{len(scan.broken)} images cannot be read")
    assert all(scan.source.ids[item] in str(error.value) for item in scan.broken)


@pytest.mark.parametrize(
    ("trait", "files"),
    [
        ("misnamed", {"gif.jpg"}),
        ("CMYK", {"cmyk.jpg"}),
        ("palette", {"palette.png", "gif.jpg", "film.gif"}),
        ("16 bits", {"deep.png"}),
        ("transparent", {"clear.png"}),
        ("frames", {"film.gif"}),
        ("turned", {"turned.jpg"}),
        ("constant", {"black.png", "white.png"}),
    ],
)
def test_unusual_files_are_flagged(scan, trait, files):
    assert names(scan, scan.items(trait)) == files


def test_a_wrong_extension_inside_a_shard_is_flagged(tmp_path):
    members = {}
    for number in range(12):
        kind = "GIF" if number == 7 else "JPEG"
        members[f"{number:04}.jpg"] = encoded(photo(number), kind)
        members[f"{number:04}.cls"] = str(number % 2).encode()
    tar(tmp_path / "x" / "0.tar", members)
    scan = scan_images(open_data(tmp_path / "x"), workers=0)
    assert names(scan, scan.items("misnamed")) == {"0.tar:0007"}


def test_names_with_blanks_accents_and_line_ends_are_read(scan):
    assert set(NAMES) <= names(scan, scan.items("readable"))


def test_sizes_are_those_of_the_rotated_image(scan):
    row = scan.rows[list(scan.source.ids).index("train/cat/turned.jpg")]
    assert (row["height"], row["width"], row["channels"]) == (120, 90, 3)


@pytest.mark.parametrize(
    "contents", [arrays(30), arrays(30, channels=1), photos(30), arrays(9, 80)]
)
def test_mean_and_deviation_are_those_of_the_training_pixels(contents):
    scan = scan_images(Fake(contents), workers=0)
    items = split_indices(scan.source, "train")
    train = [load_image(contents[item], None) / 255 for item in items]
    mean = np.mean([pixels.mean((0, 1)) for pixels in train], 0)
    square = np.mean([(pixels**2).mean((0, 1)) for pixels in train], 0)
    np.testing.assert_allclose(scan.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(scan.std, np.sqrt(square - mean**2), rtol=1e-9)


def test_grey_images_count_in_every_colour_channel():
    grey, colour = np.full((8, 8, 1), 255, np.uint8), np.zeros((8, 8, 3), np.uint8)
    scan = scan_images(Fake([grey, colour]), workers=0)
    assert scan.mean == (0.5, 0.5, 0.5) and not scan.broken


def test_a_wrong_number_of_channels_is_broken():
    contents = [*arrays(5, channels=5), *arrays(1, channels=4), *arrays(1, channels=3)]
    scan = scan_images(Fake(contents), workers=0)
    assert scan.broken == {5: "4 channels; expected 5", 6: "3 channels; expected 5"}


def test_the_channels_wanted_are_those_that_training_chooses():
    for colours in (arrays(40, channels=3), arrays(100, channels=1) + arrays(1, channels=3)):
        source = Fake([*arrays(3, channels=5), *colours])
        channels, scan = summarise(source).channels, scan_images(source, workers=0)
        loader = Loader(
            source, Preprocess(size=8, channels=channels), DataConfig(workers=0), progress=False
        )
        with pytest.raises(UserError, match=r"^3 images cannot be read") as error:
            loader.prepare()
        for item, why in scan.broken.items():
            assert f"{source.ids[item]}: {why}" in str(error.value)
        assert list(scan.broken) == [0, 1, 2]


def test_workers_change_nothing(bad):
    source = open_data(bad)
    one, two = scan_images(source, workers=0), scan_images(source, workers=2)
    assert one.rows.tobytes() == two.rows.tobytes()
    assert one.broken == two.broken
    np.testing.assert_allclose(one.mean, two.mean, rtol=1e-12)


def test_a_set_without_a_readable_image_is_examined(tmp_path):
    for name in ("a/1.png", "a/2.png", "a/3.png", "b/1.png", "b/2.png", "b/3.png"):
        put(tmp_path / "x" / name, f"no image, but {name}".encode())
    audited = audit_scan(scan_images(open_data(tmp_path / "x"), workers=0))
    assert len(audited.scan.broken) == 6
    assert audited.to_dict()["short_side"] is None
    assert "Training would fail" in render_audit(audited, {"error": "none can be read"})


# the findings


def test_duplicates_are_found_inside_and_across_splits(scan):
    copies = find_duplicates(scan)
    assert paths(scan, copies.leaks) == [["test/cat/leak of 1.jpg", "train/cat/1.jpg"]]
    assert ["train/cat/0.jpg", "train/cat/copy of 0.jpg"] in paths(scan, copies.duplicates)


def test_one_image_with_two_labels_is_a_conflict(scan):
    both = [f"train/{HOSTILE}/conflict with 2.jpg", "train/cat/2.jpg"]
    assert paths(scan, find_duplicates(scan).conflicts) == [both]


def test_resized_and_reencoded_copies_are_near_duplicates(scan):
    copies = find_duplicates(scan)
    across = ["test/cat/small 4.png", "train/cat/4.jpg"]
    assert paths(scan, copies.near_leaks) == [across]
    assert paths(scan, copies.near_duplicates) == [
        across,
        ["train/cat/3.jpg", "train/cat/small 3.jpg"],
    ]


def test_broken_files_and_single_colours_are_not_duplicates(tmp_path):
    for label in "ab":
        for number in range(4):
            put(
                tmp_path / "x" / label / f"{number}.png",
                encoded(photo(number + 10 * ord(label)), "PNG"),
            )
        put(tmp_path / "x" / label / "empty.png", b"")
        flat = np.full((40, 40 + ord(label), 3), 200, np.uint8)
        put(tmp_path / "x" / label / "flat.png", encoded(flat, "PNG"))
    copies = find_duplicates(scan_images(open_data(tmp_path / "x"), workers=0))
    assert copies == replace(copies, duplicates=[], leaks=[], conflicts=[], near_duplicates=[])


def test_the_same_pixels_in_another_format_are_near_also_when_tiny(tmp_path):
    folder = class_folders(tmp_path / "x", {"a": 4, "b": 4})
    pixels = load_image(folder / "a" / "0.png")
    put(folder / "a" / "again.bmp", encoded(pixels, "BMP"))
    scan = scan_images(open_data(folder), workers=0)
    assert paths(scan, find_duplicates(scan).near_duplicates) == [["a/0.png", "a/again.bmp"]]


def test_pixels_in_memory_are_compared_too():
    contents = arrays(20)
    contents[4] = contents[0]  # item 4 is for validation
    copies = find_duplicates(scan_images(Fake(contents), workers=0))
    assert copies.leaks == [[0, 4]] and copies.conflicts == [[0, 4]] and copies.duplicates == []


def test_the_most_severe_findings_come_first(audited):
    severities = [one.severity for one in audited.findings]
    assert severities == sorted(severities, key=("error", "warning", "note").index)
    assert severities[0] == "error"


@pytest.mark.parametrize(
    "name", ["Leaks", "Label conflicts", "Near-duplicate leaks", "Duplicates", "Near-duplicates"]
)
def test_duplicates_are_warnings(audited, name):
    assert finding(audited, name).severity == "warning"


def test_a_leak_is_shown_with_images_of_different_splits_first():
    one = arrays(1, 40)[0]
    contents = arrays(20, 40)
    for item in (0, 1, 2, 3, 5, 4):  # of which 4 alone is for validation
        contents[item] = one
    audited = audit_scan(scan_images(Fake(contents), workers=0))
    (group,) = finding(audited, "Leaks").groups
    assert group.items == (0, 4, 1, 2, 3, 5)


def test_broken_files_that_may_be_skipped_do_not_stop(scan):
    audited = audit_scan(scan, skip_broken=True)
    assert finding(audited, "Broken images").severity == "warning"


def test_ignored_files_are_listed_with_the_reason(audited):
    assert {group.text for group in finding(audited, "Ignored files").groups} == {
        "train/cat/notes.txt: does not have the extension of an image",
        "train/cat/loop: a link to a folder, which is not followed",
        "train/cat/dead.jpg: a broken link",
    }


def test_class_imbalance_and_small_classes_are_named(tmp_path):
    class_folders(tmp_path / "x", {"many": 60, "few": 5})
    audited = audit_scan(scan_images(open_data(tmp_path / "x"), workers=0))
    assert finding(audited, "Class imbalance").title.startswith("many has ")
    assert [group.text[:4] for group in finding(audited, "Small classes").groups] == ["few:"]


def test_small_splits_are_reported(tmp_path):
    class_folders(tmp_path / "x", {"a": 30, "b": 30})
    (only,) = audit_scan(scan_images(open_data(tmp_path / "x"), workers=0)).findings
    val, test = ((open_data(tmp_path / "x").splits == split).sum() for split in ("val", "test"))
    assert (only.name, only.title) == (
        "Small splits",
        f"{val} images in val, {test} images in test",
    )


def test_a_good_data_set_has_no_findings():
    assert audit_scan(scan_images(Fake(arrays(600, 8)), workers=0)).findings == ()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("déjà vu 猫.jpg", "déjà vu 猫.jpg"),
        ("two\nlines", r"two\nlines"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\udcff.jpg", r"\udcff.jpg"),
    ],
)
def test_names_are_shown_in_one_harmless_line(name, shown):
    assert printable(name) == shown


# the result


def test_the_result_holds_what_the_document_says(audited):
    document = audited.to_dict()
    for key in ("images", "split", "classes", "duplicates", "leaks", "near_duplicates"):
        assert getattr(audited, key) == document[key]
    assert [{"path": one.path, "why": one.why} for one in audited.broken] == document["broken"]
    assert audited.errors == audited.findings[:1]


def test_the_result_is_readable_as_text_and_html(audited):
    text, html = repr(audited), audited._repr_html_()
    assert text.startswith(f"Audit of bad: {audited.images} images of ")
    assert "error: Broken images: 5 images cannot be read" in text
    assert HOSTILE not in html and html.count("<li>") == len(audited.findings)


# the page


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


@pytest.fixture
def html(audited):
    return render_audit(audited, PLAN, augmented=b"\x89PNG", progress=False)


def test_the_page_loads_nothing_and_runs_nothing(html):
    read = Reader(html)
    assert not {"script", "iframe", "object", "embed", "form", "link", "base", "video"} & {
        tag for tag, _ in read.tags
    }
    attributes = [(name, value) for _, found in read.tags for name, value in found.items()]
    assert not [name for name, _ in attributes if name.startswith("on")]
    for name, value in attributes:
        if name in ("src", "href", "srcset", "data"):
            assert value.startswith(("data:image/", "#"))
    assert "url(" not in html and "@import" not in html
    policy = next(tag for tag in read.all("meta") if "http-equiv" in tag)
    assert policy["content"].startswith("default-src 'none'; img-src data:")


def test_hostile_names_are_text_on_the_page(html):
    read = Reader(html)
    assert not [tag for tag in read.all("img") if tag["src"] == "x"]
    assert HOSTILE in {text.strip() for text in read.text}
    shown = {tag["alt"] for tag in read.all("img")}
    assert printable(f"train/{HOSTILE}/conflict with 2.jpg") in shown


def test_names_that_are_not_unicode_do_not_stop_the_page(tmp_path):
    folder = class_folders(tmp_path / "x", {"a": 12, "b": 12})
    put(folder / "a" / "\udcff\x1b.png", b"")
    html = render_audit(audit_scan(scan_images(open_data(folder), workers=0)), PLAN, progress=False)
    assert r"a/\udcff\x1b.png" in html
    html.encode()


def test_the_page_says_first_whether_training_would_work(audited, html):
    assert html.index("Training would fail.") < html.index("5 images cannot be read")
    sound = replace(audited, findings=())
    assert "Training would work." in render_audit(sound, PLAN, progress=False)


def test_every_finding_is_on_the_page_and_every_link_leads_somewhere(audited, html):
    read = Reader(html)
    ids = {found["id"] for _, found in read.tags if "id" in found}
    assert {link["href"][1:] for link in read.all("a")} <= ids
    for one in audited.findings:
        assert f"{one.name}:" in read.text


def test_the_page_shows_the_plan_with_its_reasons(html):
    assert "batch 4: &lt;few&gt; images" in html
    assert "&#34;lr&#34;: 0.01" in html


def test_a_plan_that_fails_is_reported(audited):
    assert "no &lt;way&gt;" in render_audit(audited, {"error": "no <way>"}, progress=False)


def test_many_copies_do_not_make_the_page_long():
    contents = [content for content in arrays(100, 8) for _ in range(2)]
    audited = audit_scan(scan_images(Fake(contents, classes=1), workers=0))
    assert len(finding(audited, "Leaks").groups) + len(finding(audited, "Duplicates").groups) >= 100
    pictures = Reader(render_audit(audited, PLAN, progress=False)).all("img")
    assert len(pictures) <= 2 * 2 * MAX_GROUPS + audit_page.SAMPLES


def test_many_copies_of_one_picture_are_counted_instead_of_shown():
    contents = [*arrays(1, 8) * 40, *arrays(20, 9)]
    audited = audit_scan(scan_images(Fake(contents, classes=1), workers=0))
    html = render_audit(audited, PLAN, progress=False)
    (group,) = finding(audited, "Leaks").groups
    assert f"and {len(group.items) - audit_page.MAX_COPIES} more like these" in html
    assert len(Reader(html).all("img")) <= 4 * audit_page.MAX_COPIES + audit_page.SAMPLES


def test_many_classes_do_not_make_the_page_long():
    audited = audit_scan(scan_images(Fake(arrays(400, 8), classes=200), workers=0))
    html = render_audit(audited, PLAN, progress=False)
    assert len(Reader(html).all("img")) <= audit_page.SAMPLED_CLASSES * audit_page.SAMPLES
    assert "140 classes between these" in html
    assert html.count('class="bar"') == audit_page.MAX_CLASSES


def test_thumbnails_are_small(tmp_path):
    for label in "ab":
        for number in range(3):
            noise = np.random.default_rng(number + 10 * ord(label)).integers(0, 256, (400, 500, 3))
            put(tmp_path / "x" / label / f"{number}.png", encoded(noise.astype(np.uint8), "PNG"))
    html = render_audit(
        audit_scan(scan_images(open_data(tmp_path / "x"), workers=0)), PLAN, progress=False
    )
    assert max(map(len, re.findall(r"data:[^\"]*", html))) < 60_000


# the preview


def few_photos():
    return Fake(photos(30))


def test_the_preview_begins_each_row_with_the_image_as_evaluation_sees_it():
    source, view = few_photos(), Preprocess(size=32)
    batch = preview_augmentation(
        source, [3, 9], view, DataConfig(augment=AUGMENT_PRESETS["strong"]), epochs=4
    )
    loader = Loader(
        load_into_memory(source, [3, 9]), view, DataConfig(workers=0), batch=2, progress=False
    )
    plain_images = next(loader.evaluation("train")).images
    assert len(batch.images) == 10
    assert np.array_equal(batch.images[::5], plain_images)
    assert batch.items.tolist() == [3] * 5 + [9] * 5


@pytest.mark.parametrize("size", [32, 96])
def test_without_augmentation_every_epoch_shows_the_same(size):
    batch = preview_augmentation(
        few_photos(), [0, 1, 2], Preprocess(size=size), DataConfig(), epochs=2
    )
    first = batch.images[::3]
    for epoch in (1, 2):
        assert (batch.images[epoch::3] - first).abs().mean() < 0.02


def test_the_preview_takes_each_class_before_any_class_twice():
    source = few_photos()
    usable = np.ones(len(source), bool)
    usable[0] = False
    chosen = choose_per_class(source, usable, limit=5)
    assert source.labels[chosen].tolist() == [0, 1, 2, 0, 1]
    assert 0 not in chosen and set(source.splits[chosen]) == {"train"}
