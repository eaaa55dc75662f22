"""The forecast of a training: its closed forms, against real tensors and published runs."""

import json
from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.data.config import Preprocess
from vitrail.model.cost import count_activation_bytes, count_macs, count_parameters
from vitrail.run import planning
from vitrail.run.build import make_learner
from vitrail.run.devices import Device, known_device, parse_devices
from vitrail.run.forecast import (
    Cluster,
    choose_shard,
    count_in_training,
    find_limit,
    predict_memory,
    predict_step,
    sent_bytes,
    training_flops,
)
from vitrail.run.recipe import Recipe
from vitrail.training.config import TrainConfig
from vitrail.training.loop import train_steps

DOCS = Path(__file__).parents[2] / "docs" / "planning.md"
IMAGENET, JFT = 1_281_167, 303_000_000
TPU = Device(  # a chip of two cores; its utilisation from the second row of the table
    name="TPUv3",
    peak=123e12,
    peak32=0,
    memory=32e9,
    link=70e9,
    network=70e9,
    cores=1,
    mfu=0.32,
    reason="ViT-H/14 on JFT-300M",
)


def make_recipe(name="S/16", *, batch=1024, epochs=1, tune="all", image=224, **train):
    vit = vitrail.preset(name, image=image, classes=1000, head="linear")
    config = TrainConfig(batch=batch, epochs=epochs, **train)
    return Recipe(vit=vit, train=config, tune=tune, preprocess=Preprocess(size=image))


def supervised_hours(name, epochs, device, count, batch, images=IMAGENET):
    """What `plan` computes for labelled images that are read fast enough."""
    recipe = make_recipe(name, batch=batch, epochs=epochs)
    cluster = Cluster(device=device, count=count, rate=device.peak * device.mfu)
    steps = epochs * (images // batch)
    flops, others = training_flops(recipe, images, 50_000, steps)
    sent = sent_bytes(recipe, cluster, 2, "off")
    seconds = steps * predict_step(recipe, cluster, flops / steps, sent).total
    return (seconds + others / count / cluster.rate) / 3600


def dinov2_hours(name, drop, local, count, batch, steps):
    """Two views of 224 pixels and eight local ones; dropped paths are not computed; a teacher."""
    views = {size: count_macs(vitrail.preset(name, image=size)) for size in (224, local)}
    student = 2 * views[224] + 8 * views[local]
    macs = 3 * (1 - drop) * student + 2 * views[224]
    device = known_device("A100")
    return 2 * macs * batch * steps / (count * device.peak * device.mfu) / 3600


V100 = known_device("V100")
PUBLISHED = [  # run, devices, hours that its authors say, hours of the closed forms
    ("ViT-H/14, JFT-300M, 14 epochs", "2,500 TPUv3 core-days", 2500 * 24, lambda: 2 * 32
     * supervised_hours("H/14", 14, TPU, 32, 4096, JFT)),
    ("big_vision ViT-S/16, 90 epochs", "4 TPUv3", 6.5,
     lambda: supervised_hours("S/16", 90, TPU, 4, 1024)),
    ("DeiT-B, 300 epochs", "8 V100", 53, lambda: supervised_hours("B/16", 300, V100, 8, 1024)),
    ("DeiT-B, 300 epochs", "16 V100", 37, lambda: supervised_hours("B/16", 300, V100, 16, 1024)),
    ("MAE ViT-B/16, fine-tuning 100 epochs", "32 V100", 7 + 11 / 60,
     lambda: supervised_hours("B/16", 100, V100, 32, 1024)),
    ("MAE ViT-L/16, fine-tuning 50 epochs", "32 V100", 8 + 52 / 60,
     lambda: supervised_hours("L/16", 50, V100, 32, 1024)),
    ("MAE ViT-H/14, fine-tuning 50 epochs", "64 V100", 13 + 9 / 60,
     lambda: supervised_hours("H/14", 50, V100, 64, 1024)),
    ("DINOv2 ViT-L/16, ImageNet-1k", "32 A100", 24,
     lambda: dinov2_hours("L/16", 0.3, 96, 32, 2048, 125_000)),
    ("DINOv2 ViT-L/14, ImageNet-22k", "96 A100", 3.3 * 24,
     lambda: dinov2_hours("DINOv2-L/14", 0.4, 98, 96, 3072, 625_000)),
    ("DINOv2 ViT-g/14, LVD-142M", "22,000 A100-hours", 22_000,
     lambda: dinov2_hours("DINOv2-g/14", 0.4, 98, 1, 3072, 625_000)),
]  # fmt: skip


def table_row(run, devices, published, hours):
    error = f"{100 * (hours / published - 1):+.0f} %"
    return f"| {run} | {devices} | {published:,.4g} | {hours:,.4g} | {error} |"


@pytest.mark.parametrize(("run", "devices", "published", "hours"), PUBLISHED)
def test_the_page_states_the_error_against_published_runs(run, devices, published, hours):
    assert table_row(run, devices, published, hours()) in DOCS.read_text()


@pytest.mark.parametrize(("name", "exaflops"), [("L/32", 196), ("L/16", 783), ("H/14", 4262 / 2)])
def test_flops_equal_those_of_the_vit_paper(name, exaflops):  # table 6, seven epochs of JFT-300M
    flops, _ = training_flops(make_recipe(name), JFT, 0, 7 * JFT // 1024)
    assert flops / 1e18 == pytest.approx(exaflops, rel=0.01)


def stored_bytes(vit, batch):
    """What autograd stores for the backward pass, without the parameters."""
    model = vitrail.ViT(vit).train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    stored = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            stored[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.randn(batch, vit.channels, *vit.size)).logsumexp(1).sum()
    assert loss.requires_grad
    return sum(size for size, _ in stored.values())


@pytest.mark.parametrize(
    "changes",
    [{}, {"mlp": "swiglu", "layer_scale": 1e-5}, {"qk_norm": True}, {"positions": "rotary"}],
    ids=str,
)
@pytest.mark.parametrize("name", ["S/16", "R9+Mini/4"])
def test_activations_are_those_that_autograd_stores(name, changes):
    image = 32 if name.endswith("4") else 64
    vit = vitrail.preset(name, image=image, depth=3, width=96, heads=3, **changes)
    stored = (stored_bytes(vit, 6) - stored_bytes(vit, 2)) / 4  # what each image adds
    assert count_activation_bytes(vit) == pytest.approx(stored, rel=0.06)


@pytest.mark.parametrize(
    ("optimizer", "tune"), [("adamw", "all"), ("muon", "all"), ("muon", "lora")]
)
def test_memory_is_that_of_the_tensors_of_a_training(optimizer, tune):
    recipe = make_recipe("Mini/4", batch=2, optimizer=optimizer, ema=0.9, image=16, tune=tune)
    learner = make_learner(recipe, torch.device("cpu"))
    batches = [(torch.randn(2, 3, 16, 16), torch.tensor([0, 1]))]
    list(train_steps(learner, batches, recipe.train, 1))
    cluster = Cluster(device=known_device("H100"), count=1, rate=1.0)
    memory = predict_memory(recipe, cluster, 4, "off")
    kinds = {"weights": 0, "gradients": 0, "optimizer": 0}
    for name, tensor in learner.tensors().items():
        kinds["weights" if name.startswith("model/") else "optimizer"] += tensor.nbytes
    kinds["gradients"] = sum(p.nbytes for p in learner.model.parameters() if p.requires_grad)
    for kind, size in kinds.items():
        assert getattr(memory, kind) == pytest.approx(size, rel=0.05), kind


def test_frozen_blocks_are_computed_once_and_frozen_weights_get_no_gradients():
    def flops(**changes):
        return training_flops(make_recipe(**changes), 10_240, 0, 10)[0]

    assert flops(tune="proj") == pytest.approx(flops() * 2 / 3)
    assert flops(tune="head", frozen=12) == 0
    once = training_flops(make_recipe(tune="head", frozen=12), 10_240, 0, 10)[1]
    assert once == pytest.approx(2 * 10_240 * 2 * count_macs(vitrail.preset("S/16")))


def test_patch_dropout_saves_the_work_of_the_dropped_tokens():
    kept, all_ = (training_flops(make_recipe(drop_patches=d, drop_until=0.5), 10_240, 0, 10)[0]
                  for d in (0.5, 0.0))  # fmt: skip
    vit = vitrail.preset("S/16")
    share = count_macs(vit, 98) / count_macs(vit)
    assert 0.4 < share < 0.5  # attention is quadratic
    assert kept / all_ == pytest.approx(0.5 + 0.5 * share)


def test_ddp_sends_gradients_twice_and_fsdp_gathers_weights_twice():
    recipe = make_recipe()
    cluster = Cluster(device=known_device("H100"), count=4, rate=1.0)
    parameters = count_parameters(recipe.vit)
    assert sent_bytes(recipe, cluster, 2, "off") == 2 * 3 / 4 * 4 * parameters
    assert sent_bytes(recipe, cluster, 2, "full") == 3 / 4 * (2 * 2 + 4) * parameters


def test_only_trained_gradients_are_sent():
    recipe = make_recipe(tune="head", frozen=12)
    assert count_in_training(recipe).trained == 384 * 1000 + 1000
    cluster = Cluster(device=known_device("H100"), count=2, rate=1.0)
    assert sent_bytes(recipe, cluster, 2, "off") == 4 * 385_000


@pytest.mark.parametrize(
    ("changes", "limit"),
    [({}, "compute"), ({"rate": 1e18}, "communication"), ({"core_seconds": 10.0}, "input"),
     ({"image_bytes": 1e9, "disk": 1e6}, "input")],
)  # fmt: skip
def test_the_slowest_resource_limits(changes, limit):
    cluster = Cluster(device=V100, count=16, **{"rate": 2e13, **changes})
    step = predict_step(make_recipe(), cluster, 1e15, 1e8)
    assert find_limit(step) == limit
    assert step.total >= getattr(step, limit) * (1 / 3 if limit == "communication" else 1)


def test_what_does_not_fit_is_sharded():
    cluster = Cluster(device=known_device("T4"), count=8, rate=1.0)
    assert choose_shard(make_recipe(batch=8), cluster, 2, "auto") == "off"
    assert choose_shard(make_recipe("g/14", batch=8), cluster, 2, "auto") == "full"


def test_a_plan_of_processes_on_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(planning, "TRIAL", 0.0)
    found = vitrail.plan("digits", devices="2xcpu", epochs=3, price=1.5)
    assert found.measured and found.mfu is None
    assert found.steps == 3 * (found.images // found.batch)
    assert found.cost == pytest.approx(1.5 * 2 * found.seconds / 3600)
    assert json.loads(json.dumps(found.to_dict()))["memory"]["fits"] is True


def test_a_sample_stands_for_all_images():
    found = vitrail.plan(
        "digits", devices="64xH100", epochs=9, images=10**6, settings={"train": {"batch": 2048}}
    )
    assert (found.images, found.steps, found.machines) == (10**6, 9 * 488, 8)
    assert found.cost is None and "give `price`" in repr(found)


def test_a_requested_utilisation_wins(monkeypatch):
    monkeypatch.setattr(planning, "measure_rate", lambda *rest: 1e12)  # such a GPU is here
    options = {"settings": {"train": {"batch": 1024}}, "epochs": 1}
    requested, measured = (
        vitrail.plan("digits", devices="1xH100", **options, **more) for more in ({"mfu": 0.5}, {})
    )
    assert not requested.measured and measured.measured
    assert requested.step.compute < measured.step.compute


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xH1000", "perhaps you meant H100"),
        ("0xH100", "from 1 to"),
        ("", "is empty"),
        ("8x", "unknown kind"),
    ],
)
def test_unknown_devices_are_refused(text, message):
    with pytest.raises(vitrail.UserError, match=message):
        parse_devices(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": "512xH100"}, "train.batch"),
        ({"devices": "8xH100", "price": 0.0}, "`price` is 0"),
        ({"devices": "8xH100", "mfu": 1.5}, "at most 1"),
        ({"devices": "2xcpu", "mfu": 0.5}, "measured"),
        ({"devices": "H100", "shard": "full"}, "two devices"),
        ({"devices": "H100", "shard": "half"}, "auto, off, full"),
    ],
    ids=str,
)
def test_plans_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(vitrail.UserError, match=message):
        vitrail.plan("digits", **arguments)


if __name__ == "__main__":
    for run, devices, published, hours in PUBLISHED:
        print(table_row(run, devices, published, hours()))
