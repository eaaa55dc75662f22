"""Runs weights in another engine: exported once, proved, cached by content; `auto` measures.

The cache has a folder for the content of each weight file. It holds the exported models with their
proofs, and for each machine the time that every engine takes.
"""

import hashlib
import importlib.util
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from filelock import FileLock

from vitrail import __version__, files
from vitrail.data.sources.places import cache_folder
from vitrail.errors import UserError
from vitrail.exporting.engine import EngineName, thread_count
from vitrail.inference.classifier import Classifier
from vitrail.inference.predictor import Array, Predictor
from vitrail.zoo.weights import Normalisation

log = logging.getLogger(__name__)

FORMAT_OF: dict[str, Literal["onnx", "openvino"]] = {"onnxruntime": "onnx", "openvino": "openvino"}
FILE_OF = {"onnxruntime": "model.onnx", "openvino": "model.xml"}
BATCHES = (1, 16)  # that `auto` times: one answer, and throughput
ROUNDS, SECONDS = 5, 1.0  # of timing: at least and at most for each batch size, in turn
HASHED = (".safetensors", ".pth", ".pt", ".bin", ".npz", ".json")  # weights and config files
CACHE = 2  # format of the cache: 2 has the features that tell odd images
BLOCK = 2**20  # bytes hashed at once


def load_in_engine(
    path: str | Path,
    engine: EngineName,
    *,
    device: str,
    load_torch: Callable[[], Classifier],
    preprocess: Normalisation | None = None,
    vit: Mapping[str, Any] | None = None,
) -> Classifier:
    """The classifier at `path` in an engine; `load_torch` loads it in PyTorch if that is needed."""
    if engine not in get_args(EngineName):
        raise UserError(f"unknown engine {engine!r}; choose {', '.join(get_args(EngineName))}")
    if engine == "torch":
        return load_torch()
    if engine != "auto":
        require_engine(engine)
        if device not in ("auto", "cpu"):
            raise UserError(f"{engine} runs on the CPU, not on {device!r}; use `device='cpu'`")
    folder = cache_folder() / "engines" / hash_model(path, preprocess, vit)
    if engine == "auto":
        return load_fastest(folder, device, load_torch)
    if found := load_cached(folder, engine):
        return found
    with lock_cache(folder):
        return load_cached(folder, engine) or export_to_cache(folder, engine, load_torch())


@contextmanager
def lock_cache(folder: Path) -> Iterator[None]:
    """Lets one process export and measure at a time; the others then find its results."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {files.describe_os_error(error)}") from error
    try:
        yield
    finally:
        lock.release()


def load_fastest(folder: Path, device: str, load_torch: Callable[[], Classifier]) -> Classifier:
    """The classifier in the engine that is fastest on this machine, measured the first time."""
    if not any(map(is_installed, FORMAT_OF)):
        return load_torch()
    record = folder / f"times-{hash_machine(device)}.json"
    if (times := read_times(record)) is None:
        classifier = load_torch()
        if classifier.device.type != "cpu":
            log.info(f"engine torch on {classifier.device}: the other engines run on the CPU")
            return classifier
        try:
            with lock_cache(folder):
                times = read_times(record)  # of a process that held the lock
                if times is None:
                    return measure_and_choose(folder, record, classifier)
        except UserError as error:  # such as a read-only file system
            log.info(f"engine torch: the engines cannot be compared: {error}")
            return classifier
    name = fastest_engine(times)
    if name == "torch":
        return load_torch()
    return load_cached(folder, name) or export_to_cache(folder, name, load_torch())


def measure_and_choose(folder: Path, record: Path, classifier: Classifier) -> Classifier:
    """Exports a classifier for every engine, measures them, and stores the times."""
    candidates = collect_candidates(folder, classifier)
    times = measure_engines({name: one.predictor for name, one in candidates.items()})
    files.write_file(record, json.dumps(times, indent=1) + "\n")
    log.info(describe_times(times))
    return candidates[fastest_engine(times)]


def collect_candidates(folder: Path, classifier: Classifier) -> dict[str, Classifier]:
    """The classifier in every engine that is installed and that is proved equal to PyTorch."""
    candidates = {"torch": classifier}
    for name in FORMAT_OF:
        if not is_installed(name):
            continue
        try:
            loaded = load_cached(folder, name) or export_to_cache(folder, name, classifier)
        except UserError as error:
            log.info(f"{name} is not used: {error}")
        else:
            candidates[name] = loaded
    return candidates


def load_cached(folder: Path, engine: str) -> Classifier | None:
    """The exported model in the cache; None if there is none that can be read."""
    from vitrail.inference.engine_classifier import EngineClassifier

    path = folder / FILE_OF[engine]
    if not path.is_file():
        return None
    try:
        return EngineClassifier(path)
    except UserError as error:
        log.info(f"the cached export is made again: {error}")
        return None


def export_to_cache(folder: Path, engine: str, classifier: Classifier) -> Classifier:
    """Exports a classifier into the cache, with its proof, and opens the result."""
    from vitrail.inference.engine_classifier import EngineClassifier

    path = folder / FILE_OF[engine]
    log.info(f"exporting the model for {engine}, once")
    calibration = classifier.metadata.calibration
    odd = calibration is not None and calibration.neighbours is not None
    classifier.export(path, to=FORMAT_OF[engine], odd=odd, overwrite=True)
    return EngineClassifier(path)


def measure_engines(predictors: Mapping[str, Predictor]) -> dict[str, list[float]]:
    """Median seconds of each engine for every batch size in `BATCHES`, all engines in turn."""
    times: dict[str, list[float]] = {name: [] for name in predictors}
    for batch in BATCHES:
        inputs = {name: example_input(one, batch) for name, one in predictors.items()}
        seconds: dict[str, list[float]] = {name: [] for name in predictors}
        began = time.perf_counter()
        rounds = 0
        while rounds <= ROUNDS or time.perf_counter() - began < SECONDS:
            for name, one in predictors.items():
                start = time.perf_counter()
                one.logits(inputs[name])
                seconds[name].append(time.perf_counter() - start)
            rounds += 1
        for name in predictors:
            times[name].append(float(np.median(seconds[name][1:])))  # the first call warms up
    return times


def example_input(predictor: Predictor, batch: int) -> Array:
    """A batch of random images."""
    settings = predictor.preprocess
    pixels = np.random.default_rng(0).integers(
        0, 256, (settings.height, settings.width, settings.channels)
    )
    return np.stack([predictor.load(pixels.astype(np.uint8))] * batch)


def fastest_engine(times: Mapping[str, list[float]]) -> str:
    """The engine with the least time, as geometric mean over the batch sizes."""
    return min(times, key=lambda name: float(np.log(times[name]).sum()))


def describe_times(times: Mapping[str, list[float]]) -> str:
    """ "engine onnxruntime: one image 1.40 x, 16 images 1.12 x the speed of PyTorch"."""
    name = fastest_engine(times)
    ratios = (
        f"{'one image' if batch == 1 else f'{batch} images'} {ours / theirs:.2f} x"
        for batch, ours, theirs in zip(BATCHES, times["torch"], times[name], strict=True)
    )
    speed = f": {', '.join(ratios)} the speed of PyTorch" if name != "torch" else ""
    return f"engine {name}{speed}; measured on this machine and remembered"


def read_times(path: Path) -> dict[str, list[float]] | None:
    """What was measured before; None if there is nothing that can be read."""
    try:
        times = json.loads(path.read_text())
        valid = {
            name: [float(value) for value in times[name]]
            for name in times
            if name == "torch" or is_installed(name)
        }
    except (OSError, ValueError, TypeError):
        return None
    complete = "torch" in valid and all(len(one) == len(BATCHES) for one in valid.values())
    return valid if complete and all(min(one) > 0 for one in valid.values()) else None


def is_installed(engine: str) -> bool:
    return importlib.util.find_spec(engine) is not None


def require_engine(engine: str) -> None:
    """Raises if the package of an engine is not installed."""
    from vitrail.exporting.packages import import_package

    import_package(engine)


def hash_model(
    path: str | Path, preprocess: Normalisation | None, vit: Mapping[str, Any] | None
) -> str:
    """A checksum of the weights, what lies beside them, and the settings they are loaded with."""
    checksum = hashlib.sha256()
    settings = {"version": __version__, "cache": CACHE, "preprocess": preprocess}
    settings["vit"] = dict(vit or {})
    checksum.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for file in sorted(model_files(path)):
        checksum.update(file.name.encode("utf-8", "surrogateescape"))
        try:
            with file.open("rb") as stream:
                while block := stream.read(BLOCK):
                    checksum.update(block)
        except OSError as error:
            raise UserError(f"cannot read {file}: {files.describe_os_error(error)}") from error
    return checksum.hexdigest()[:32]


def model_files(path: str | Path) -> list[Path]:
    """The weight file and the config files beside it, or all of those in a folder."""
    place = files.expand_user(path)
    if not place.exists():  # a name on the hub or in the table of published weights
        from vitrail.zoo.locate import locate_checkpoint

        place = locate_checkpoint(path).weights
    if place.is_dir():
        return [one for one in place.iterdir() if one.suffix in HASHED and one.is_file()]
    beside = [one for one in place.parent.glob("*.json") if one.is_file()]
    return [place, *(one for one in beside if one != place)]


def hash_machine(device: str) -> str:
    """A checksum of what decides which engine is fastest: processor, threads, versions."""
    names = [platform.machine(), processor_name(), str(thread_count()), device, __version__]
    names += [str(os.cpu_count())]
    for name in ("torch", *FORMAT_OF):
        names.append(f"{name} {engine_version(name)}")
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def processor_name() -> str:
    """The model and the instruction sets of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()  # Linux
    except OSError:
        return platform.processor()
    return "\n".join(sorted({one for one in lines if one.startswith(("model name", "flags"))}))


def engine_version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
