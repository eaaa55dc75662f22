"""Learning from a teacher: whose answers reach which image, and what is refused."""

import math
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import vitrail
from tests.run.conftest import SMALL, tensors
from tests.run.test_pretrain import equal
from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.pretraining.teacher import (
    FeatureStudent,
    answer_loss,
    cosine_distance,
    feature_copying,
    label_loss,
    region_similarities,
    similarity_distance,
)
from vitrail.run.drive import Stopped
from vitrail.run.recipe import read_recipe
from vitrail.run.teacher import Teacher, ask, compact, convert_images, load_teacher
from vitrail.zoo.file import save_model

FLIPS = {**SMALL, "data": {"workers": 0, "augment": {"flip": 0.5, "shift": 0.1}}}
DIGITS = [str(digit) for digit in range(10)]
VIEW = {"size": 8, "channels": 1, "mean": (0.0,), "std": (1.0,)}


def recognise(images):
    """Logits that depend on the left half of the image, so that a mirror image has others."""
    left = images[:, :, :, :4].mean(dim=(1, 2, 3))
    return torch.stack([left * number for number in range(10)], dim=1)


@pytest.fixture
def taught(tmp_path, monkeypatch, digits):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))

    def train(out="run", teacher=None, settings=FLIPS, **arguments):
        teacher = teacher or Teacher(model=recognise, preprocess=VIEW, classes=DIGITS[::-1])
        return digits(out, settings, teacher=teacher, **arguments)

    return train


def test_each_image_gets_the_answer_to_itself_or_to_its_mirror_image(taught, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "vitrail.pretraining.teacher.answer_loss",
        lambda outputs, targets, *others, **named: (
            seen.append(targets.detach()),
            answer_loss(outputs, targets, *others, **named),
        )[1],
    )
    from vitrail.data.loader import Loader

    batches, training = [], Loader.training

    def watch(self, *arguments, **named):
        for batch in training(self, *arguments, **named):
            batches.append((self.source, batch))
            yield batch

    monkeypatch.setattr(Loader, "training", watch)
    taught(settings={**FLIPS, "train": {**FLIPS["train"], "steps": 2}})
    (source, batch), targets = batches[-1], seen[-1]
    assert batch.mirrored.any() and not batch.mirrored.all()
    for row in range(8):
        pixels = torch.from_numpy(source[int(batch.items[row])].content).permute(2, 0, 1) / 255
        image = pixels.flip(-1) if batch.mirrored[row] else pixels
        expected = recognise(image[None])[0].flip(0)  # the teacher has the classes backwards
        torch.testing.assert_close(targets[row, 10:], expected, atol=2e-3, rtol=2e-3)
        assert int(targets[row, :10].argmax()) == int(source.labels[batch.items[row]])


def test_the_loss_is_half_cross_entropy_and_half_softened_kl():
    torch.manual_seed(0)
    logits, answers, labels = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    targets = torch.cat([F.one_hot(labels, 3).float(), answers], dim=1)
    p, q = ((x / 4).softmax(dim=1) for x in (answers, logits))
    kl = 16 * (p * (p / q).log()).sum()
    expected = 0.5 * F.cross_entropy(logits, labels, reduction="sum") + 0.5 * kl
    loss = answer_loss(logits, targets, 0.0, None, classes=3, temperature=4.0)
    torch.testing.assert_close(loss, expected)


def test_images_without_a_label_have_no_cross_entropy():
    logits, targets = torch.randn(3, 4), torch.zeros(3, 4)
    targets[1, 2] = 1
    expected = F.cross_entropy(logits[1:2], torch.tensor([2]), reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(label_loss(logits, targets, 0.1, None), expected)


def test_a_run_with_a_teacher_resumes_to_the_bit_without_it(taught, stop_at, monkeypatch, tmp_path):
    whole = taught("whole")
    assert read_recipe(whole.folder / "recipe.toml")["teacher"]["weights"].startswith("callable:")
    with monkeypatch.context() as patch:
        stop_at(7)
        with pytest.raises(Stopped):
            taught("part")
        patch.undo()
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    part = vitrail.resume(tmp_path / "part", report=False, quiet=True)
    assert equal(tensors(whole.folder), tensors(part.folder))


def test_a_teacher_that_knows_the_labels_is_believed(taught, digits):
    source = vitrail.open_data("digits")
    table = {source[i].content.tobytes(): int(source.labels[i]) for i in range(len(source))}

    def cheat(images):
        pixels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        known = [table.get(one.numpy().tobytes(), 0) for one in pixels]
        return 9.0 * F.one_hot(torch.tensor(known), 10).float()

    settings = {**FLIPS, "data": {"workers": 0}, "train": {**FLIPS["train"], "steps": 60}}
    run = taught(teacher=Teacher(model=cheat, preprocess=VIEW, classes=DIGITS), settings=settings)
    assert run.metrics["val"]["accuracy"] > 0.3
    stored = read_recipe(run.folder / "recipe.toml")["teacher"]
    assert 0 < stored["temperature"] < 40 and stored["features"] == 0


def test_a_teacher_with_other_classes_teaches_features_that_are_thrown_away(taught, digits):
    def features(images):
        return images.flatten(1)[:, :12], images.unfold(2, 2, 2).flatten(1, 2).mT

    for out in ("first", "from the cache"):
        run = taught(out, teacher=Teacher(model=features, preprocess=VIEW))
        stored = read_recipe(run.folder / "recipe.toml")["teacher"]
        assert stored["features"] == 12 and stored["regions"] == 4
    assert not [name for name in run.classifier.model.state_dict() if "projection" in name]


def test_a_run_teaches_another_one(taught, digits):
    teacher = digits("teacher", {**SMALL, "data": {"workers": 0}})
    run = taught(teacher=str(teacher.folder))
    stored = read_recipe(run.folder / "recipe.toml")["teacher"]
    assert stored["weights"] == str(teacher.folder) and stored["features"] == 0


def test_a_teacher_is_copied_without_labels(taught, digits, tmp_path):
    teacher = digits("teacher", {**SMALL, "data": {"workers": 0}})
    run = vitrail.pretrain(
        "digits",
        teacher=teacher.folder,
        settings={**SMALL, "data": {"workers": 0}},
        out=tmp_path / "pre",
        report=False,
        quiet=True,
    )
    assert run.metrics["method"] == "teacher" and 0 < run.metrics["loss"] < 1
    stored = read_recipe(run.folder / "recipe.toml")["teacher"]
    assert stored["features"] == 16 and stored["regions"] == 4
    pooled = {"train": {"steps": 2}, "data": {"workers": 0}, "vit": {**SMALL["vit"], "pool": "map"}}
    vitrail.pretrain(
        "digits", teacher=teacher.folder, settings=pooled, out=tmp_path / "map", quiet=True
    )
    views = {"pretrain": {"method": "views"}}
    for change in ({"method": "masked"}, {"settings": views}):
        with pytest.raises(UserError, match="a teacher is a method of its own"):
            vitrail.pretrain("digits", teacher=teacher.folder, **change)
    for change in ({"method": "teacher"}, {"settings": {"pretrain": {"method": "teacher"}}}):
        with pytest.raises(UserError, match="needs a teacher; give `teacher`"):
            vitrail.pretrain("digits", **change)


def test_a_named_teacher_from_python_is_not_a_path(taught, stop_at, tmp_path, capsys):
    teacher = Teacher(model=recognise, preprocess=VIEW, classes=DIGITS, name="resnet50")
    run = taught(teacher=teacher)
    assert read_recipe(run.folder / "recipe.toml")["teacher"]["weights"].startswith("callable:")
    vitrail.train("digits", teacher=teacher, settings=FLIPS, out=tmp_path / "loud", report=False)
    assert "teacher resnet50: predictions at temperature" in capsys.readouterr().err


def test_a_teacher_in_training_mode_is_asked_in_evaluation_mode_and_left_as_it_was():
    norm = torch.nn.BatchNorm1d(64)
    model = torch.nn.Sequential(torch.nn.Flatten(), norm, torch.nn.Dropout(0.5))
    teacher = Teacher(model=model, preprocess=VIEW)
    answers = [ask(teacher, torch.ones(4, 1, 8, 8))[0] for _ in range(2)]
    assert torch.equal(*answers) and model.training and norm.training
    assert float(norm.running_mean.abs().max()) == 0.0


def test_large_answers_are_stored_as_they_are():
    small = torch.randn(20, 2, 10)
    assert compact(small).dtype == torch.float16
    for large in (1e6 + 1e5 * small, 5000 + small):
        assert torch.equal(compact(large), large)


def test_a_teacher_with_large_answers_teaches(taught):
    def features(images):
        return 1e6 + 1e5 * images.flatten(1)[:, :12]

    settings = {**FLIPS, "train": {**FLIPS["train"], "steps": 3}}
    assert taught(teacher=Teacher(model=features, preprocess=VIEW), settings=settings).metrics


def test_images_without_labels_are_said_to_be_unused(taught, digits):
    settings = {"train": {"steps": 1}, "data": {"workers": 0}}
    start = digits("start", {**SMALL, "train": {"steps": 1, "batch": 64}})
    runs = {
        "a teacher teaches labelled": taught(labels_only=0.5, settings={**SMALL, **settings}),
        "a training from weights learns": digits(
            "tuned", settings, weights=start.folder, labels_only=0.5
        ),
        "only with joint.ratio above 0": digits(
            "scratch", {**SMALL, **settings}, weights="none", labels_only=0.5
        ),
    }
    for reason, run in runs.items():
        text = (run.folder / "recipe.toml").read_text()
        assert f"few labels: images without labels are not used: {reason}" in text.replace(
            "a training from scratch uses them ", ""
        )


def test_a_model_of_timm_teaches_its_features(taught, monkeypatch):
    model = torch.nn.AdaptiveAvgPool2d(2)
    model.forward_features = model.forward
    model.forward_head = lambda x, pre_logits: x.flatten(1)
    config = {"input_size": (3, 16, 16), "crop_pct": 0.9, "interpolation": "bicubic"}
    config |= {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    timm, data = ModuleType("timm"), ModuleType("timm.data")
    timm.create_model = lambda name, **settings: model
    data.resolve_data_config = lambda model: config
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.data", data)
    run = taught(teacher="timm:resnet10t", settings={**FLIPS, "train": {"steps": 2, "batch": 64}})
    stored = read_recipe(run.folder / "recipe.toml")["teacher"]
    assert stored["weights"] == "timm:resnet10t"
    assert stored["features"] == 12 and stored["regions"] == 4
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match="timm is not installed"):
        taught("other", teacher="timm:resnet10t")


def test_every_parameter_of_a_feature_student_learns():
    vit = vitrail.ViTConfig(image=8, patch=2, channels=1, width=16, depth=1, heads=1, classes=3)
    student = FeatureStudent(vitrail.ViT(vit), 5, regions=2)
    outputs = student(torch.rand(2, 1, 8, 8))
    assert outputs.shape == (2, 3 + 5 + 16)
    outputs.square().sum().backward()
    assert not [name for name, p in student.named_parameters() if p.grad is None]


def test_regions_are_compared_whatever_the_patches():
    torch.manual_seed(0)
    coarse = torch.randn(2, 16, 7)  # 4 x 4 patches, and 8 x 8 that repeat them
    fine = coarse.unflatten(1, (4, 4)).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)
    theirs = region_similarities(coarse, (4, 4), 4)
    assert theirs.shape == (2, 256)
    torch.testing.assert_close(region_similarities(fine, (8, 8), 4), theirs)
    keep = torch.randperm(64)[None, :40].expand(2, -1)  # some regions lose all patches, or none
    few = region_similarities(fine[:, keep[0]], (8, 8), 4, keep)
    assert float(similarity_distance(few, theirs).max()) < 1e-6
    other = region_similarities(coarse.flip(1), (4, 4), 4)
    assert float(similarity_distance(other, theirs).min()) > 0.1


def test_the_similarities_of_the_tokens_are_learned():
    torch.manual_seed(0)
    vit = vitrail.ViTConfig(image=8, patch=2, channels=1, width=16, depth=1, heads=1, head="none")
    student, images = FeatureStudent(vitrail.ViT(vit), 5, regions=2), torch.rand(4, 1, 8, 8)
    features = torch.randn(4, 5)
    tokens = region_similarities(torch.randn(4, 16, 3), (4, 4), 2)
    loss = feature_copying(2, 16, 5)
    targets = torch.cat([torch.zeros(4, 2), features, tokens], dim=1)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    with torch.no_grad():
        before = similarity_distance(student(images)[:, 21:], tokens).sum()
    for _ in range(30):
        optimizer.zero_grad()
        loss(student(images), targets, 0.0, None).backward()
        optimizer.step()
    with torch.no_grad():
        outputs = student(images)
    assert similarity_distance(outputs[:, 21:], tokens).sum() < 0.5 * before
    assert cosine_distance(outputs[:, 16:21], features).mean() < 0.5


def test_images_are_converted_for_a_teacher_that_sees_the_same_view():
    ours = Preprocess(size=8, mean=(0.2,), std=(0.5,), channels=3)
    theirs = Preprocess(size=16, mean=(0.5,), std=(0.25,), channels=3)
    images = torch.full((1, 3, 8, 8), (0.7 - 0.2) / 0.5)
    converted = convert_images(images, ours, theirs)
    assert converted.shape == (1, 3, 16, 16)
    torch.testing.assert_close(converted, torch.full_like(converted, (0.7 - 0.5) / 0.25))
    red = torch.tensor([1.0, 0.0, 0.0])[None, :, None, None].expand(1, 3, 8, 8)
    plain = {"size": 8, "mean": (0.0,), "std": (1.0,)}
    grey = convert_images(red, Preprocess(**plain), Preprocess(**plain, channels=1))
    torch.testing.assert_close(grey, torch.full((1, 1, 8, 8), 0.299))  # as the loader's


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": SMALL}, "data.augment.mixup changes images"),
        (
            {"settings": {**SMALL, "data": {"augment": {"scale": 0.5}}}},
            "data.augment.scale changes images",
        ),
        (
            {"teacher": Teacher(model=recognise, preprocess=VIEW, classes=["a"] * 10)},
            "the teacher has 10 classes, without '0', the data 10; give one with the same classes",
        ),
        (
            {"teacher": Teacher(model=lambda x: x, preprocess=VIEW)},
            r"the teacher returned \(64, 1, 8, 8\) for 64 images",
        ),
        (
            {"teacher": Teacher(model=lambda x: (x.flatten(1), x.flatten(1)), preprocess=VIEW)},
            r"the teacher returned \(64, 64\) as feature maps of 64 images",
        ),
        (
            {"teacher": Teacher(model=lambda x: recognise(x) * math.inf, preprocess=VIEW)},
            "the teacher returned NaN or infinity",
        ),
        ({"teacher": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_a_teacher_that_cannot_teach_is_one_line(taught, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        taught(**change)
    assert not (tmp_path / "run").exists()


def test_the_requested_temperature_wins(taught):
    run = taught(settings={**FLIPS, "teacher": {"temperature": 2.5}})
    assert read_recipe(run.folder / "recipe.toml")["teacher"]["temperature"] == 2.5


def test_a_recipe_with_a_teacher_given_in_python_uses_its_cached_answers(
    taught, digits, tmp_path, monkeypatch
):
    first = taught("first")
    recipe = first.folder / "recipe.toml"
    again = digits("again", {}, recipe=recipe)
    assert equal(tensors(first.folder), tensors(again.folder))
    other = vitrail.open_data("digits")
    other.splits[:] = np.roll(other.splits, 3)
    with pytest.raises(UserError, match="has predicted other images; give it in Python"):
        vitrail.train(other, recipe=recipe, out=tmp_path / "other", quiet=True)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="are not in the cache folder; start a new run in Python"):
        digits("gone", {}, recipe=recipe)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": {**FLIPS, "teacher": {"temperature": 2.0}}}, "set teacher.weights, or give"),
        (
            {"settings": {**FLIPS, "joint": {"ratio": 3}}, "labels_only": 0.1, "teacher": "x"},
            "set `joint.ratio=0`, or omit `teacher`",
        ),
    ],
)
def test_settings_that_exclude_a_teacher_or_lack_one_are_one_line(digits, arguments, message):
    with pytest.raises(UserError, match=message):
        digits(**arguments)


def test_frozen_blocks_refuse_features_before_the_teacher_is_asked(taught, digits, tmp_path):
    start = digits("start", {**SMALL, "data": {"workers": 0}})
    asked = []
    teacher = Teacher(model=lambda x: asked.append(x) or x.flatten(1), preprocess=VIEW)
    with pytest.raises(UserError, match="which frozen blocks cannot learn; set `tune='all'`"):
        taught(teacher=teacher, weights=start.folder, tune="head", settings={})
    assert not asked and not (tmp_path / "run").exists()


def test_frozen_blocks_learn_from_cached_answers_on_a_fast_device(taught, digits, monkeypatch):
    """Their batches hold tokens, which the teacher cannot see; a CPU stands for a GPU."""
    start = digits("start", {**SMALL, "data": {"workers": 0}})
    monkeypatch.setattr("vitrail.run.teacher.SLOW_DEVICES", ())
    settings = {"train": {"steps": 3}, "data": {"workers": 0}}
    options = {"weights": start.folder, "tune": "head", "settings": settings}
    run = taught(teacher=str(start.folder), **options)
    assert run.metrics["steps"] == 3
    with pytest.raises(UserError, match="mixup changes images"):
        settings["data"] = {"augment": {"mixup": 0.5}}
        taught("mixed", teacher=str(start.folder), **options)


@pytest.mark.parametrize("features", [False, True])
def test_a_fast_device_asks_only_about_views_and_validation_images(
    taught, digits, monkeypatch, features
):
    teacher = digits("teacher", {**SMALL, "data": {"workers": 0}}).folder
    monkeypatch.setattr("vitrail.run.teacher.SLOW_DEVICES", ())
    if features:
        loaded = load_teacher(teacher, vitrail.open_data("digits"), True)
        monkeypatch.setattr("vitrail.run.teacher.load_teacher", lambda *arguments: loaded)

    def refuse(*arguments):
        raise AssertionError("the training images were answered in advance")

    monkeypatch.setattr("vitrail.run.teacher.compute_answers", refuse)
    run = taught(teacher=str(teacher), settings=SMALL)  # with mixup, which it sees
    stored = read_recipe(run.folder / "recipe.toml")["teacher"]
    assert (stored["features"], stored["regions"]) == ((16, 4) if features else (0, 0))


@pytest.mark.parametrize("error", [OSError("no network\ntraceback"), ValueError("no weights")])
def test_a_model_of_timm_that_cannot_be_downloaded_is_one_line(taught, monkeypatch, error):
    timm, data = ModuleType("timm"), ModuleType("timm.data")

    def create(name, **settings):
        raise error

    timm.create_model = create
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "timm.data", data)
    with pytest.raises(UserError, match="check its name and the network") as caught:
        taught(teacher="timm:resnet10t")
    assert "\n" not in str(caught.value)


def test_a_teacher_with_any_number_of_labels_is_refused(taught, tmp_path):
    vit = vitrail.ViTConfig(image=8, patch=2, channels=1, width=16, depth=1, heads=1, classes=10)
    metadata = {"classes": DIGITS, "labels": "multi", "preprocess": VIEW}
    save_model(tmp_path / "multi.safetensors", vitrail.ViT(vit), metadata)
    with pytest.raises(UserError, match="any number of labels for an image; give one that"):
        taught(teacher=tmp_path / "multi.safetensors")
