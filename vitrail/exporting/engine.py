"""Runs an exported file: pixels in, named arrays out, without PyTorch."""

import os
import sys
import threading
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vitrail.decoding import parse_json
from vitrail.errors import UserError
from vitrail.exporting.packages import import_package

METADATA_KEY = "vitrail"  # of the metadata in an exported file; its value is JSON
INPUT = "pixels"
ODD_FEATURES = "odd_features"  # the output that tells odd images
MAX_REASON = 200  # characters of another library's message that an error repeats
ENGINE_SUFFIXES = (".onnx", ".xml")  # of the files that engines run

EngineName = Literal["auto", "torch", "onnxruntime", "openvino"]
PixelKind = Literal["float32", "uint8"]
Arrays = dict[str, NDArray[np.float32]]


class Engine(Protocol):
    """A loaded model that computes the outputs of a batch."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    @property
    def pixels(self) -> PixelKind: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def classes(self) -> int | None: ...
    def run(self, pixels: NDArray[Any]) -> Arrays: ...
    def split(self, parts: int) -> "Engine":
        """The same model for `parts` concurrent calls, each with its share of the threads."""


@dataclass(frozen=True, eq=False)
class OnnxEngine:
    """An ONNX file in an onnxruntime session on the CPU."""

    path: Path
    threads: int
    session: Any
    metadata: dict[str, Any]  # what Vitrail wrote into the file; empty for a foreign file
    pixels: PixelKind  # the dtype of the input
    outputs: tuple[str, ...]
    classes: int | None  # logits; None without a head
    version: str
    name: str = "onnxruntime"

    def run(self, pixels: NDArray[Any]) -> Arrays:
        """The outputs of a batch (B, C, H, W) by name."""
        try:
            arrays = self.session.run(list(self.outputs), {INPUT: pixels})
        except Exception as error:  # onnxruntime has one class per status, without a public base
            raise UserError(f"onnxruntime cannot run the model: {shorten(error)}") from error
        return dict(zip(self.outputs, arrays, strict=True))

    def split(self, parts: int) -> "OnnxEngine":
        return open_onnx(self.path, max(1, self.threads // parts))


@dataclass(frozen=True, eq=False)
class OpenVinoEngine:
    """OpenVINO's files, compiled for the CPU."""

    path: Path
    threads: int
    compiled: Any
    metadata: dict[str, Any]
    pixels: PixelKind
    outputs: tuple[str, ...]
    classes: int | None  # logits; None without a head
    version: str
    name: str = "openvino"
    requests: threading.local = field(default_factory=threading.local)  # one for each thread

    def run(self, pixels: NDArray[Any]) -> Arrays:
        """The outputs of a batch (B, C, H, W) by name."""
        try:
            if not hasattr(self.requests, "own"):
                self.requests.own = self.compiled.create_infer_request()
            result = self.requests.own.infer({INPUT: pixels}, share_inputs=True, share_outputs=True)
        except RuntimeError as error:
            raise UserError(f"OpenVINO cannot run the model: {shorten(error)}") from error
        return {name: np.array(result[name]) for name in self.outputs}

    def split(self, parts: int) -> "OpenVinoEngine":
        return open_openvino(self.path, self.threads, parts)


def open_engine(path: str | Path) -> Engine:
    """Opens an exported file in the engine that its name says."""
    return open_onnx(path) if Path(path).suffix.lower() == ".onnx" else open_openvino(path)


def thread_count() -> int:
    """Threads of every engine: those of PyTorch if it is in use, else `OMP_NUM_THREADS` or cores.

    PyTorch follows the same variable, so that all engines share one setting.
    """
    if torch := sys.modules.get("torch"):
        return int(torch.get_num_threads())
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def open_onnx(path: str | Path, threads: int | None = None) -> OnnxEngine:
    """Opens an ONNX file for onnxruntime; `threads` is `thread_count()` by default."""
    onnxruntime = import_package("onnxruntime")
    check_file(Path(path))
    threads = threads or thread_count()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors arrive as exceptions
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime has one class per status, without a public base
        raise UserError(f"cannot open {path} with onnxruntime: {shorten(error)}") from error
    inputs = session.get_inputs()
    check_inputs(path, [entry.name for entry in inputs])
    stored = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
    return OnnxEngine(
        path=Path(path),
        threads=threads,
        session=session,
        metadata=parse_export_metadata(path, stored),
        pixels="uint8" if inputs[0].type == "tensor(uint8)" else "float32",
        outputs=tuple(entry.name for entry in session.get_outputs()),
        classes=next((o.shape[-1] for o in session.get_outputs() if o.name == "logits"), None),
        version=onnxruntime.__version__,
    )


def open_openvino(path: str | Path, threads: int | None = None, streams: int = 1) -> OpenVinoEngine:
    """Opens OpenVINO's .xml file, with its .bin file beside it; `threads` as in `open_onnx`.

    Up to `streams` concurrent calls share the threads.
    """
    openvino = import_package("openvino")
    check_file(Path(path))
    check_file(Path(path).with_suffix(".bin"))
    # float32: where the CPU has bfloat16 units, OpenVINO would compute in bfloat16 by itself
    threads = threads or thread_count()
    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": streams,
    }
    try:
        core = openvino_core()
        model = core.read_model(path)
        compiled = core.compile_model(model, "CPU", settings)
    except RuntimeError as error:
        raise UserError(f"cannot open {path} with OpenVINO: {shorten(error)}") from error
    check_inputs(path, [entry.get_any_name() for entry in compiled.inputs])
    outputs = tuple(entry.get_any_name() for entry in compiled.outputs)
    stored = model.get_rt_info([METADATA_KEY]).value if model.has_rt_info([METADATA_KEY]) else None
    return OpenVinoEngine(
        path=Path(path),
        threads=threads,
        compiled=compiled,
        metadata=parse_export_metadata(path, stored),
        pixels="uint8" if compiled.inputs[0].element_type.to_string() == "u8" else "float32",
        outputs=outputs,
        classes=(
            compiled.output("logits").partial_shape[1].get_length() if "logits" in outputs else None
        ),
        version=openvino.__version__.split("-")[0],
    )


@cache
def openvino_core() -> Any:
    """One for the whole process.

    OpenVINO's CPU plugin gives signal handlers a stack of its own and frees it with the last core;
    the next signal, such as Ctrl-C, would then crash the process.
    """
    return import_package("openvino").Core()


def check_file(path: Path) -> None:
    """Raises unless the file exists."""
    if not path.is_file():
        raise UserError(f"{path} does not exist or is not a file; give an exported model")


def check_inputs(path: str | Path, names: list[str]) -> None:
    """Raises unless the model has exactly the input of Vitrail's exports."""
    if names != [INPUT]:
        raise UserError(
            f"{path} has the inputs {', '.join(names) or 'none'}, expected only {INPUT}; "
            f"give a file that `vitrail export` wrote"
        )


def parse_export_metadata(path: str | Path, stored: str | None) -> dict[str, Any]:
    """The metadata that Vitrail wrote; {} if there are none."""
    try:
        metadata = parse_json(stored) if stored else {}
    except UserError as error:
        raise UserError(f"{path} has damaged metadata: {error}; export it again") from error
    if not isinstance(metadata, dict):
        raise UserError(f"{path} has damaged metadata; export it again")
    return metadata


def shorten(error: Exception) -> str:
    """The message of another library in one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
