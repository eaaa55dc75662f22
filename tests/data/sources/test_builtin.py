"""Built-in sets are read from their official layouts, wherever those lie under VITRAIL_DATA."""

import gzip
import io
import os
import pickle
import tarfile
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from tests.data.samples import class_folders, write
from vitrail.data.image import load_image
from vitrail.data.open import open_data
from vitrail.data.sources import builtin
from vitrail.data.sources.catalogue import DATASETS, IMAGENET10, IMAGENETTE, find_dataset
from vitrail.data.split import hash_content
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(builtin, "download_file", no_network)
    return tmp_path / "data"


def no_network(*anything, **more):
    raise AssertionError("nothing may be downloaded here")


def why(name: str) -> str:
    with pytest.raises(UserError) as error:
        open_data(name)
    return str(error.value)


def idx(values: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, values.ndim])
    return head + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.tobytes()


def images(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), np.uint8)


def write_mnist(folder, train=40, test=10, end="", dot=False) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        for kind, values in (("images-idx3", images(count, 28, 28)), ("labels-idx1", labels)):
            name = f"{part}-{kind}-ubyte{end}"
            name = name.replace("-idx", ".idx") if dot else name
            content = idx(values)
            (folder / name).write_bytes(gzip.compress(content) if end else content)


def cifar_rows(count: int, labels: int = 1) -> bytes:
    rows = images(count, labels + 3072)
    rows[:, labels - 1] = np.arange(count) % 10
    return rows.tobytes()


def write_cifar10(folder) -> dict[str, bytes]:
    files = {f"data_batch_{n}.bin": cifar_rows(19 + n) for n in range(1, 6)}
    files |= {"test_batch.bin": cifar_rows(10)}
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def write_photos(root, wnids) -> None:
    for split, count, seed in (("train", 6, 0), ("val", 2, 1000)):
        for wnid in wnids:
            for number in range(count):
                write(root / split / wnid / f"{wnid}_{number}.JPEG", seed := seed + 1)


def test_digits_need_nothing_but_the_package(monkeypatch):
    source = open_data("digits")
    assert (len(source), source.classes) == (1797, tuple("0123456789"))
    assert source.pixels.shape == (1797, 8, 8, 1)
    assert (source.pixels.min(), source.pixels.max()) == (0, 255)
    assert np.bincount(source.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert source[17].id == "digits/00017"
    assert np.array_equal(load_image(source[17].content, channels=1), source.pixels[17])


def test_digits_have_the_sizes_of_the_catalogue():
    counts = Counter(open_data("digits").splits.tolist())
    assert counts["test"] == DATASETS["digits"].test
    assert counts["train"] + counts["val"] == DATASETS["digits"].train


@pytest.mark.parametrize(
    ("folder", "end", "dot"),
    [
        ("mnist", "", False),
        ("mnist", ".gz", False),
        ("mnist", "", True),
        ("MNIST/raw", ".gz", False),
    ],
)
def test_mnist_is_found_in_every_usual_layout(data, folder, end, dot):
    write_mnist(data / folder, end=end, dot=dot)
    source = open_data("mnist")
    assert source.pixels.shape == (50, 28, 28, 1)
    assert np.array_equal(source.pixels[:40, :, :, 0], images(40, 28, 28))
    assert source.labels[:12].tolist() == [*range(10), 0, 1]
    assert (source.ids[39], source.ids[40]) == ("mnist/train/00039", "mnist/test/00000")


def test_the_official_test_images_are_test_and_validation_is_taken_from_train(data):
    count = 1500
    write_mnist(data / "fashion-mnist", train=count)
    source = open_data("fashion-mnist")
    assert source.classes[0] == "T-shirt/top"
    assert set(source.splits[count:]) == {"test"}
    hashes = [
        int.from_bytes(hash_content(source[i].content)[:8], "big") / 2**64 for i in range(count)
    ]
    assert all((source.splits[i] == "val") == (hashes[i] < 0.1) for i in range(count))


def test_cifar10_comes_as_rows_of_planes(data):
    files = write_cifar10(data / "cifar10" / "cifar-10-batches-bin")
    source = open_data("cifar10")
    assert source.pixels.shape == (5 * 22 + 10, 32, 32, 3)
    row = np.frombuffer(files["data_batch_1.bin"], np.uint8)[3073 * 3 : 3073 * 4]
    red, green, blue = row[1:].reshape(3, 32, 32)
    assert np.array_equal(source.pixels[3], np.stack([red, green, blue], axis=2))
    assert source.labels[3] == row[0]
    assert source.classes[3] == "cat"


def test_cifar100_has_fine_labels(data):
    (data / "cifar-100-binary").mkdir(parents=True)
    rows = np.frombuffer(cifar_rows(200, labels=2), np.uint8).reshape(200, 3074).copy()
    rows[:, 0], rows[:, 1] = 99, np.arange(200) % 100
    for name in ("train.bin", "test.bin"):
        (data / "cifar-100-binary" / name).write_bytes(rows.tobytes())
    source = open_data("cifar100", split=False)
    assert source.labels[:100].tolist() == list(range(100))
    assert (source.classes[0], source.classes[99]) == ("apple", "worm")
    assert len(set(source.classes)) == 100


def pack(path, folder: str, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("place", ["cifar10/cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz"])
def test_an_official_archive_is_read_as_it_is(data, tmp_path, place):
    files = write_cifar10(tmp_path / "elsewhere")
    pack(data / place, "cifar-10-batches-bin", files | {"readme.html": b"hello"})
    source = open_data("cifar10")
    assert len(source) == 120
    assert sorted(path.name for path in data.rglob("*") if path.is_file()) == [
        "cifar-10-binary.tar.gz"
    ]


@pytest.mark.parametrize("folder", ["imagenette2-320", "imagenette/imagenette2-160", "imagenette"])
def test_imagenette_is_a_folder_of_photos(data, folder):
    write_photos(data / folder, IMAGENETTE)
    source = open_data("imagenette")
    assert source.name == "imagenette"
    assert source.classes[0] == "tench"
    counts = Counter(source.splits.tolist())
    assert (counts["test"], counts["train"] + counts["val"]) == (20, 60)
    assert source[0].id == "train/n01440764/n01440764_0.JPEG"


def test_an_archive_of_photos_is_extracted_without_other_files(data, tmp_path):
    write_photos(tmp_path / "x", IMAGENETTE)
    files = {
        str(path.relative_to(tmp_path / "x")): path.read_bytes()
        for path in sorted((tmp_path / "x").rglob("*.JPEG"))
    }
    strangers = {"noisy.csv": b"x", "../../../evil": b"x", "train/n99999999/x.JPEG": b"x"}
    pack(data / "imagenette" / "imagenette2-320.tgz", "imagenette2-320", files | strangers)
    assert len(open_data("imagenette")) == 80
    assert (data / "imagenette" / "imagenette2-320.tgz").is_file()
    names = {path.name for path in tmp_path.rglob("*")}
    assert not names & {"noisy.csv", "evil", "n99999999"}


def test_half_an_archive_of_photos_is_an_error(data):
    files = {"train/n01440764/1.JPEG": b"x"}
    pack(data / "imagenette" / "imagenette2-320.tgz", "imagenette2-320", files)
    assert "remove it and try again" in why("imagenette")


def test_imagenet10_takes_ten_classes_of_a_local_imagenet(data):
    write_photos(data / "imagenet", [*IMAGENET10, "n01440764"])
    source = open_data("imagenet10")
    assert source.classes == tuple(IMAGENET10.values())
    assert len(source) == 80


def test_imagenet10_says_where_imagenet_should_be(data):
    assert f"copy or link them to {data / 'imagenet'}" in why("imagenet10")


def test_classes_of_a_model_order_the_labels(data):
    write_cifar10(data / "cifar10")
    names = [*reversed(DATASETS["cifar10"].classes), "unicorn"]
    ours, theirs = open_data("cifar10"), open_data("cifar10", classes=names, split=False)
    assert theirs.classes == tuple(names)
    for index in range(len(ours)):
        assert theirs.classes[theirs.labels[index]] == ours.classes[ours.labels[index]]


def test_another_models_classes_are_an_error(data):
    write_cifar10(data / "cifar10")
    with pytest.raises(UserError, match="cifar10: label 'airplane' is not one of the 2 classes"):
        open_data("cifar10", classes=["cat", "dog"])


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("train-images-idx3-ubyte", idx(images(40, 28, 28))[:-1], "bytes that its header states"),
        ("train-images-idx3-ubyte", idx(images(40, 28, 28)) + b"x", "bytes that its header states"),
        ("train-images-idx3-ubyte", idx(images(39, 28, 28)), "39 train images, but 40 labels"),
        ("train-images-idx3-ubyte", b"", "not an IDX file of 3 dimensions"),
        ("t10k-labels-idx1-ubyte", b"\x80\x04\x95 pickle", "not an IDX file of 1 dimensions"),
        (
            "t10k-labels-idx1-ubyte",
            idx(np.full(10, 10, np.uint8)),
            "has a label 10; expected 0 to 9",
        ),
    ],
)
def test_damaged_mnist_files_are_named(data, file, content, words):
    write_mnist(data / "mnist")
    (data / "mnist" / file).write_bytes(content)
    assert words in why("mnist")


def test_a_damaged_gzip_is_named(data):
    write_mnist(data / "mnist", end=".gz")
    path = data / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-400])
    assert f"cannot read {path}" in why("mnist")


def test_a_zip_bomb_behind_a_small_header_stays_packed(data):
    write_mnist(data / "mnist", end=".gz")
    head = bytes([0, 0, 8, 1]) + (10).to_bytes(4, "big")
    path = data / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(head + b"\0" * 50_000_000))
    tracemalloc.start()
    assert "the 10 bytes that its header states" in why("mnist")
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_damaged_cifar_files_are_named(data):
    write_cifar10(data / "cifar10")
    (data / "cifar10" / "data_batch_2.bin").write_bytes(cifar_rows(5)[:-1])
    assert "data_batch_2.bin is truncated: it does not consist of records of 3073 bytes" in why(
        "cifar10"
    )


def test_a_damaged_archive_is_named(data):
    (data / "cifar10").mkdir(parents=True)
    (data / "cifar10" / "cifar-10-binary.tar.gz").write_bytes(b"no archive")
    assert "cannot read" in why("cifar10")
    pack(data / "cifar10" / "cifar-10-binary.tar.gz", "cifar-10-batches-bin", {"x": b""})
    assert "does not contain cifar-10-batches-bin/data_batch_1.bin" in why("cifar10")


def test_an_incomplete_data_set_counts_as_absent(data):
    write_cifar10(data / "cifar10")
    (data / "cifar10" / "test_batch.bin").unlink()
    assert find_dataset("cifar10") is None


def test_a_missing_data_set_is_downloaded_and_extracted(data, tmp_path, monkeypatch):
    files = write_cifar10(tmp_path / "elsewhere")

    def bring(download, folder, *, progress):
        pack(folder / download.name, "cifar-10-batches-bin", files | {"readme.html": b"hello"})
        return folder / download.name

    monkeypatch.setattr(builtin, "download_file", bring)
    assert len(open_data("cifar10")) == 120
    kept = sorted(path.name for path in (data / "cifar10").rglob("*") if path.is_file())
    assert kept == [".lock", *sorted(files)]


def test_data_sets_can_be_pickled(data):
    source = open_data("digits")
    copy = pickle.loads(pickle.dumps(source))
    assert np.array_equal(copy[3].content, source[3].content)


def test_downloads_are_all_encrypted_and_none_is_claimed_to_be_verified():
    for known in DATASETS.values():
        assert not (known.downloads and known.verified)
        for download in known.downloads:
            assert download.url.startswith("https://")
            assert len(bytes.fromhex(download.md5)) == 16


def test_a_folder_in_the_way_is_reached_by_its_path(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    class_folders(tmp_path / "digits", {"a": 3, "b": 3})
    assert len(open_data("digits")) == 1797
    assert open_data("./digits").classes == ("a", "b")


REAL = os.environ.get("VITRAIL_REAL_DATA")


@pytest.mark.skipif(not REAL, reason="VITRAIL_REAL_DATA names no folder with the official sets")
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_real_data_sets_match_the_catalogue(name, monkeypatch):
    monkeypatch.setenv("VITRAIL_DATA", str(REAL))
    source, known = open_data(name, split=False), DATASETS[name]
    assert (source.splits == "train").sum() == known.train
    assert (source.splits == "test").sum() == known.test
    assert source.pixels.shape[1:] == (known.image, known.image, known.channels)
    assert np.bincount(source.labels).min() > 6000 - 600
