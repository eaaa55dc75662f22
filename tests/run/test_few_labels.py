"""Training with few labels: from a pretraining, and with a part of the labels."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.run.conftest import SMALL, tensors
from tests.run.test_pretrain import TINY
from vitrail.data.config import AUGMENT_PRESETS, DataConfig, Preprocess
from vitrail.data.loader import Loader
from vitrail.data.split import keep_labels
from vitrail.errors import UserError
from vitrail.model.config import ViTConfig
from vitrail.pretraining.config import JointConfig
from vitrail.pretraining.joint import JointClassifier
from vitrail.run import auto
from vitrail.run.auto import DataSummary, choose_from_scratch
from vitrail.run.build import make_learner
from vitrail.run.design import (
    design_from_scratch,
    design_joint,
    design_recipe,
    requested_settings,
)
from vitrail.run.drive import Stopped
from vitrail.run.recipe import Recipe, read_recipe, settings_from_dict, settings_to_dict
from vitrail.run.request import Request
from vitrail.run.semi_supervised import (
    attach_unlabelled,
    choose_joint,
    open_without_labels,
    plan_joint,
    use_unlabelled,
    work_until,
)
from vitrail.run.speed import measure_training_speed
from vitrail.training.config import TrainConfig
from vitrail.training.distributed import SINGLE
from vitrail.zoo.presets import preset

GREY = Preprocess(size=8, channels=1)
PLAIN = {**SMALL, "train": {"batch": 64, "log_every": 5}, "data": {"workers": 0}}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A pretraining, which no test changes."""
    out = tmp_path_factory.mktemp("runs") / "pre"
    return vitrail.pretrain("digits", out=out, settings=TINY, report=False, quiet=True).folder


def test_training_from_a_pretraining_uses_the_recipe_from_scratch(pretrained, digits):
    run = digits(weights=pretrained, settings={"train": {"steps": 5}, "data": {"workers": 0}})
    recipe = read_recipe(run.folder / "recipe.toml")
    assert recipe["train"]["optimizer"] == "muon" and recipe["train"]["layer_decay"] == 0.75
    assert recipe["train"]["lr"] == pytest.approx(1e-2 / 3, abs=1e-5)
    assert recipe["train"]["probe"] == 1412 and recipe["vit"]["width"] == 16
    stored = read_recipe(pretrained / "recipe.toml")
    assert recipe["preprocess"]["mean"] == stored["preprocess"]["mean"]
    text = (run.folder / "recipe.toml").read_text()
    assert "weights: pretrained on digits, method masked" in text


def test_the_pretrained_weights_are_where_training_starts(pretrained, digits):
    tiny = {"train": {"steps": 1, "lr": 1e-9, "weight_decay": 0.0}, "data": {"workers": 0}}
    run = digits(weights=pretrained, settings=tiny)
    mine, theirs = run.classifier.model, vitrail.load_backbone(pretrained).model
    difference = mine.blocks[0].mlp.fc1.weight - theirs.blocks[0].mlp.fc1.weight
    assert float(difference.detach().abs().max()) < 1e-6


def test_16_bit_images_keep_their_range_after_a_pretraining_on_8_bit_ones(
    pretrained, tmp_path, monkeypatch
):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for number in range(40):
        folder = tmp_path / "data" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{number}.npy", rng.integers(0, 60_000, (8, 8, 1)).astype(np.uint16))
    source = vitrail.open_data(tmp_path / "data")
    request = Request(data=str(tmp_path / "data"), weights=str(pretrained), minutes=1.0)
    one, two = (design_recipe(source, request, torch.device("cpu"), n) for n in (1, 2))
    assert one.recipe.preprocess.pixels == "uint16" and one.measured == ["mean", "std"]
    epochs = [
        float(line.split("about ")[1].split(" epochs")[0])
        for design in (one, two)
        for line in design.reasons
        if " epochs expected" in line
    ]
    assert len(epochs) == 2 and epochs[1] > 1.5 * epochs[0]


def test_a_part_that_learns_is_refused_after_a_pretraining(pretrained, digits):
    with pytest.raises(UserError, match="was pretrained without labels"):
        digits(weights=pretrained, tune="head")


def test_a_pretraining_has_no_classes_to_evaluate(pretrained):
    with pytest.raises(UserError, match="has no classification head"):
        vitrail.load(pretrained)


def test_a_pretraining_is_converted_and_has_features(pretrained, tmp_path):
    vitrail.convert(pretrained, to="timm", out=tmp_path / "timm")
    comparison = vitrail.compare_heads(pretrained, "digits", kinds=["nearest-mean"])
    assert comparison.best.accuracy > 0.2


def test_a_recipe_of_a_pretraining_is_not_for_training(pretrained, digits):
    with pytest.raises(UserError, match="repeat it with `vitrail pretrain`"):
        digits(settings={}, recipe=pretrained / "recipe.toml")


def test_a_fraction_of_the_labels_is_the_same_for_every_class_and_grows():
    source = vitrail.open_data("digits")
    tenth, fifth = keep_labels(source, 0.1), keep_labels(source, 0.2)
    train, few, more = (set(np.flatnonzero(s.splits == "train")) for s in (source, tenth, fifth))
    assert few < more < train
    counts = np.bincount(source.labels[sorted(few)])
    assert counts.min() >= 13 and counts.max() <= 15
    for split in ("val", "test"):
        assert np.array_equal(tenth.splits == split, source.splits == split)


JOINT = {**PLAIN, "train": {"steps": 12, "batch": 8, "ema": 0.9, "save_every": 3600}}


def test_images_without_labels_join_the_run_later(digits, monkeypatch):
    shapes = []
    forward = JointClassifier.forward
    monkeypatch.setattr(
        JointClassifier,
        "forward",
        lambda self, images, keep=None: shapes.append(images.shape) or forward(self, images, keep),
    )
    run = digits(settings=JOINT, labels_only=0.1)
    recipe = (run.folder / "recipe.toml").read_text()
    assert "few labels: after 30% of the steps, 3 images without labels beside each" in recipe
    assert [tuple(shape[:-3]) for shape in shapes] == [(8,)] * 3 + [(8, 4)] * 9
    assert run.metrics["steps"] == 12 and run.metrics["test"]["accuracy"] > 0.05


def test_few_labels_get_the_model_that_labels_for_all_images_would_get(monkeypatch):
    monkeypatch.setattr(auto, "training_rate", lambda device, processes: 4.5e10)
    monkeypatch.setattr("vitrail.run.design.measure_training_speed", lambda vit: 500.0)
    labelled = DataSummary(images=4500, classes=10, side=32, channels=3, imbalance=1.0)
    everything = replace(labelled, images=45_000)
    request = Request(data="cifar10", minutes=20)
    joint, name, _ = design_joint(JointConfig(), everything, labelled, request, None, "cpu", 1)
    assert joint.ratio == 3
    assert name == auto.choose_model(everything, "cpu", 4.5e10, 20, None)[0] == "R9+Mini/8"
    assert auto.choose_model(everything, "cpu", 4.5e10, 10, None)[0] == "R9+Micro/8"


def test_the_joint_loss_alone_crops_and_recolours():
    """Of a long training on few colour images, whose own augmentation would distort twice."""
    summary = DataSummary(images=450, classes=10, side=32, channels=3, imbalance=1.0)
    choice = choose_from_scratch(summary, minutes=20)
    assert choice.settings["data"]["augment"]["scale"] < 1
    choice.settings["train"]["ema"] = 0.99
    use_unlabelled(choice, JointConfig(), 450)
    assert choice.settings["train"]["ema"] == 0.999
    assert choice.settings["train"]["lr"] == 0.005
    assert [line for line in choice.reasons if line.startswith("optimizer")] == [
        "optimizer muon, learning rate 0.005: with half of the usual rate, the EMA weights are a "
        "better teacher"
    ]
    assert choice.settings["data"]["augment"] == settings_to_dict(AUGMENT_PRESETS["light"])
    assert [line.split(":")[0] for line in choice.reasons].count("augmentation light") == 1
    assert not any(line.startswith("augmentation strong") for line in choice.reasons)


def test_the_teacher_of_images_without_labels_has_the_ema_weights():
    recipe = Recipe(
        train=TrainConfig(batch=8, ema=0.9, steps=2),
        data=DataConfig(labelled=0.1),
        joint=JointConfig(),
        vit=ViTConfig(image=8, patch=2, channels=1, width=16, depth=1, heads=1, classes=10),
        preprocess=GREY,
    )
    learner = copy.deepcopy(make_learner(recipe, torch.device("cpu")))
    assert learner.model.teacher == (learner.ema.model.backbone,)
    assert not any("teacher" in name for name in learner.tensors())


def test_images_without_labels_are_training_images_and_their_labels_are_not_read(digits):
    source, other = vitrail.open_data("digits"), vitrail.open_data("digits")
    few = keep_labels(source, 0.1)
    unlabelled = np.flatnonzero((source.splits == "train") & (few.splits != "train"))
    other.labels[unlabelled] = 0
    batches = [
        next(joint_loader(data).training()) for data in (few, replace(few, labels=other.labels))
    ]
    assert torch.equal(batches[0].images, batches[1].images)
    seen = set(joint_loader(few).unlabelled.rank_items("train").tolist())
    assert seen == set(np.flatnonzero(source.splits == "train").tolist())


def joint_loader(source):
    recipe = Recipe(train=TrainConfig(batch=8), joint=JointConfig(), preprocess=GREY)
    loader = Loader(source, GREY, recipe.data, batch=8)
    attach_unlabelled(recipe, loader, SINGLE)
    return loader


@pytest.mark.parametrize("step", [3, 10])
def test_a_resumed_joint_run_equals_one_never_stopped(digits, stop_at, monkeypatch, step):
    whole = digits("whole", settings=JOINT, labels_only=0.1)
    with monkeypatch.context():
        stop_at(step)
        with pytest.raises(Stopped):
            digits("part", settings=JOINT, labels_only=0.1)
    monkeypatch.undo()
    part = vitrail.resume(whole.folder.parent / "part", report=False, quiet=True)
    mine, theirs = tensors(whole.folder), tensors(part.folder)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert mine.keys() == theirs.keys() and part.metrics["val"] == whole.metrics["val"]


def test_ratio_zero_is_training_on_the_labelled_part_alone(digits):
    settings = {**JOINT, "data": {"workers": 0, "augment": {"flip": 0.5}}}
    plain = digits("plain", settings=settings, labels_only=0.1, weights="none")
    zero = digits("zero", settings={**settings, "joint": {"ratio": 0}}, labels_only=0.1)
    joint = digits("joint", settings={**settings, "joint": {"ratio": 1}}, labels_only=0.1)
    ours, same, other = (tensors(run.folder) for run in (plain, zero, joint))
    assert all(torch.equal(ours[name], same[name]) for name in ours)
    assert not torch.equal(ours["head.weight"], other["head.weight"])


def test_without_weights_only_the_labelled_part_is_trained_on(digits, tmp_path):
    run = digits(settings=PLAIN, labels_only=0.1, weights="none", epochs=1)
    assert run.metrics["steps"] == 2 and not (tmp_path / "run-pre").exists()
    again = vitrail.resume(run.folder, report=False, quiet=True)
    assert again.metrics == run.metrics


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_an_impossible_fraction_is_one_line(digits, fraction):
    with pytest.raises(UserError, match=r"`labels_only` is .*; give a fraction above 0, at most 1"):
        digits(labels_only=fraction)


def test_a_table_with_empty_labels_says_how_to_use_them(tmp_path, monkeypatch, digits):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    rng, lines = np.random.default_rng(0), ["path,label"]
    for number in range(60):
        label = ("dark", "light")[number % 2]
        pixels = rng.integers(0, 60, (16, 16, 3)) + 190 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{label if number < 30 else ''}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    with pytest.raises(UserError, match="row 32: the label is missing; if images"):
        vitrail.open_data(tmp_path / "table.csv")
    assert len(vitrail.open_data(tmp_path / "table.csv", labels="partial")) == 30
    assert len(vitrail.open_data(tmp_path / "table.csv", labels="none")) == 60
    settings = {**PLAIN, "train": {"batch": 4}, "data": {"workers": 0, "labels": "partial"}}
    run = vitrail.train(
        tmp_path / "table.csv",
        settings=settings,
        epochs=1,
        out=tmp_path / "out",
        report=False,
        quiet=True,
    )
    recipe = settings_from_dict(Recipe, read_recipe(run.folder / "recipe.toml"))
    labelled = vitrail.open_data(tmp_path / "table.csv", labels="partial")
    everything = vitrail.open_data(tmp_path / "table.csv", labels="none")
    everything = replace(everything, splits=np.full(60, "train"))  # as if it was split otherwise
    monkeypatch.setattr("vitrail.run.semi_supervised.open_data", lambda *_, **__: everything)
    assert recipe.joint.ratio == 2  # 24 labelled images of 54, and 2 batches of 4 from 30 others
    others = open_without_labels(recipe.source, recipe.data.columns, "partial", labelled, False)
    used = {others.ids[item] for item in np.flatnonzero(others.splits == "train")}
    held_out = {labelled.ids[item] for item in np.flatnonzero(labelled.splits != "train")}
    assert run.metrics["steps"] and len(used) > 40 and not used & held_out


@pytest.fixture
def partly_labelled(tmp_path, monkeypatch):
    """A table of 60 images, 24 of them with a label, opened in Python."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    rng, lines = np.random.default_rng(0), ["file,kind"]
    for number in range(60):
        pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{'ab'[number % 2] if number < 24 else ''}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    columns = {"path": "file", "label": "kind"}
    return vitrail.open_data(tmp_path / "table.csv", columns=columns, labels="partial")


def test_a_partly_labelled_source_from_python_resumes(
    partly_labelled, stop_at, tmp_path, monkeypatch
):
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    settings = {**PLAIN, "train": {"steps": 4, "batch": 4}, "data": {"workers": 0}}
    stop_at(2)
    with pytest.raises(Stopped):
        vitrail.train(
            partly_labelled, settings=settings, out=tmp_path / "out", report=False, quiet=True
        )
    monkeypatch.undo()
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    recipe = read_recipe(tmp_path / "out" / "recipe.toml")
    assert recipe["data"]["labels"] == "partial" and recipe["joint"]["ratio"] == 2
    assert recipe["data"]["columns"] == {"path": "file", "label": "kind"}
    run = vitrail.resume(tmp_path / "out", report=False, quiet=True)
    assert run.metrics["steps"] == 4


def test_a_pretraining_on_a_partly_labelled_source_uses_all_rows(partly_labelled, tmp_path):
    settings = {**TINY, "train": {"steps": 2, "batch": 8}}
    run = vitrail.pretrain(
        partly_labelled, settings=settings, out=tmp_path / "out", report=False, quiet=True
    )
    text = (run.folder / "recipe.toml").read_text()
    assert int(text.split(" colour training images")[0].split()[-1]) > 40
    (run.folder / "metrics.json").unlink()
    assert vitrail.resume(run.folder, report=False, quiet=True).metrics["probe"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ratio": -1}, "joint.ratio is -1; give a whole number from 0 to 64"),
        ({"crop": 0.0}, "joint.crop is 0.0; give an area fraction above 0"),
        ({"flip": 2.0}, "joint.flip is 2.0; give a number from 0 to 1"),
        ({"start": 2.0}, "joint.start is 2.0; give a number from 0 to 1"),
    ],
)
def test_a_wrong_setting_of_the_joint_loss_is_one_line(digits, wrong, message):
    with pytest.raises(UserError, match=message):
        digits(settings={**PLAIN, "joint": wrong}, labels_only=0.1)


def test_images_without_labels_need_labels_that_are_missing(digits, photos):
    with pytest.raises(UserError, match="all images have labels; give `labels_only`"):
        digits(settings={**PLAIN, "joint": {"ratio": 3}})


def test_the_number_of_images_without_labels_is_planned_from_those_there_are():
    summary = DataSummary(images=100, classes=10, side=32, channels=3, imbalance=1.0)
    ratios = [choose_joint(summary, labelled).ratio for labelled in (0.01, 0.4, 0.5, 0.9, 1.0)]
    assert ratios == [3, 2, 1, 0, 0]  # batches of 32: 11 others do not fill one
    assert choose_joint(summary, 0.4, batch=80).ratio == 1


@pytest.mark.parametrize(
    ("affordable", "requested", "ratio", "start"),
    [
        (2_000_000, {}, 3, 0.3),
        (850_000, {}, 3, 0.4),
        (600_001, {}, 3, 0.5),
        (500_000, {}, 0, 0.3),  # labelled images alone learn more
        (500_000, {"ratio": 3}, 3, 0.5),
        (850_000, {"start": 0.3}, 3, 0.3),
    ],
)
def test_images_without_labels_join_as_the_time_allows(affordable, requested, ratio, start):
    config = plan_joint(JointConfig(), 4500, affordable, requested)
    assert config == JointConfig(ratio=ratio, start=start)


def test_a_handful_of_labelled_images_are_soon_known():
    assert plan_joint(JointConfig(), 45, 60_000, {}).ratio == 3
    assert plan_joint(JointConfig(), 45, 50_000, {}).ratio == 0


@pytest.mark.parametrize("minutes", [10, 40])
def test_a_short_run_with_few_labels_ignores_the_other_images(minutes, monkeypatch):
    """The set is CIFAR-10, the core a slow one."""
    monkeypatch.setattr(auto, "training_rate", lambda device, processes: auto.CPU_RATE)
    monkeypatch.setattr("vitrail.run.design.measure_training_speed", lambda vit: 425.0)
    summary = DataSummary(images=4508, classes=10, side=32, channels=3, imbalance=1.0)
    monkeypatch.setattr("vitrail.run.design.labelled_fraction", lambda source, request: 0.1)
    settings = {"data": {"labelled": 0.1}}
    request = Request(data="cifar10", settings=settings, minutes=minutes)
    requested = requested_settings(request)
    choice = design_from_scratch(None, summary, request, requested, torch.device("cpu"), 1)
    joint = choice.settings.get("joint")
    text = "\n".join(choice.reasons)
    if minutes == 10:
        assert joint is None and "images without labels are not used" in text
    else:
        assert joint["ratio"] == 3 and 0.3 < joint["start"] <= 0.5
        assert f"after {joint['start']:.0%} of the steps, 3 images without labels" in text


def test_the_speed_is_the_median_and_leaves_the_random_numbers_alone(monkeypatch):
    ticks = iter([0, 0.9, 1, 1.5, 2, 2.1, 3, 3.5])  # the median of 0.9, 0.5, 0.1 and 0.5 is 0.5
    monkeypatch.setattr("vitrail.run.speed.time.perf_counter", lambda: next(ticks))
    before = torch.get_rng_state()
    speed = measure_training_speed(preset("Pico/2", image=8, channels=1, classes=4))
    assert torch.equal(torch.get_rng_state(), before)
    assert speed == 64 / 0.5


def test_more_images_without_labels_than_there_are_is_one_line(digits):
    settings = {**JOINT, "train": {**JOINT["train"], "batch": 64}, "joint": {"ratio": 30}}
    with pytest.raises(UserError, match=r"there are 1,412; set `joint.ratio=22` or lower"):
        digits(settings=settings, labels_only=0.1)


def test_the_remaining_time_counts_steps_with_images_without_labels_as_several():
    recipe = Recipe(train=TrainConfig(steps=100), joint=JointConfig(ratio=3), preprocess=GREY)
    assert [work_until(recipe, step) for step in (0, 30, 100)] == [0, 30, 100 + 70 * 4]
    alone = replace(recipe, joint=replace(recipe.joint, ratio=0))
    assert work_until(alone, 100) == work_until(replace(recipe, joint=None), 100) == 100
