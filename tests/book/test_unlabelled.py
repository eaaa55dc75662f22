"""The experiments of "Learning without labels": they run, and the stored results are theirs."""

from dataclasses import asdict

import pytest
import torch

from book import learning_figures, unlabelled, unlabelled_figures


@pytest.mark.parametrize("method", ["masked", "views", "agreement"])
def test_a_pretraining_is_the_same_twice(method, monkeypatch):
    monkeypatch.setattr(unlabelled, "probe", lambda backbone: {})  # seconds, and without randomness
    experiment = unlabelled.Pretraining(method=method, steps=2, batch=8)
    first, second = (unlabelled.run(experiment, seed=0, every=1) for _ in range(2))
    assert first == second and first["curves"]["step"] == [1, 2]


def test_fine_tuning_starts_from_the_pretrained_backbone(monkeypatch):
    started = {}
    monkeypatch.setattr(
        unlabelled.learning, "fit", lambda model, *rest: started.update(model.state_dict())
    )
    backbone = unlabelled.build(unlabelled.Pretraining(method="masked")).backbone
    unlabelled.fine_tune(backbone, labelled=30, seed=1)
    for name, tensor in backbone.state_dict().items():
        assert name.startswith("head.") or torch.equal(started[name], tensor), name


def test_stored_results_have_the_settings_of_the_script():
    stored = learning_figures.read("unlabelled")
    assert {title: one["settings"] for title, one in stored.items()} == {
        title: {**asdict(experiment), "labels": list(experiment.labels)}
        for title, experiment in unlabelled.EXPERIMENTS.items()
    }


def test_figures_are_drawn_from_the_results(tmp_path):
    drawn = unlabelled_figures.draw_figures(tmp_path)
    stored = {path.name for path in unlabelled_figures.FIGURES.iterdir()}
    assert {path.name for path in drawn} <= stored
