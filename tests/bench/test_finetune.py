"""The bench of fine-tuning: which entries run, and its table."""

import json

from bench import finetune
from bench.finetune import FinetuneEntry, FinetuneSettings, is_hopeless, render_finetune

SCORES = {None: (0.99, 0.99), 1e-4: (0.9, 0.94), 3e-4: (0.95, 0.96), 1e-3: (0.4, 0.97)}


def result(minutes, seed, lr):
    contender = "timm" if lr else "vitrail"
    val, test = SCORES[lr]
    return {
        **{"contender": contender, "minutes": minutes, "seed": seed, "lr": lr},
        **{"val": val, "test": test},
    }


def entry(minutes, seed, lr):
    return FinetuneEntry(contender="timm", minutes=minutes, seed=seed, lr=lr)


def test_a_rate_far_behind_with_the_first_seed_is_not_tried_again_at_those_minutes():
    first = [result(2.0, 0, lr) for lr in SCORES]
    assert is_hopeless(entry(2.0, 1, 1e-3), first)
    assert not is_hopeless(entry(2.0, 1, 1e-4), first)
    assert not is_hopeless(entry(2.0, 0, 1e-3), first)
    assert not is_hopeless(entry(5.0, 1, 1e-3), first)


def test_the_table_has_the_rate_that_is_best_on_validation_data():
    entries = [result(2.0, seed, lr) for seed in range(3) for lr in SCORES]
    table = render_finetune({"data": "pets-8", "entries": entries, "steps": []})
    assert "| 2 | 99.0% (3 seeds) | 96.0% (0.0003, 3 seeds) | 0.25 |" in table


def test_finished_entries_are_not_repeated(tmp_path, monkeypatch):
    made = []

    def train(settings, entry, path):
        made.append(str(entry))
        val, test = SCORES[entry.lr]
        path.write_text(json.dumps({"val": val, "test": test}))

    for name, fake in (("train_ours", train), ("train_timm", train), ("measure_tune", print)):
        monkeypatch.setattr(finetune, name, fake)
    settings = FinetuneSettings(clock=(2.0,), tries=2, finished=tmp_path)
    found = finetune.run(settings, lambda *_: None)["entries"]
    assert len(found) == len(made) == 7  # 0.001 once
    assert finetune.run(settings, lambda *_: None)["entries"] == found and len(made) == 7
