"""Stopped and resumed equals never stopped, bit for bit; and the ways in which it would not."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.training.tiny import PATCHES, batches, learner, run
from vitrail.errors import UserError
from vitrail.training import loop
from vitrail.training.checkpoint import load_checkpoint, save_checkpoint
from vitrail.training.config import TrainConfig

TOTAL, STOP = 20, 7
EVERYTHING = TrainConfig(
    batch=8, accumulate=2, ema=0.9, smoothing=0.1, drop_patches=0.3, drop_until=0.6
)


def straight(config, kind="transformer"):
    """The tensors of a training that nothing stopped."""
    model = learner(config, kind)
    run(model, config, TOTAL, patches=PATCHES)
    return model.tensors()


def stop(config, folder, kind="transformer"):
    """Saves after step 7, and loses two more steps."""
    model = learner(config, kind)
    for step in loop.train_steps(model, batches(), config, TOTAL, patches=PATCHES):
        if step.number == STOP:
            save_checkpoint(folder / "checkpoints", step.number, model.tensors(), {})
        if step.number == STOP + 2:
            return


def resume(config, folder, kind="transformer", forget="nothing"):
    """The tensors at the end; all that begin with `forget` are not put back."""
    saved = load_checkpoint(folder / "checkpoints")
    model = learner(config, kind)
    if forget != "nothing":
        fresh = model.tensors()
        saved = replace(
            saved,
            tensors={
                name: fresh.get(name) if name.startswith(forget) else tensor
                for name, tensor in saved.tensors.items()
                if name in fresh or not name.startswith(forget)
            },
        )
    model.restore(saved.tensors)
    run(model, config, TOTAL, saved.step, patches=PATCHES)
    return model.tensors()


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


CASES = {
    "transformer, adamw": ("transformer", EVERYTHING),
    "transformer, muon": ("transformer", replace(EVERYTHING, optimizer="muon")),
    "mlp, adamw": ("mlp", replace(EVERYTHING, drop_patches=0)),
    "mlp, muon": ("mlp", replace(EVERYTHING, optimizer="muon", drop_patches=0)),
    "float16": ("transformer", replace(EVERYTHING, precision="float16")),
    "no average": ("transformer", replace(EVERYTHING, ema=0)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_training_equals_an_unbroken_one_in_every_tensor(case, tmp_path):
    kind, config = CASES[case]
    stop(config, tmp_path, kind)
    assert differing(straight(config, kind), resume(config, tmp_path, kind)) == []


@pytest.mark.slow
def test_another_process_resumes_to_the_same_bits_and_imports_no_compiler(tmp_path):
    stop(EVERYTHING, tmp_path)
    code = f"""
import sys
from pathlib import Path
from safetensors.torch import save_file
from tests.training.test_resume import EVERYTHING, resume
save_file(resume(EVERYTHING, Path({str(tmp_path)!r})), {str(tmp_path / "end")!r})
assert "torch._dynamo" not in sys.modules  # its import takes a second
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert differing(straight(EVERYTHING), load_file(tmp_path / "end")) == []


@pytest.mark.parametrize("forget", ["model/", "optimizer/", "average/"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_forgetting_a_part_of_the_state_would_be_noticed(forget, optimizer, tmp_path):
    config = replace(EVERYTHING, optimizer=optimizer)
    stop(config, tmp_path)
    assert differing(straight(config), resume(config, tmp_path, forget=forget))


def test_forgetting_muons_momentum_would_be_noticed(tmp_path):
    config = replace(EVERYTHING, optimizer="muon")
    stop(config, tmp_path)
    found = resume(config, tmp_path, forget="optimizer/momentum")
    assert "model/qkv.weight" in differing(straight(config), found)


def test_forgetting_the_position_in_the_data_would_be_noticed(tmp_path, monkeypatch):
    stop(EVERYTHING, tmp_path)
    monkeypatch.setattr("tests.training.tiny.batches", lambda start: batches(0))
    assert differing(straight(EVERYTHING), resume(EVERYTHING, tmp_path))


def test_forgetting_the_step_in_the_seed_would_be_noticed(tmp_path, monkeypatch):
    expected = straight(EVERYTHING)
    stop(EVERYTHING, tmp_path)
    seed = loop.step_seed
    monkeypatch.setattr(loop, "step_seed", lambda s, step, rank: seed(s, step - STOP, rank))
    assert differing(expected, resume(EVERYTHING, tmp_path))


def test_a_checkpoint_restores_two_learners_apart_from_each_other(tmp_path):
    stop(EVERYTHING, tmp_path)
    saved = load_checkpoint(tmp_path / "checkpoints")
    kept = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    model = learner(EVERYTHING)
    model.restore(saved.tensors)
    run(model, EVERYTHING, TOTAL, STOP, patches=PATCHES)
    assert differing(kept, saved.tensors) == []


def test_a_used_learner_keeps_nothing_of_its_past(tmp_path):
    model = learner(EVERYTHING)
    save_checkpoint(tmp_path / "checkpoints", 0, model.tensors(), {})
    run(model, EVERYTHING, 3, patches=PATCHES)
    model.restore(load_checkpoint(tmp_path / "checkpoints").tensors)
    run(model, EVERYTHING, TOTAL, patches=PATCHES)
    assert differing(straight(EVERYTHING), model.tensors()) == []


def test_a_learner_restores_before_its_first_step(tmp_path):
    save_checkpoint(tmp_path / "checkpoints", 0, learner(EVERYTHING).tensors(), {})
    assert differing(straight(EVERYTHING), resume(EVERYTHING, tmp_path)) == []


@pytest.mark.parametrize(
    ("kind", "changes", "wrong"),
    [
        ("mlp", {}, ".* is in only one of them"),
        ("transformer", {"ema": 0}, "average/.* is in only one of them"),
        ("transformer", {"precision": "float16"}, "scaler/.* is in only one of them"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(kind, changes, wrong, tmp_path):
    stop(EVERYTHING, tmp_path)
    other = learner(replace(EVERYTHING, **changes), kind)
    with pytest.raises(UserError, match=f"does not match the model: {wrong}"):
        other.restore(load_checkpoint(tmp_path / "checkpoints").tensors)


def test_a_tensor_of_another_shape_or_type_is_refused(tmp_path):
    stop(EVERYTHING, tmp_path)
    tensors = load_checkpoint(tmp_path / "checkpoints").tensors
    for name in ("model/head.weight", "optimizer/exp_avg/head.weight"):
        for odd in (torch.zeros(4, 4), tensors[name].double()):
            with pytest.raises(UserError, match=f"{name.removeprefix('optimizer/')} is torch"):
                learner(EVERYTHING).restore({**tensors, name: odd})
