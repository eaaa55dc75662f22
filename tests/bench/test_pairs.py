"""Paired trainings: jobs that are not repeated, ideas of the tournament, and the guard sets."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from bench import guard, ideas, tournament
from bench.guard import GuardSettings
from bench.ideas import IDEAS
from bench.pairs import Job, available_cores, format_difference, paired_difference, run_jobs
from bench.tournament import TournamentSettings
from bench.trial import Trial, choose_settings, expected_steps, run_trial
from vitrail.data import augment
from vitrail.data.open import open_data
from vitrail.errors import UserError
from vitrail.model.attention import Attention
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.training import loop, optim
from vitrail.training.config import TrainConfig


@pytest.fixture
def patched(monkeypatch):
    """Undoes what the ideas patch."""
    for module, name in (
        (augment, "sample_uniforms"),
        (optim, "MOMENTUM"),
        (optim.Muon, "step"),
        (optim, "group_parameters"),
        (loop, "train_steps"),
        (loop, "patches_to_keep"),
        (optim, "orthogonalize_all"),
        (optim, "LARGE"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))


def test_the_difference_of_pairs_has_a_standard_error():
    assert paired_difference([0.5, 0.6, 0.7], [0.6, 0.7, 0.8]) == pytest.approx((0.1, 0))
    mean, error = paired_difference([0.5, 0.6], [0.5, 0.64])
    assert (mean, error) == pytest.approx((0.02, 0.02))
    assert paired_difference([0.5], [0.6])[1] == math.inf


def test_only_a_difference_above_its_error_is_a_verdict():
    assert format_difference(0.02, 0.01) == ["+2.00 ± 1.00", "better"]
    assert format_difference(-0.02, 0.01) == ["-2.00 ± 1.00", "worse"]
    assert format_difference(0.01, 0.02) == ["+1.00 ± 2.00", "undecided"]
    assert format_difference(0.5, math.inf) == ["+50.00", "undecided"]


def test_a_job_is_run_once_and_its_failure_names_the_log(tmp_path):
    source, result = tmp_path / "source.json", tmp_path / "result.json"
    source.write_text('{"accuracy": 0.5}')
    command = ("json.tool", str(source), str(result))
    job = Job(path=result, log=tmp_path / "logs" / "job.log", command=command)
    assert run_jobs([job], 1) == [{"accuracy": 0.5}]
    source.unlink()
    assert run_jobs([job], 1) == [{"accuracy": 0.5}]
    result.unlink()
    with pytest.raises(UserError, match=r"exit code \d; see .*job\.log"):
        run_jobs([job], 1)
    with pytest.raises(UserError, match="lower `jobs`"):
        run_jobs([job], 1000)


def test_jobs_at_the_same_time_run_on_different_cores(tmp_path, monkeypatch):
    """Each waits for the other, so that both run at the same time, and prints its cores."""
    if len(available_cores()) < 2:
        pytest.skip("needs two cores")
    path = tmp_path / "report_cores.py"
    path.write_text(
        "import json, os, pathlib, sys, time\n"
        "mine, other = map(pathlib.Path, sys.argv[1:])\n"
        "threads = os.environ['OMP_NUM_THREADS']\n"
        "mine.write_text(json.dumps([sorted(os.sched_getaffinity(0)), threads]))\n"
        "while not other.exists():\n    time.sleep(0.05)\n"
    )
    jobs = [
        Job(
            path=tmp_path / f"{mine}.json",
            log=tmp_path / f"{mine}.log",
            command=(
                "report_cores",
                str(tmp_path / f"{mine}.json"),
                str(tmp_path / f"{other}.json"),
            ),
            checkout=tmp_path,
        )
        for mine, other in ("ab", "ba")
    ]
    first, second = run_jobs(jobs, 2)
    assert first != second and {len(first[0]), len(second[0])} == {1}
    assert first[1] == second[1] == "1"


def test_alternating_flips_flip_every_image_in_every_second_epoch(patched):
    IDEAS["alternating-flips"].patch()
    items = np.arange(100)
    flipped = [augment.sample_uniforms(0, epoch, items)["flip"] < 0.5 for epoch in range(4)]
    np.testing.assert_array_equal(flipped[0], flipped[2])
    np.testing.assert_array_equal(flipped[0], ~flipped[1])
    assert 20 < flipped[0].sum() < 80


def test_momentum_rises_to_its_usual_value(patched, monkeypatch):
    monkeypatch.setattr(ideas, "MOMENTUM_STEPS", 2)
    usual = optim.MOMENTUM
    IDEAS["momentum-warm-up"].patch()
    model = nn.Linear(2, 2)
    config = TrainConfig(optimizer="muon")
    optimizer = optim.build_optimizer(model, config, matrices={"weight": 1})
    values = []
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        values.append(optim.MOMENTUM)
    assert values == pytest.approx([0.85, 0.9, usual, usual])


def test_only_vectors_get_another_learning_rate(patched):
    IDEAS["vectors-x4"].patch()
    config = TrainConfig(optimizer="muon")
    optimizer = optim.build_optimizer(nn.Linear(2, 2), config, matrices={"weight": 1})
    assert {bool(g["matrices"]): g["scale"] for g in optimizer.param_groups} == {True: 1, False: 4}


def test_mimetic_attention_prefers_a_token_like_the_query():
    torch.manual_seed(0)
    attention = Attention(32, 2)
    with torch.no_grad():
        ideas.mimic_trained_attention(attention)
        q, k, v = attention.qkv.weight.chunk(3)
        agreement = torch.stack([q[rows].T @ k[rows] for rows in torch.arange(32).split(16)])
        assert (agreement.diagonal(dim1=1, dim2=2).mean(dim=1) > 0.2).all()
        assert (attention.proj.weight @ v).diagonal().mean() < -0.3


def test_branches_of_zeros_and_identity_convolutions_pass_their_input_through():
    block = ViT(ViTConfig(width=16, heads=2, depth=1, image=8, patch=4)).blocks[0]
    conv, x = nn.Conv2d(8, 12, 3, padding=1, bias=False), torch.randn(2, 8, 4, 4)
    with torch.no_grad():
        for module in block.modules():
            ideas.zero_branch(module)
        ideas.start_as_identity(conv)
        torch.testing.assert_close(conv(x)[:, :8], x)
        tokens = torch.randn(2, 5, 16)
        torch.testing.assert_close(block(tokens), tokens, atol=1e-3, rtol=0)  # small MLP biases


def test_normalised_neurons_get_updates_of_equal_size(patched):
    torch.manual_seed(0)
    update = torch.randn(8, 32) * torch.arange(1, 9)[:, None]
    usual = optim.orthogonalize_all([update], 1)[0][0]
    IDEAS["normuon"].patch()
    found = optim.orthogonalize_all([update], 1)[0][0]
    torch.testing.assert_close(found.norm(), usual.norm())
    assert found.norm(dim=1).std() < 0.2 * usual.norm(dim=1).std()


def test_newton_schulz_stays_in_float32(patched):
    torch.manual_seed(0)
    x = torch.randn(1, 128, 128)
    exact = optim.orthogonalize(x)
    assert not torch.equal(optim.orthogonalize(x, torch.bfloat16), exact)
    IDEAS["float32-muon"].patch()
    assert torch.equal(optim.orthogonalize(x, torch.bfloat16), exact)


def test_the_first_batches_are_small():
    batches = [(torch.zeros(1, 3, 32, 32), torch.zeros(1))] * 4
    changed = ideas.shrink_first_batches(None, batches, 4)
    assert [images.shape[-1] for images, _ in changed] == [24, 24, 32, 32]


def test_first_batches_have_half_of_the_images():
    batches = [(torch.zeros(4, 3, 8, 8), torch.zeros(4))] * 10
    changed = list(ideas.halve_first_batches(None, batches, 10))
    assert [len(images) for images, _ in changed] == [2] * 3 + [4] * 7
    assert [len(targets) for _, targets in changed] == [2] * 3 + [4] * 7


def test_late_batches_hold_the_images_with_the_largest_loss():
    learner = SimpleNamespace(model=nn.Flatten(), autocast=nullcontext)
    logits = torch.tensor([[9.0, 0], [0, 9], [9, 0], [0, 9]])  # the first two are right
    batches = [(logits, torch.tensor([0, 1, 1, 0]))] * 5
    *early, last, end = ideas.skip_easy_images(learner, batches, 5)
    assert [len(images) for images, _ in early] == [4, 4, 4]
    for images, targets in (last, end):
        assert sorted(zip(images.argmax(dim=1).tolist(), targets.tolist(), strict=True)) == [
            (0, 1),
            (1, 0),
        ]


def test_patches_return_in_stages(patched):
    IDEAS["patch-stages"].patch()
    kept = [loop.patches_to_keep(step, 100, 64, None) for step in (0, 34, 35, 69, 70, 99)]
    assert kept == [16, 16, 32, 32, 64, 64]


def test_the_plain_vit_can_be_chosen_for_a_tournament():
    source = open_data("digits", progress=False)
    chosen = choose_settings(source, 5, plain=True)
    assert (chosen["model"], chosen["vit"]["stem"]) == ("Nano/4", "patch")
    assert (chosen["vit"]["positions"], chosen["vit"]["pool"]) == ("sincos", "avg")


@pytest.mark.slow
def test_a_trial_trains_the_changed_recipe_and_times_its_steps(patched, tmp_path):
    job = Trial(data="digits", idea="smoothing", seed=1, steps=2, recipe=1)
    found = run_trial(job, tmp_path / "run")
    assert (found["idea"], found["seed"], found["steps"]) == ("smoothing", 1, 2)
    assert 0 <= found["accuracy"] <= 1 and found["step_seconds"] > 0
    assert "smoothing = 0.2" in (tmp_path / "run" / "recipe.toml").read_text()


def test_steps_follow_from_minutes_and_not_from_the_clock():
    source = open_data("digits", progress=False)
    once, twice = (expected_steps(source, 1, minutes) for minutes in (1, 2))
    assert 1 < once == pytest.approx(twice / 2, abs=1)


def test_a_tournament_compares_pairs_at_equal_work(monkeypatch, tmp_path):
    """float32 is twice as fast here, and gets twice the steps."""
    accuracies = {"default": [0.7, 0.72], "smoothing": [0.71, 0.73], "float32": [0.7, 0.71]}
    trained = []

    def run_jobs(jobs, parallel):
        trials = [Trial(**json.loads(job.command[1])) for job in jobs]
        trained.extend(trials)
        return [
            {
                "idea": one.idea,
                "steps": one.steps,
                "accuracy": accuracies[one.idea][one.seed],
                "step_seconds": 0.5 if one.idea == "float32" else 1.0,
                "commit": "abc",
            }
            for one in trials
        ]

    monkeypatch.setattr(tournament, "run_jobs", run_jobs)
    settings = TournamentSettings(
        ideas=("smoothing", "float32"), data="digits", seeds=2, steps=100, work=tmp_path
    )
    page = tournament.run(settings)
    assert "| default | 100 | 71.0% |  |  |" in page
    assert "| smoothing | 100 | 72.0% | +1.00 ± 0.00 | better |" in page
    assert "| float32 | 200 | 70.5% | -0.50 ± 0.50 | undecided |" in page
    assert page.endswith("commit abc")
    assert len({one.file for one in trained}) == len(trained)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ideas": ("faster",)}, "unknown idea 'faster'; choose from smoothing"),
        ({"ideas": ("smoothing",), "seeds": 1}, "at least 2 seeds"),
    ],
)
def test_tournaments_without_a_result_are_rejected(wrong, message):
    with pytest.raises(UserError, match=message):
        TournamentSettings(**wrong)


def test_guard_sets_are_written_once_with_their_splits(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "NUMBERS", 1000)
    monkeypatch.setattr(guard, "TESTED", 20)
    settings = GuardSettings(sets=("digits",), work=tmp_path)
    folder = guard.prepare_set("numbers", settings)
    source = open_data(folder, progress=False)
    assert (np.asarray(source.splits) == "test").sum() == 20 and len(source) == 1020
    assert len(source.classes) == 100
    monkeypatch.setattr(guard, "open_data", None)  # is not called again
    assert guard.prepare_set("numbers", settings) == folder
    assert guard.prepare_set("digits", settings) == "digits"


def test_the_guard_compares_two_checkouts_or_settings(tmp_path, monkeypatch):
    def run_jobs(jobs, parallel):
        changed = [float("--train.smoothing" in job.command) for job in jobs]
        return [{"test": {"accuracy": 0.9 + 0.05 * one}} for one in changed]

    monkeypatch.setattr(guard, "run_jobs", run_jobs)
    settings = GuardSettings(
        sets=("digits",), seeds=2, work=tmp_path, change="--train.smoothing 0.2"
    )
    assert "| digits | 90.0% | 95.0% | +5.00 ± 0.00 | better |" in guard.run(settings)
    assert "| digits | 90.0% |" in guard.run(GuardSettings(sets=("digits",), work=tmp_path))


def test_an_interrupted_guard_training_starts_again(tmp_path):
    settings = GuardSettings(sets=("digits",), work=tmp_path)
    job = guard.make_job(("digits", 0, "after"), "digits", guard.ROOT, [], settings)
    (job.path.parent / "checkpoints").mkdir(parents=True)
    assert guard.make_job(("digits", 0, "after"), "digits", guard.ROOT, [], settings) == job
    assert not job.path.parent.exists()
    job.path.parent.mkdir()
    job.path.write_text("{}")
    guard.make_job(("digits", 0, "after"), "digits", guard.ROOT, [], settings)
    assert job.path.is_file()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sets": ("cats",)}, "unknown set 'cats'"),
        ({"sets": ("photos",)}, "needs a folder: give `photos`"),
        ({"seeds": 0, "sets": ("few",)}, "at least 1"),
        ({"before": "/nowhere", "sets": ("few",)}, "not a checkout"),
    ],
)
def test_a_guard_that_measures_nothing_is_rejected(wrong, message, tmp_path):
    if "before" in wrong:
        wrong = {**wrong, "before": tmp_path}
    with pytest.raises(UserError, match=message):
        GuardSettings(**wrong)
