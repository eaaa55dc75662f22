"""Folders as people have them: odd names, links, litter, and mistakes that are told in one line."""

import os
import pickle

import pytest
from PIL import Image

from tests.data.samples import class_folders, encoded, write
from vitrail.data.open import open_data
from vitrail.data.sources.folder import find_split_folders
from vitrail.data.sources.tree import Folder
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pets(tmp_path):
    return class_folders(tmp_path / "pets", {"cat": 4, "dog": 5})


def test_class_folders_are_classes(pets):
    source = open_data(pets)
    assert (source.name, source.classes, len(source)) == ("pets", ("cat", "dog"), 9)
    item = source[4]
    assert (item.id, item.label, source.ids[4]) == ("dog/0.png", 1, "dog/0.png")
    assert item.content == (pets / "dog" / "0.png").read_bytes()
    assert source.sizes[4] == len(item.content)


def test_classes_come_in_natural_order(tmp_path):
    class_folders(tmp_path / "x", {"type 10": 3, "type 2": 3, "Type 1": 3})
    assert open_data(tmp_path / "x").classes == ("Type 1", "type 2", "type 10")


@pytest.mark.parametrize(
    "names", ["train val test", "training valid testing", "Train validation TEST"]
)
def test_splits_above_the_classes_have_many_names(tmp_path, names):
    for number, name in enumerate(names.split()):
        class_folders(tmp_path / "x" / name, {"a": 2 + number, "b": 2}, start=10 * number)
    source = open_data(tmp_path / "x")
    assert source.classes == ("a", "b")
    counts = [(source.splits == split).sum() for split in ("train", "val", "test")]
    assert counts == [4, 5, 6]


def test_folders_inside_a_class_belong_to_it(pets):
    write(pets / "cat" / "2019" / "may" / "x.png", 77)
    source = open_data(pets)
    assert source.labels[list(source.ids).index("cat/2019/may/x.png")] == 0


def test_a_class_may_be_called_train(tmp_path):
    class_folders(tmp_path / "vehicles", {"car": 3, "plane": 3, "train": 3})
    assert open_data(tmp_path / "vehicles").classes == ("car", "plane", "train")


def test_an_unlabelled_test_folder_is_left_out_and_reported(tmp_path):
    class_folders(tmp_path / "kaggle" / "train", {"a": 5, "b": 5})
    write(tmp_path / "kaggle" / "test" / "1.png", 99)
    source = open_data(tmp_path / "kaggle")
    assert (source.classes, len(source)) == (("a", "b"), 10)
    assert source.ignored == {"test/1.png": "not in a class folder"}


def test_folders_beside_two_splits_are_left_out_and_reported(tmp_path):
    class_folders(tmp_path / "x" / "train", {"a": 5, "b": 5})
    class_folders(tmp_path / "x" / "val", {"a": 5, "b": 5})
    write(tmp_path / "x" / "examples" / "1.png", 99)
    assert open_data(tmp_path / "x").ignored == {"examples/1.png": "not in a class folder"}


def test_one_split_name_among_classes_is_a_class():
    folders = [Folder(("train", "old"), ["x"]), Folder(("car",), ["y"])]
    assert find_split_folders(folders) == {}
    assert find_split_folders(folders[:1]) == {"train": "train"}


def flat_folders(path, **counts):
    """Folders with images and without class folders."""
    for number, (name, count) in enumerate(counts.items()):
        for image in range(count):
            write(path / name / f"{image}.png", 100 * number + image)
    return path


def test_different_splits_without_class_folders_are_classes_only_if_the_caller_says_so(tmp_path):
    path = flat_folders(tmp_path / "x", train=20, val=5, test=5, extra=5)
    with pytest.raises(UserError, match=r"test, train, val of .* or set `data.labels='single'`"):
        open_data(path)
    assert open_data(path, labels="single").classes == ("extra", "test", "train", "val")
    assert len(open_data(path, split=False).classes) == 4  # nothing is trained on


@pytest.mark.parametrize("names", [{"test": 5, "photos": 9}, {"test": 5, "": 9}, {"val": 5}])
def test_images_without_labels_beside_a_test_folder_need_a_training_folder(tmp_path, names):
    path = flat_folders(tmp_path / "x", **names)
    with pytest.raises(UserError, match="but no folder train; put the training images into train/"):
        open_data(path, labels="none")
    assert len(open_data(path, labels="none", split=False)) == sum(names.values())


def test_hidden_and_system_files_are_skipped(pets):
    for name in (".DS_Store", "Thumbs.db", "desktop.ini", "cat/._0.png", "cat/Thumbs.db"):
        (pets / name).write_bytes(encoded(1))
    for name in (".ipynb_checkpoints", "__MACOSX", "dog/@eaDir", ".git"):
        write(pets / name / "0-checkpoint.png", 5)
    source = open_data(pets)
    assert len(source) == 9
    assert source.ignored == {}


def test_other_files_are_left_out_and_reported(pets):
    (pets / "README.txt").write_text("hello")
    (pets / "cat" / "notes.md").write_text("hello")
    write(pets / "stray.png", 3)
    os.mkfifo(pets / "cat" / "pipe.jpg")
    assert open_data(pets).ignored == {
        "README.txt": "does not have the extension of an image",
        "cat/notes.md": "does not have the extension of an image",
        "cat/pipe.jpg": "not a regular file",
        "stray.png": "not in a class folder",
    }


def test_names_may_hold_anything_a_disk_allows(tmp_path):
    names = ["with space", "new\nline", "ünïcode", "quote'\"", "😀", "100%", "-dash", "semi;colon"]
    class_folders(tmp_path / "x", dict.fromkeys(names, 3))
    latin = os.fsencode(tmp_path / "x" / "100%") + b"/caf\xe9.png"
    with open(latin, "wb") as file:
        file.write(encoded(99))
    source = open_data(tmp_path / "x")
    assert set(source.classes) == set(names)
    assert len(source) == 3 * len(names) + 1
    for index in range(len(source)):
        assert source[index].content.startswith(b"\x89PNG")


def test_a_class_name_that_is_not_unicode_is_an_error(pets):
    latin = os.fsencode(pets) + b"/caf\xe9"
    os.mkdir(latin)
    with pytest.raises(UserError, match=r"label 'caf\\udce9' is not valid Unicode; rename it"):
        open_data(pets)


def test_two_spellings_of_an_accent_are_one_class(tmp_path):
    class_folders(tmp_path / "x" / "train", {"e\u0301te\u0301": 2, "hiver": 2})
    class_folders(tmp_path / "x" / "val", {"\u00e9t\u00e9": 2, "hiver": 2}, start=9)
    assert open_data(tmp_path / "x").classes == ("hiver", "été")


def test_a_link_loop_counts_each_image_once(pets):
    (pets / "cat" / "again").symlink_to(pets)
    (pets / "cat" / "self").symlink_to("self")
    source = open_data(pets)
    assert len(source) == 9
    assert source.ignored == {
        "cat/again": "a link to a folder, which is not followed",
        "cat/self": "a broken link",
    }


def test_links_to_files_are_followed_inside_the_folder_only(pets, tmp_path):
    outside = write(tmp_path / "secret.png", 50)
    (pets / "dog" / "twin.png").symlink_to("../cat/0.png")
    (pets / "dog" / "leak.png").symlink_to(outside)
    (pets / "dog" / "gone.png").symlink_to("nowhere.png")
    (pets / "dog" / "zero.png").symlink_to("/dev/zero")
    source = open_data(pets)
    twin, original = (list(source.ids).index(name) for name in ("dog/twin.png", "cat/0.png"))
    assert source[twin].content == source[original].content
    assert source.splits[twin] == source.splits[original]
    assert source.ignored == {
        "dog/leak.png": "a link to a file outside the folder",
        "dog/gone.png": "a broken link",
        "dog/zero.png": "a link to a file outside the folder",
    }


def test_the_folder_itself_may_be_a_link(pets, tmp_path):
    (tmp_path / "alias").symlink_to(pets)
    assert len(open_data(tmp_path / "alias")) == 9


def test_an_empty_folder_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no images in .*empty; expected a folder of JPEG"):
        open_data(tmp_path / "empty")


def test_a_folder_of_other_files_says_what_it_found(tmp_path):
    (tmp_path / "x" / "cat").mkdir(parents=True)
    (tmp_path / "x" / "cat" / "1.psd").touch()
    with pytest.raises(
        UserError, match=r"1 other file, such as cat/1.psd: does not have the extension"
    ):
        open_data(tmp_path / "x")


def test_images_without_class_folders_are_an_error(tmp_path):
    write(tmp_path / "x" / "1.png", 1)
    with pytest.raises(UserError, match="are not in class folders"):
        open_data(tmp_path / "x")


def test_one_class_is_an_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match=r"only one class, 'cat'; at least 2 are needed$"):
        open_data(class_folders(tmp_path / "x", {"cat": 9}))


def test_an_empty_class_folder_is_an_error_that_names_it(pets):
    (pets / "emu").mkdir()
    with pytest.raises(UserError, match="class 'emu' of pets has no training images"):
        open_data(pets)


def test_a_test_set_may_lack_classes(pets):
    (pets / "emu").mkdir()
    source = open_data(pets, split=False, classes=["cat", "cow", "dog", "emu"])
    assert source.classes == ("cat", "cow", "dog", "emu")
    assert sorted(set(source.labels.tolist())) == [0, 2]


def test_a_folder_that_is_not_a_class_of_the_model_is_an_error(pets):
    with pytest.raises(UserError, match="folder cat: label 'cat' is not one of the 2 classes"):
        open_data(pets, split=False, classes=["dog", "emu"])


def test_a_folder_without_permission_is_named(pets, monkeypatch):
    original = os.scandir

    def refuse(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied")
        return original(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"cannot list .*dog: Permission denied"):
        open_data(pets)


def test_a_source_can_be_pickled(pets):
    source = open_data(pets)
    copy = pickle.loads(pickle.dumps(source))
    assert copy[5] == source[5]
    assert copy.splits.tolist() == source.splits.tolist()


def test_a_source_stays_usable_from_another_folder(pets, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    source = open_data("pets")
    monkeypatch.chdir("/")
    assert source[0].id == "cat/0.png"


def test_folders_of_imagenet_match_a_model_with_its_thousand_names(tmp_path):
    from vitrail.zoo.weights import imagenet_classes

    for wnid in ("n01440764", "n02056570"):
        (tmp_path / "val" / wnid).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "val" / wnid / "ILSVRC2012_val_00000001.JPEG")
    source = open_data(tmp_path / "val", classes=imagenet_classes(), split=False)
    assert [source.classes[label] for label in source.labels] == ["tench", "king penguin"]


def test_class_folders_inside_one_more_folder_are_found(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / "pets" / "images" / label).mkdir(parents=True)
        for number in range(4):
            picture = Image.new("RGB", (8, 8), (number, 0, len(label)))
            picture.putpixel((0, 0), (number, 9, ord(label[0])))
            picture.save(tmp_path / "pets" / "images" / label / f"{number}.png")
    source = open_data(tmp_path / "pets")
    assert source.classes == ("cat", "dog") and len(source) == 8
