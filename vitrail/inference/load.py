"""Loads a classifier from a run, weights or an exported file; torch is imported where needed."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.arguments import check_arguments
from vitrail.errors import UserError
from vitrail.exporting.engine import ENGINE_SUFFIXES, EngineName
from vitrail.inference.classifier import Classifier, NoHead, describe_no_head
from vitrail.zoo.weights import Normalisation

if TYPE_CHECKING:
    from vitrail.zoo.load import LoadedModel


@check_arguments
def load(
    path: str | Path,
    *,
    device: str = "auto",
    engine: "EngineName | None" = None,
    preprocess: Normalisation | None = None,
    vit: Mapping[str, Any] | None = None,
) -> Classifier:
    """Loads a classifier from a run folder, a model file, or the weights of another library.

    Reads Vitrail's own files and the layouts of timm, Hugging Face, torchvision and Google, from
    safetensors, PyTorch or `.npz` files. No code in a file is ever executed. A file that
    `vitrail export` wrote for onnxruntime (.onnx) or OpenVINO (.xml) gives an `EngineClassifier`,
    without importing torch.

    Args:
        path: run folder, weight file or folder, name of published weights, "hf:owner/name", or an
            exported file
        device: "cpu", "cuda", "cuda:1", "mps"; "auto" picks a GPU if there is one
        engine: torch, onnxruntime or openvino; "auto" picks the fastest that is installed and
            proved equal to PyTorch, measured once for each model and machine; by default torch,
            for an exported file its own
        preprocess: mean and standard deviation that foreign weights expect, if their file does
            not say
        vit: settings that the file does not contain, such as {"heads": 6}, or to adapt the
            model to, such as {"image": 384}

    >>> classifier = vitrail.load("runs/digits-1")
    >>> classifier.classes[:3]
    ('0', '1', '2')
    """
    if Path(path).suffix.lower() in ENGINE_SUFFIXES:
        return load_exported(path, device=device, engine=engine, preprocess=preprocess, vit=vit)

    def load_torch() -> Classifier:
        from vitrail.zoo.load import load_weights, log_weight_changes

        loaded = log_weight_changes(load_weights(path, preprocess=preprocess, vit=vit))
        return make_classifier(loaded, path=path, device=device)

    if engine in (None, "torch"):
        return load_torch()
    from vitrail.inference.engines import load_in_engine

    return load_in_engine(
        path, engine, device=device, load_torch=load_torch, preprocess=preprocess, vit=vit
    )


def make_classifier(loaded: "LoadedModel", *, path: str | Path, device: str) -> Classifier:
    """A classifier from loaded weights; raises without a head or a normalisation."""
    if loaded.model.config.head == "none":
        origin = ", from a pretraining run," if loaded.metadata.pretraining else ""
        raise NoHead(describe_no_head(f"{path}{origin}", str(path)))
    if loaded.preprocess is None:
        from vitrail.zoo.load import missing_preprocess

        raise missing_preprocess(path)
    count = loaded.model.config.classes
    classes = loaded.classes or tuple(str(number) for number in range(count))
    return Classifier(loaded.model, classes, loaded.preprocess, loaded.metadata, device)


def load_exported(
    path: str | Path,
    *,
    device: str,
    engine: "EngineName | None",
    preprocess: Normalisation | None,
    vit: Mapping[str, Any] | None,
) -> Classifier:
    """A classifier that runs an exported file in its engine."""
    from vitrail.inference.engine_classifier import EngineClassifier

    if device not in ("auto", "cpu"):
        raise UserError(f"{path} runs on the CPU, not on {device!r}; use `device='cpu'`")
    if preprocess is not None or vit:
        raise UserError(
            f"{path} is an exported model, whose architecture and normalisation are fixed; "
            f"leave out {'`preprocess`' if preprocess is not None else '`vit`'}, or export again"
        )
    own = "onnxruntime" if Path(path).suffix.lower() == ".onnx" else "openvino"
    if engine not in (None, "auto", own):
        raise UserError(
            f"{path} runs in {own}, not in {engine}; leave `engine` out, or give the run or weight "
            f"file that it was exported from"
        )
    return EngineClassifier(path)
