"""Learning without labels: what the run writes, what it reads, how it stops and resumes."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitrail
from tests.run.conftest import tensors
from vitrail.data.config import Columns, Preprocess
from vitrail.data.loader import Loader
from vitrail.data.source import is_labelled
from vitrail.data.sources.folder import FileSource
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.pretraining.config import PretrainConfig
from vitrail.run import auto
from vitrail.run.dataset import open_run_data
from vitrail.run.design import design_recipe
from vitrail.run.drive import Stopped
from vitrail.run.fractions import compare_with_scratch
from vitrail.run.quality import adapt_norms, describe_collapse
from vitrail.run.rebuilt import list_strips, prune_strips, save_rebuilt
from vitrail.run.recipe import Recipe, flatten_settings, read_recipe, settings_from_dict
from vitrail.run.request import Request
from vitrail.run.storage.journal import read_journal
from vitrail.run.unlabelled import choose_method, open_images
from vitrail.training.distributed import SINGLE
from vitrail.training.loop import Diverged
from vitrail.zoo.file import save_model

TINY = {
    "vit": {"width": 16, "depth": 1, "heads": 1},
    "train": {"steps": 30, "batch": 64, "ema": 0.9, "log_every": 5, "save_every": 3600},
    "data": {"workers": 0},
    "pretrain": {"comparison": 0.0},
}
COMPARED = {**TINY, "pretrain": {}}


@pytest.fixture
def unlabelled(tmp_path, monkeypatch):
    """Pretrains a tiny model on digits: `unlabelled(out, **arguments)`."""
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)

    def pretrain(out="run", settings=TINY, data="digits", **arguments):
        given = {"report": False, "quiet": True, **arguments}
        return vitrail.pretrain(data, out=tmp_path / out, settings=settings, **given)

    return pretrain


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Images in a tree without class folders, some of them at its top."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for number in range(40):
        folder = tmp_path / "tree" / ("" if number % 3 else "2024/summer")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "tree"


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", ["masked", "views"])
def test_a_pretraining_leaves_what_was_promised(unlabelled, method):
    done = unlabelled(method=method, settings=COMPARED if method == "masked" else TINY)
    keys = ["run", "model", "method", "epochs", "steps", "seconds", "loss", "rank", "random_rank"]
    assert list(done.metrics) == [*keys, "collapsed", "probe"]
    assert json.loads((done.folder / "metrics.json").read_text()) == done.metrics
    assert done.metrics["probe"].keys() >= {"knn", "linear", "interval", "random"}
    fractions = [
        [row["fraction"] for row in done.metrics["probe"][kind]]
        for kind in ("fractions", "trained")
    ]
    assert fractions == [[0.01, 0.1, 1.0], [0.01, 0.1, 1.0] if method == "masked" else []]
    assert done.backbone.model.config.head == "none"
    epochs = [line for line in read_journal(done.folder / "log.jsonl") if line["kind"] == "epoch"]
    assert {"val_loss", "val_rank", "val_knn"} <= epochs[-1].keys()


@pytest.mark.parametrize(("method", "step"), [("masked", 22), ("views", 23)])
def test_a_resumed_pretraining_equals_one_never_stopped(
    unlabelled, stop_at, monkeypatch, method, step
):
    whole = unlabelled("whole", method=method)
    with monkeypatch.context():
        stop_at(step)
        with pytest.raises(Stopped) as stopped:
            unlabelled("part", method=method)
    assert stopped.value.code == 128 + signal.SIGTERM
    monkeypatch.undo()
    part = vitrail.resume(whole.folder.parent / "part", report=False, quiet=True)
    assert equal(tensors(whole.folder), tensors(part.folder))
    assert part.metrics["probe"] == whole.metrics["probe"]


def test_neither_test_images_nor_labels_are_read(unlabelled, monkeypatch):
    evaluation, read = Loader.evaluation, set()

    def watch(self, split, *arguments, **named):
        for batch in evaluation(self, split, *arguments, **named):
            read.update(self.source.splits[batch.items].tolist())
            yield batch

    monkeypatch.setattr(Loader, "evaluation", watch)
    labelled = unlabelled("labelled")
    assert read == {"train", "val"}
    source = vitrail.open_data("digits")
    shuffled = vitrail.open_data("digits")
    shuffled.labels[:] = np.roll(source.labels, 7)
    other = unlabelled("shuffled", data=shuffled)
    mine, theirs = tensors(labelled.folder), tensors(other.folder)
    assert equal(mine, theirs)


def test_a_tree_without_class_folders_is_enough(unlabelled, tree):
    settings = {**TINY, "train": {"steps": 4, "batch": 8}}
    done = unlabelled(data=tree, settings=settings)
    assert done.metrics["probe"] is None
    recipe = (done.folder / "recipe.toml").read_text()
    assert 'labels = "none"' in recipe
    assert "labels: none" in recipe and "data.labels" not in recipe
    (done.folder / "metrics.json").unlink()
    assert vitrail.resume(done.folder, report=False, quiet=True).metrics["steps"] == 4


def test_a_source_without_labels_from_python_resumes(unlabelled, photos):
    source = vitrail.open_data(photos, labels="none")
    done = unlabelled(data=source, settings={**TINY, "train": {"steps": 4, "batch": 8}})
    (done.folder / "metrics.json").unlink()
    assert vitrail.resume(done.folder, report=False, quiet=True).metrics["probe"] is None


@pytest.fixture
def rows(tree):
    """The rows of a table of the images of a tree: every second one has a label."""
    names = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*.png"))
    return [(name, ("", "cat", "", "dog")[row % 4]) for row, name in enumerate(names)]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("labels", [None, "partial"])
def test_a_table_with_empty_labels_trains_on_all_images_and_is_measured_by_some(
    unlabelled, tree, rows, kind, labels
):
    table, rows = tree / f"some.{kind}", sorted(rows, key=lambda row: not row[1])
    lines = [
        json.dumps({"path": name, **({"label": label} if label else {})}) for name, label in rows
    ]
    if kind == "csv":
        lines = ["path,label", *(f"{name},{label}" for name, label in rows)]
    table.write_text("\n".join(lines))
    settings = {**COMPARED, "train": {"steps": 4, "batch": 8}, "data": {"workers": 0}}
    if labels:
        settings["data"]["labels"] = labels
    done = unlabelled(data=table, settings=settings)
    alone = unlabelled("alone", data=table, settings={**settings, "data": {"labels": "none"}})
    images = [str(run.folder / "recipe.toml") for run in (done, alone)]
    counts = [Path(name).read_text().split(" colour training images")[0][-2:] for name in images]
    assert int(counts[0]) >= 30 and int(counts[1]) >= 30
    assert done.metrics["probe"]["fractions"][-1]["labels"] <= 18
    assert alone.metrics["probe"] is None
    (done.folder / "metrics.json").unlink()
    again = vitrail.resume(done.folder, report=True, quiet=True)
    assert (
        again.metrics["probe"] == done.metrics["probe"] and (done.folder / "report.html").is_file()
    )
    (done.folder / "report.html").unlink()
    assert vitrail.report(done.folder).has_images


def test_images_that_are_held_out_with_labels_are_held_out_without(tree, rows):
    table = tree / "some.csv"
    table.write_text("\n".join(["path,label", *(f"{name},{label}" for name, label in rows)]))
    part = vitrail.open_data(table, labels="partial")
    source = open_run_data(str(table), Columns(), "partial", pretraining=True)
    splits = dict(zip(source.ids, source.splits, strict=True))
    assert len(source) == 40 and source.classes == part.classes
    assert all(splits[name] == split for name, split in zip(part.ids, part.splits, strict=True))
    labels = dict(zip(source.ids, source.labels.tolist(), strict=True))
    assert [labels[name] for name, _ in rows[:4]] == [-1, 0, -1, 1]


@pytest.mark.parametrize("header", ["path", "path,width"])
def test_a_table_without_a_label_column_is_enough(unlabelled, tree, rows, header):
    cells = ["", ",32"][header.count(",")]
    (tree / "some.csv").write_text("\n".join([header, *(name + cells for name, _ in rows)]))
    settings = {**TINY, "train": {"steps": 2, "batch": 8}}
    assert unlabelled(data=tree / "some.csv", settings=settings).metrics["probe"] is None


def test_masked_pretraining_learns(unlabelled):
    settings = {**TINY, "train": {**TINY["train"], "steps": 120, "lr": 0.02}}
    done = unlabelled(settings=settings)
    losses = [line["loss"] for line in read_journal(done.folder / "log.jsonl") if "loss" in line]
    assert losses[-1] < 0.75 * losses[0]


def test_a_good_backbone_needs_fewer_labels_than_random_weights(digits, monkeypatch):
    """Weights that know the digits stand for a good pretraining."""
    vit = {**TINY["vit"], "positions": "sincos", "pool": "avg"}
    settings = {"vit": vit, "train": {"steps": 100, "batch": 64}, "data": {"workers": 0}}
    taught = digits("taught", settings)
    recipe = settings_from_dict(Recipe, read_recipe(taught.folder / "recipe.toml"))
    none = replace(recipe, pretrain=PretrainConfig(comparison=0.0))
    recipe = replace(recipe, pretrain=PretrainConfig())
    backbone = vitrail.ViT(replace(recipe.vit, head="none"))
    state = taught.classifier.model.state_dict()
    backbone.load_state_dict({name: state[name] for name in backbone.state_dict()})
    loader = Loader(vitrail.open_data("digits"), recipe.preprocess, recipe.data, batch=64)
    loader.prepare("train", "val")
    monkeypatch.setattr("vitrail.run.fractions.FRACTIONS", (0.1,))
    (row,) = compare_with_scratch(recipe, backbone, loader)
    assert row["labels"] == 141 and row["accuracy"] > row["scratch"] + 0.2
    assert compare_with_scratch(none, backbone, loader) == []

    def diverge(*arguments, **named):
        raise Diverged("the loss is not finite")

    monkeypatch.setattr("vitrail.run.fractions.loop.train_steps", diverge)
    (row,) = compare_with_scratch(recipe, backbone, loader)
    assert row["accuracy"] > 0.6 and row["scratch"] < 0.3  # the probe, and zeros


def test_batch_norms_are_those_of_whole_images(unlabelled):
    settings = {**TINY, "vit": {"stem": "r9", "patch": 2, "width": 16, "depth": 1, "heads": 1}}
    done = unlabelled(settings={**settings, "train": {**TINY["train"], "steps": 3, "ema": 0.0}})
    newest = sorted((done.folder / "checkpoints").glob("step-*"))[-1]
    kept, trained = done.backbone.model, load_file(newest / "tensors.safetensors")
    name = "patch_embed.backbone.layers.0.norm.running_var"
    assert not torch.equal(kept.get_buffer(name), trained[f"model/backbone.{name}"])
    loader = Loader(vitrail.open_data("digits"), done.backbone.preprocess, batch=64)
    images = torch.cat([batch.images for batch in loader.evaluation("train", limit=512)])
    with torch.no_grad():
        seen = kept.patch_embed.backbone.layers[0].conv(images).var(dim=(0, 2, 3))
    torch.testing.assert_close(kept.get_buffer(name), seen, rtol=0.1, atol=1e-3)


def test_batch_norms_do_not_depend_on_the_order_of_the_images():
    order = np.random.default_rng(0).permutation(64)
    levels = np.repeat(np.arange(64, dtype=np.uint8) // 8 * 30, 8 * 8).reshape(64, 8, 8)
    noise = np.random.default_rng(1).integers(0, 30, (64, 8, 8), np.uint8)

    def variances(images):
        torch.manual_seed(0)
        backbone = ViT(
            ViTConfig(image=8, patch=2, channels=1, width=8, depth=1, heads=1, stem="r9")
        )
        reader = Namespace(
            batch=16,
            evaluation=lambda *_, **__: [Namespace(images=part) for part in images.split(16)],
        )
        reader.as_single_process = lambda: reader
        adapt_norms(backbone, reader)
        return backbone.patch_embed.backbone.layers[0].norm.running_var

    images = torch.from_numpy((levels + noise) / 255.0).float()[:, None]
    sorted_by_brightness, shuffled = variances(images), variances(images[order])
    torch.testing.assert_close(sorted_by_brightness, shuffled, rtol=0.1, atol=0)


def test_a_collapse_is_announced(unlabelled, monkeypatch, capsys):
    monkeypatch.setattr("vitrail.run.quality.COLLAPSED_RANK", 1000.0)
    done = unlabelled(quiet=False)
    assert "the features have collapsed: effective rank" in capsys.readouterr().err
    assert "lower train.lr" in done.metrics["collapsed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"settings": {"vit": {"patch": 8}}},
            "has only 1 patch of 8 x 8 pixels, and at least 9 are needed",
        ),
        ({"settings": {"vit": {"pool": "map"}}}, "attention pooling learns nothing"),
        ({"settings": {"pretrain": {"mask": 1.0}}}, "give a number between 0 and 1"),
        ({"settings": {"pretrain": {"mesk": 0.5}}}, "the nearest known one is pretrain.mask"),
        ({"method": "views", "settings": {"pretrain": {"method": "masked"}}}, "give one of them"),
        ({"weights": "nowhere"}, "nowhere does not exist"),
        ({"settings": {"train": {"batch": 1}}}, "two images or more in each forward pass"),
        (
            {"settings": {"train": {"batch": 4, "accumulate": 4}}},
            "raise `train.batch` to at least 8 or lower `train.accumulate`",
        ),
        ({"model": "DeiT-Ti/16 distilled"}, "has a distillation token"),
    ],
)
def test_bad_input_is_one_line(unlabelled, tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        unlabelled(**arguments)
    assert not (tmp_path / "run").exists()


def test_distilled_weights_cannot_start_a_pretraining(unlabelled, tmp_path):
    vit = vitrail.ViTConfig(
        image=8, patch=2, channels=1, width=16, depth=1, heads=1, classes=3, distilled=True
    )
    preprocess = {"size": 8, "channels": 1}
    save_model(tmp_path / "deit.safetensors", vitrail.ViT(vit), {"preprocess": preprocess})
    with pytest.raises(UserError, match=r"deit.safetensors has a distillation token"):
        unlabelled(weights=tmp_path / "deit.safetensors", settings={})


def test_the_method_suits_the_requested_architecture(unlabelled):
    settings = {**TINY, "vit": {"width": 256, "depth": 1, "heads": 1, "image": 16, "patch": 2}}
    done = unlabelled(settings={**settings, "train": {"steps": 1, "batch": 8}})
    recipe = read_recipe(done.folder / "recipe.toml")
    assert recipe["pretrain"]["decoder_width"] == 128 and recipe["pretrain"]["mask"] == 0.75


def test_one_training_image_is_not_enough(unlabelled, tree):
    paths = sorted(tree.rglob("*.png"))
    for path in paths[3:]:
        path.unlink()
    with pytest.raises(UserError, match="needs two training images or more; add images"):
        unlabelled(data=tree, settings={"data": {"workers": 0}})


def test_one_image_is_not_enough(unlabelled, tree):
    shutil.rmtree(tree / "2024")
    for path in sorted(tree.glob("*.png"))[1:]:
        path.unlink()
    with pytest.raises(
        UserError, match="it needs at least 3, one each for train, test and val; add images"
    ):
        unlabelled(data=tree)
    (next(tree.glob("*.png"))).unlink()
    with pytest.raises(UserError, match=r"no images in .*; expected JPEG"):
        unlabelled(data=tree)


def test_the_report_shows_what_was_learned(unlabelled):
    done = unlabelled(report=True, settings=COMPARED)
    page = (done.folder / "report.html").read_text()
    for part in (
        "Masked, reconstructed, original",
        "Patch colours",
        "Nearest neighbours",
        "from scratch",
    ):
        assert part in page
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org", "")
    assert f"random weights, which is {done.metrics['random_rank']:.1f} (dashed)" in page
    low, high = done.metrics["probe"]["knn_interval"]
    assert f"({100 * low:.1f} to {100 * high:.1f})" in page and page.count("<small>") == 12
    figures = {path.stem for path in (done.folder / "figures").glob("*.png")}
    assert figures == {"loss", "rank", "knn", "colours", "rebuilt"}
    strips = sorted((done.folder / "rebuilt").glob("*.png"))
    assert [path.name for path in strips][:1] == ["hidden.png"] and len(strips) >= 3
    with Image.open(strips[0]) as strip:
        assert strip.size == (16 * 8 + 15, 8)


def test_the_report_of_an_unfinished_pretraining_says_so(unlabelled, stop_at, tmp_path):
    stop_at(7)
    with pytest.raises(Stopped):
        unlabelled()
    vitrail.report(tmp_path / "run")
    assert "Not finished: 5 of 30 steps" in (tmp_path / "run" / "report.html").read_text()


def test_the_report_of_an_unfinished_pretraining_shows_a_collapse(unlabelled, monkeypatch):
    done = unlabelled()
    (done.folder / "metrics.json").unlink()
    vitrail.report(done.folder)
    assert "have collapsed" not in page_header(done.folder)
    monkeypatch.setattr("vitrail.run.quality.COLLAPSED_RANK", 1000.0)
    vitrail.report(done.folder)
    assert "The features have collapsed" in page_header(done.folder)


def page_header(folder):
    return (folder / "report.html").read_text().partition("</header>")[0]


def test_the_command_in_the_report_has_the_processes_of_the_run(unlabelled, monkeypatch):
    monkeypatch.setattr(
        "vitrail.run.storage.predictions.describe_machine", lambda: {"processes": 2}
    )
    done = unlabelled(report=True)
    page = (done.folder / "report.html").read_text()
    assert "torchrun --nproc-per-node 2 -m vitrail pretrain --recipe" in page


def test_few_validation_images_cannot_tell_of_a_collapse(unlabelled, tree, capsys):
    settings = {**TINY, "train": {"steps": 2, "batch": 8}}
    done = unlabelled(data=tree, settings=settings, report=True, quiet=False)
    note = "too few to tell from the effective rank whether the features have collapsed"
    assert capsys.readouterr().err.count(note) == 1
    assert note in (done.folder / "report.html").read_text()


def test_pretrainings_are_compared_with_other_runs(unlabelled, digits):
    labelled = {name: TINY[name] for name in ("vit", "train", "data")}
    comparison = vitrail.compare(unlabelled("a").folder, digits("b", labelled).folder)
    assert "learned without labels: effective rank" in str(comparison)
    assert "linear probe" in comparison.runs[0].verdict
    pretrained, trained = comparison.to_dict()["runs"]
    assert pretrained["method"] == "masked" and 0 < pretrained["probe"]["linear"] <= 1
    assert {"loss", "rank"} < set(pretrained) and not {"method", "probe"} & set(trained)


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        ("train", {"drop_patches": 0.5}),
        ("train", {"frozen": 1}),
        ("train", {"probe": 100}),
        ("train", {"class_weights": True}),
        ("train", {"smoothing": 0.1}),
        ("train", {"patience": 2}),
        ("data", {"balanced": True}),
        ("data", {"labelled": 0.5}),
        ("data", {"augment": {"mixup": 0.2}}),
        ("data", {"augment": {"cutmix": 1.0}}),
    ],
)
def test_settings_of_a_training_with_labels_are_refused(unlabelled, section, setting):
    name = ".".join(flatten_settings({section: setting}))
    with pytest.raises(UserError, match=f"{name} is for training with labels; omit it"):
        unlabelled(settings={**TINY, section: {**TINY[section], **setting}})


def test_the_argument_wins_over_the_method_of_a_recipe(unlabelled, digits):
    masked = unlabelled("masked")
    teacher = digits("teacher", {name: TINY[name] for name in ("vit", "train", "data")})
    again = {"recipe": masked.folder / "recipe.toml", "settings": {}, "data": None}
    views = unlabelled("views", method="views", **again)
    recipe = read_recipe(views.folder / "recipe.toml")
    assert views.metrics["method"] == recipe["pretrain"]["method"] == "views"
    assert recipe["data"]["augment"]["scale"] == 1 and recipe["pretrain"]["colour"] == 0.0
    assert recipe["pretrain"]["comparison"] == 0.0 and recipe["vit"]["width"] == 16
    text = (views.folder / "recipe.toml").read_text()
    assert "without its [pretrain], [data.augment], which are for method masked" in text
    taught = unlabelled("taught", teacher=teacher.folder, **again)
    again["recipe"] = taught.folder / "recipe.toml"
    assert unlabelled("same", **again).metrics["method"] == "teacher"
    done = unlabelled("other", method="masked", **again)
    assert done.metrics["method"] == "masked" and "teacher" not in read_recipe(
        done.folder / "recipe.toml"
    )
    with pytest.raises(UserError, match="needs a teacher"):
        unlabelled(method="teacher", recipe=masked.folder / "recipe.toml")


def test_the_recipe_of_a_training_with_labels_is_refused(unlabelled, digits):
    settings = {**TINY["train"], "drop_patches": 0.5}
    labelled = digits("labelled", {"vit": TINY["vit"], "train": settings, "data": {"workers": 0}})
    with pytest.raises(UserError, match="repeat it with `vitrail train`"):
        unlabelled(recipe=labelled.folder / "recipe.toml", settings={})


def test_a_decoder_is_not_wider_than_allowed():
    summary = auto.DataSummary(images=900, classes=1, side=32, channels=3, imbalance=1.0)
    vit = ViTConfig(image=32, patch=4, width=16384, heads=16, depth=1)
    assert choose_method(summary, vit, "masked")[0]["decoder_width"] == 4096


def test_images_of_a_single_pixel_are_not_enlarged_for_a_pretraining(unlabelled, tmp_path):
    (tmp_path / "dots").mkdir()
    for number in range(40):
        Image.new("RGB", (1, 1), (number, 0, 0)).save(tmp_path / "dots" / f"{number}.png")
    with pytest.raises(UserError, match=r"have 1 pixel on the short side, .* give larger images"):
        unlabelled(data=tmp_path / "dots", settings={"data": {"workers": 0}})


def test_each_process_needs_two_images_in_a_forward_pass():
    def design(batch, processes):
        train = {"batch": batch, "accumulate": 2}
        request = Request(data="digits", method="views", settings={"train": train})
        source = vitrail.open_data("digits")
        return design_recipe(source, request, torch.device("cpu"), processes)

    assert design(12, processes=3).recipe.train.batch == 12
    with pytest.raises(UserError, match=r"each of the 4 processes; raise .* to at least 16"):
        design(12, processes=4)


def test_splits_without_class_folders_are_not_taken_for_classes(unlabelled, tree, caplog):
    for split, count in (("train", 20), ("val", 10), ("test", 10)):
        (tree / split).mkdir()
        for path in [p for p in tree.rglob("*.png") if p.parent.name in ("tree", "summer")][:count]:
            path.rename(tree / split / path.name)
    shutil.rmtree(tree / "2024")
    source, why = open_images(str(tree), Columns(), None, SINGLE)
    assert [int((source.splits == split).sum()) for split in ("train", "val", "test")] == [
        20,
        10,
        10,
    ]
    assert why.startswith("labels: none") and not is_labelled(source)
    assert not caplog.records
    (tree / "extra").mkdir()
    shutil.copy(next((tree / "train").iterdir()), tree / "extra" / "more.png")
    open_images(str(tree), Columns(), None, SINGLE)
    assert "ignored 1 image beside the split folders, such as extra/more.png" in caplog.text
    shutil.rmtree(tree / "extra")
    with pytest.raises(UserError, match=r"test, train, val of .* are splits"):
        vitrail.open_data(tree)


def test_test_images_are_not_trained_on_beside_a_folder_without_a_split_name(
    tree, monkeypatch, caplog
):
    paths = sorted(tree.rglob("*.png"))
    for number, path in enumerate(paths):
        folder = tree / ("train", "train", "val", "test", "extra")[number % 5]
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    read = set()
    reading = FileSource.__getitem__
    monkeypatch.setattr(
        FileSource, "__getitem__", lambda self, i: read.add(self.ids[i]) or reading(self, i)
    )
    source, why = open_images(str(tree), Columns(), None, SINGLE)
    auto.summarise(source)
    trained = {
        source.ids[item].partition("/")[0] for item in np.flatnonzero(source.splits == "train")
    }
    assert trained == {"train"} and why.startswith("labels: none")
    assert {name.partition("/")[0] for name in read} == {"train"}
    assert "ignored 8 images beside the split folders" in caplog.text


@pytest.mark.parametrize(
    ("split", "advice"),
    [("train", "`data.labels='none'` to use the images of train alone"), ("test", "into a folder")],
)
def test_a_folder_that_may_be_a_class_or_a_split_is_an_error(tree, split, advice):
    for number, path in enumerate(sorted(tree.rglob("*.png"))):
        folder = tree / (split, "car")[number % 2]
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    shutil.rmtree(tree / "2024")
    with pytest.raises(UserError, match=f"{split} of .* may be a class or a split; .*{advice}"):
        open_images(str(tree), Columns(), None, SINGLE)
    source, _ = open_images(str(tree), Columns(), "single", SINGLE)
    assert set(source.classes) == {"car", split}


def test_two_images_do_not_tell_of_a_collapse():
    scores = {"val_rank": 1.0, "val_spread": 0.4}
    assert describe_collapse(scores, "masked", images=2, random_rank=9.0) is None
    assert "collapsed" in describe_collapse(scores, "masked", images=100, random_rank=2.1)
    equal = {**scores, "val_spread": 0.0}
    assert "collapsed" in describe_collapse(equal, "masked", images=2, random_rank=9.0)
    assert describe_collapse(equal, "masked", images=1, random_rank=9.0) is None


def test_a_collapse_is_a_rank_below_half_of_that_of_random_weights():
    scores = {"val_rank": 6.0, "val_spread": 0.4}
    assert describe_collapse(scores, "views", images=100, random_rank=11.0) is None
    warning = describe_collapse(scores, "views", images=100, random_rank=13.0)
    assert "effective rank 6.0 (random weights: 13.0)" in warning


def test_rebuilt_images_are_shown_in_the_range_of_the_true_ones(tmp_path, monkeypatch):
    images = torch.linspace(100, 300, 2 * 64).view(2, 1, 8, 8)
    preprocess = Preprocess(size=8, channels=1, mean=(0.0,), std=(1.0,), pixels="float32")
    loader = Loader(vitrail.open_data("digits"), preprocess)
    monkeypatch.setattr(Loader, "evaluation", lambda *_, **__: iter([Namespace(images=images)]))
    model = torch.nn.Identity()
    model.rebuild = lambda x: (torch.zeros_like(x), x.clamp(min=150))
    save_rebuilt(tmp_path, model, loader, 1)
    true, rebuilt = (
        np.asarray(Image.open(tmp_path / name)) for name in ("true.png", "step-00000001.png")
    )
    assert np.array_equal(true[:, 9:], rebuilt[:, 9:])  # the second image was rebuilt perfectly
    assert true[0, 0, 0] == 0 and rebuilt[0, 0, 0] > 100


def test_strips_of_evenly_spaced_evaluations_are_kept_like_powers(tmp_path):
    for step in range(66, 661, 66):
        (tmp_path / f"step-{step:08d}.png").touch()
        prune_strips(tmp_path, step)
    assert [step for step, _ in list_strips(tmp_path)] == [66, 132, 264, 462, 660]
