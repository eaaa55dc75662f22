"""`vitrail plan`: forecasts time, cost and memory of a training run on any devices."""

import json as as_json
from typing import Annotated, Literal

import tyro

import vitrail
from vitrail.cli.flags import (
    NO_VIT,
    Architecture,
    Data,
    OptionalFloat,
    OptionalInt,
    RecipeFile,
    Switch,
    Vit,
    Weights,
    given_sections,
)
from vitrail.cli.train import (
    NO_DATA,
    NO_PREPROCESS,
    NO_TRAIN,
    DataSettings,
    PreprocessSettings,
    TrainSettings,
    TunedPart,
)


def plan(
    source: Data,
    *,
    devices: Annotated[str, tyro.conf.arg(metavar="NxKIND")],
    epochs: OptionalInt = None,
    images: OptionalInt = None,
    model: Architecture = None,
    weights: Weights = "auto",
    tune: TunedPart = "auto",
    recipe: RecipeFile = None,
    shard: Literal["auto", "off", "full"] = "auto",
    price: OptionalFloat = None,
    mfu: OptionalFloat = None,
    per_machine: OptionalInt = None,
    network: OptionalFloat = None,
    cores: OptionalInt = None,
    disk: OptionalFloat = None,
    json: Switch = False,
    vit: Vit = NO_VIT,
    train: TrainSettings = NO_TRAIN,
    data: DataSettings = NO_DATA,
    preprocess: PreprocessSettings = NO_PREPROCESS,
) -> None:
    """Forecast time, cost and memory of a training run on any devices.

    Plans the recipe that `train` would choose, and says what would limit it: compute, communication
    or input. Nothing is trained or downloaded. A few steps are timed if such a device is in this
    machine.

    Args:
        devices: number and kind: 64xH100, 8xA100, 2xcpu (processes on this machine)
        epochs: passes over the training images (default: what `train` would choose)
        images: number of training images, if DATA is only a sample of them
        shard: full: weights, gradients and optimizer divided among the devices (FSDP); off: whole
            on each (DDP); auto: full if they do not fit
        price: of a device-hour, in any currency; without it no cost is computed
        mfu: fraction of the devices' peak that training reaches (default: typical, or measured)
        per_machine: devices of a machine (default: 8)
        network: Gbit/s between machines (default: that of usual machines)
        cores: CPU threads of a machine (default: those of usual machines)
        disk: MB/s at which a machine reads images (default: no limit)
        json: print one JSON document
    """
    result = vitrail.plan(
        source,
        devices=devices,
        epochs=epochs,
        images=images,
        model=model,
        weights=weights,
        tune=tune,
        recipe=recipe,
        settings=given_sections(vit=vit, train=train, data=data, preprocess=preprocess),
        shard=shard,
        price=price,
        mfu=mfu,
        per_machine=per_machine,
        network=network,
        cores=cores,
        disk=disk,
    )
    if json:
        print(as_json.dumps(result.to_dict(), indent=1))
        return
    from vitrail.cli.messages import flags_of, translate

    print(translate(repr(result), flags_of(plan)))
