"""Run folders made by hand, of any number of classes: what a training would leave."""

import io
import json
from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from vitrail.data.config import Preprocess
from vitrail.data.preview import MemorySource
from vitrail.data.source import fingerprint
from vitrail.model.config import ViTConfig
from vitrail.model.vit import ViT
from vitrail.run.recipe import Recipe, recipe_to_toml
from vitrail.run.storage import predictions
from vitrail.run.storage.predictions import Predictions, SplitOutputs
from vitrail.run.storage.record import prepend_reasons
from vitrail.zoo.file import save_model

SHARE = {"train": 0.5, "val": 0.25, "test": 0.25}


class Shelf:
    """A loader of which a page only takes the source."""

    def __init__(self, source):
        self.source = source


def images(names, each=8, side=24, path="{name}/{number}.png"):
    """A data set in memory: noise, tinted by class."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(len(names)), each)
    splits = np.tile(
        np.repeat(list(SHARE), [round(each * share) for share in SHARE.values()]), len(names)
    )
    contents, ids = [], []
    for number, label in enumerate(labels.tolist()):
        tint = np.array([label * 37 % 255, label * 91 % 255, label * 53 % 255])
        coarse = random.integers(-60, 60, (6, 6, 3)) + tint
        image = Image.fromarray(coarse.clip(0, 255).astype(np.uint8)).resize((side, side))
        stream = io.BytesIO()
        image.save(stream, "PNG" if side <= 64 else "JPEG")
        contents.append(stream.getvalue())
        ids.append(path.format(name=names[label], number=number))
    return MemorySource("made up", tuple(names), labels.astype(np.int64), splits, ids, contents)


def write_run(folder, source, accuracy=0.8, seed=0, **facts):
    """A finished run on `source` whose model is right so often."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    classes = len(source.classes)
    vit = ViTConfig(image=24, patch=4, classes=classes, width=32, depth=2, heads=2)
    view = Preprocess(size=24)
    recipe = Recipe(source=str(folder / "data"), model="Nano/4", vit=vit, preprocess=view)
    recipe = replace(recipe, train=replace(recipe.train, steps=60))
    reasons = ["batch 128: <b>at least</b> eight steps", "epochs 3: asked for"]
    (folder / "recipe.toml").write_text(prepend_reasons(reasons, recipe_to_toml(recipe)))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal()))
    seen, scores = {}, {}
    for split in SHARE:
        items = np.flatnonzero(source.splits == split)
        labels = torch.from_numpy(source.labels[items])
        logits = torch.from_numpy(random.normal(size=(len(items), classes)))
        right = torch.from_numpy(random.random(len(items)) < accuracy)
        wrong = (labels + torch.from_numpy(random.integers(1, classes, len(items)))) % classes
        logits.scatter_(1, torch.where(right, labels, wrong)[:, None], 6.0)
        seen[split] = SplitOutputs(logits=logits, labels=labels, items=items).to_predictions(1.3)
        rate = seen[split].accuracy
        scores[split] = {"accuracy": rate, "interval": [max(0, rate - 0.1), min(1, rate + 0.1)]}
    about = predictions.describe_predictions(source, fingerprint(source), seen, 1.3)
    predictions.save_predictions(folder, Predictions(splits=seen, metadata={**about, **facts}))
    numbers = {"run": str(folder), "model": "Nano/4", "epochs": 3, "steps": 60, "seconds": 12.5}
    numbers |= {"val": scores["val"], "test": scores["test"]}
    (folder / "metrics.json").write_text(json.dumps(numbers))
    kept = {"data": {"fingerprint": fingerprint(source)}, "temperature": 1.3}
    kept["best"] = {"val_accuracy": 40 / 90, "val_loss": 2 - 40 / 60, "epoch": 2, "step": 40}
    save_model(folder / "model.safetensors", ViT(vit), kept)
    return folder


def journal():
    for step in range(10, 61, 10):
        epoch = (step + 19) // 20
        line = {"kind": "step", "step": step, "epoch": epoch, "loss": 2 - step / 60, "lr": 0.1}
        yield line | {"images_per_s": 100.0}
        if step % 20 == 0:
            line = {"kind": "epoch", "epoch": epoch, "step": step, "seconds": step / 5}
            line |= {"train_loss": 2 - step / 50, "train_accuracy": step / 80}
            yield line | {"val_loss": 2 - step / 60, "val_accuracy": step / 90}
