"""`vitrail pretrain`: what it prints, and what other verbs make of its run."""

import json

import pytest

from tests.cli.conftest import FLAGS, call

SHORT = [flag if flag != "120" else "20" for flag in FLAGS]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    from vitrail.cli.main import main

    path = tmp_path_factory.mktemp("runs") / "digits-pre"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.run.plan.TRIAL", 0.0)
        patch.setattr("vitrail.heads.logistic.ITERATIONS", 5)
        main(["pretrain", "digits", *SHORT, "--out", str(path), "--json"])
    return path


def test_the_results_are_one_document_or_a_few_lines(backbone, capsys):
    code, out, _ = call(capsys, "resume", backbone, "--json")
    document = json.loads(out)
    assert code == 0 and document["method"] == "masked" and document["steps"] == 20
    assert document["probe"].keys() >= {"knn", "linear", "interval"}
    _, out, _ = call(capsys, "resume", backbone)
    assert "linear probe" in out and "random weights" in out and "--from" in out
    low, high = document["probe"]["knn_interval"]
    assert f"({low:.1%} to {high:.1%}); random weights" in out and " %" not in out


def test_a_pretraining_cannot_be_evaluated_and_says_what_can_be_done(backbone, capsys):
    code, out, err = call(capsys, "evaluate", backbone, "digits")
    assert (
        f"error: {backbone}, from a pretraining run, has no classification head" in f"{code}{err}"
    )
    assert f"`vitrail train DATA --from {backbone}`" in f"{code}{err}" and not out


def test_a_flag_of_the_other_verb_is_named(backbone, capsys):
    code, _, err = call(capsys, "train", "digits", "--recipe", backbone / "recipe.toml")
    assert "repeat it with `vitrail pretrain`" in f"{code}{err}"
