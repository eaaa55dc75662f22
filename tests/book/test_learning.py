"""The experiments of "How it learns": they run, and the stored results are those of the script."""

from dataclasses import asdict, replace

import pytest
import torch

from book import learning, learning_figures


@pytest.mark.parametrize(
    "change", [{}, {"optimizer": "sgd"}, {"optimizer": "muon"}, {"model": "convnet", "images": 30}]
)
def test_an_experiment_is_the_same_twice(change):
    experiment = replace(learning.ALL, steps=2, batch=8, **change)
    first, second = (learning.run(experiment, seed=0, every=1) for _ in range(2))
    assert first == second and first["step"] == [1, 2]


def test_without_positions_they_stay_zero():
    model = learning.build(replace(learning.ALL, positions=False))
    images, labels = learning.load_digits("train")
    few = replace(learning.ALL, positions=False, steps=2, batch=8)
    learning.fit(model, images, labels, few, lambda step, loss: None)
    assert not model.pos_embed.any()


def test_every_second_image_is_shifted_by_at_most_a_pixel():
    image = torch.full((1, 8, 8), -1.0)
    image[0, 4, 4] = 1.0
    torch.manual_seed(0)
    moved = learning.shift(image.expand(40, 1, 8, 8))
    places = moved[:, 0].flatten(1).argmax(dim=1)
    assert (places[::2] == 36).all() and (places[1::2] != 36).any()
    assert ((places // 8 - 4).abs() <= 1).all() and ((places % 8 - 4).abs() <= 1).all()


@pytest.mark.parametrize(
    ("name", "experiments"), [("tricks", learning.TRICKS), ("data", learning.HUNGER)]
)
def test_stored_results_have_the_settings_of_the_script(name, experiments):
    stored = learning_figures.read(name)
    assert {title: one["settings"] for title, one in stored.items()} == {
        title: asdict(experiment) for title, experiment in experiments.items()
    }


def test_stored_positions_have_the_settings_of_the_script():
    stored = learning_figures.read("positions")
    assert stored["settings"] == asdict(learning.POSITIONS)
    assert max(map(int, stored["snapshots"])) == learning.POSITIONS.steps


@pytest.mark.parametrize(
    ("change", "differs"),
    [({"weight_decay": 0.5}, True), ({"clip": 0.01}, True), ({"clip": 1e9}, False)],
)
def test_clipping_and_weight_decay_are_applied(change, differs):
    few = replace(learning.TRICKS["SGD"], clip=0.0, lr=0.5, warmup=0.0, steps=3, batch=8)
    plain, changed = (learning.run(one, seed=0, every=1) for one in (few, replace(few, **change)))
    assert (plain != changed) == differs


def test_muon_updates_the_matrices_of_the_blocks():
    optimizer = learning.choose_optimizer(
        model := learning.build(learning.ALL), learning.TRICKS["Muon"]
    )
    matrices = {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("matrices")
        for parameter in group["params"]
    }
    named = {name for name, parameter in model.named_parameters() if id(parameter) in matrices}
    assert len(named) == 4 * learning.SIZE["depth"]
    assert all(name.startswith("blocks.") and name.endswith(".weight") for name in named)


def test_figures_are_drawn_from_the_results(tmp_path):
    drawn = learning_figures.draw_figures(tmp_path)
    assert {path.name for path in drawn} <= {
        path.name for path in learning_figures.FIGURES.iterdir()
    }
