"""`vitrail calibrate`: calibrates a model with labelled images, for weights of other libraries."""

import json as as_json
from pathlib import Path

import vitrail
from vitrail.cli.flags import (
    NO_COLUMNS,
    NO_VIT,
    BatchSize,
    ColumnNames,
    Data,
    Device,
    LoadedVit,
    Model,
    Normalisation,
    SkipBroken,
    Switch,
    given_settings,
)


def calibrate(
    model: Model,
    data: Data,
    *,
    out: Path = Path("calibrated.safetensors"),
    batch: BatchSize = 64,
    device: Device = "auto",
    skip_broken: SkipBroken = False,
    preprocess: Normalisation = None,
    json: Switch = False,
    columns: ColumnNames = NO_COLUMNS,
    vit: LoadedVit = NO_VIT,
) -> None:
    """Calibrate a model with labelled images.

    Writes a model file with the temperature, prediction sets, abstention and features by which odd
    images are recognised. Models that `vitrail train` made have all of them; weights of other
    libraries need labelled images of their classes that they were not trained on.

    Args:
        out: model file to write
        json: print one JSON document
    """
    classifier = vitrail.calibrate(
        model,
        data,
        out=out,
        batch=batch,
        device=device,
        skip_broken=skip_broken,
        preprocess=preprocess,
        vit=given_settings(vit),
        columns=given_settings(columns),
    )
    calibration = classifier.metadata.calibration
    assert calibration is not None and calibration.sets is not None
    document = {
        "out": str(out),
        "data": calibration.data,
        "images": calibration.images,
        "temperature": classifier.temperature,
        "classes_with_thresholds": len(calibration.sets.classes),
        "odd_images": calibration.neighbours is not None,
    }
    if json:
        print(as_json.dumps(document, indent=1))
        return
    print(
        f"calibrated with {calibration.images:,} images of {calibration.data}: "
        f"temperature {classifier.temperature:.2f}; wrote {out}"
    )
