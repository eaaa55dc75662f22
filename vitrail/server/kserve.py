"""KServe's Open Inference Protocol (v2): health, metadata, and `infer` with one BYTES input.

Images arrive as base64 strings in JSON, or raw in Triton's binary extension.
"""

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vitrail import __version__
from vitrail.errors import UserError
from vitrail.server.config import MAX_IMAGES
from vitrail.server.model import ServedModel
from vitrail.server.requests import (
    HttpError,
    check_image,
    decode_base64,
    image_error,
    read_body,
    unless_disconnected,
)
from vitrail.server.service import Service

INPUT = "image"
HEADER_LENGTH = "inference-header-content-length"  # bytes of JSON before the binary data


class Endpoints:
    """The routes below /v2."""

    def __init__(self, service: Service):
        self.service = service

    async def server(self, request: Request) -> Response:
        return JSONResponse(
            {"name": "vitrail", "version": __version__, "extensions": ["binary_tensor_data"]}
        )

    async def metadata(self, request: Request) -> Response:
        return JSONResponse(describe_tensors(self.find_model(request)))

    async def ready(self, request: Request) -> Response:
        model = self.find_model(request)
        if self.service.draining:
            raise HttpError(503, "the server is shutting down")
        try:
            await self.service.probe()
        except Exception as error:  # whatever it is: this server cannot answer now
            raise HttpError(503, "the model does not answer") from error
        return JSONResponse({"name": model.name, "ready": True})

    async def infer(self, request: Request) -> Response:
        model, batcher = self.find_model(request), self.service.batcher
        with batcher.admission.count_reading():
            body = await read_body(request, self.service.config)
        call, images = parse_call(body, request.headers.get(HEADER_LENGTH))
        del body
        for image in images:
            check_image(image)
        batcher.admission.admit()

        work = asyncio.gather(*(batcher.compute(model, image) for image in images))
        try:
            found = await unless_disconnected(request, work)
        except UserError as error:
            raise image_error(error) from error
        return JSONResponse(describe_results(model, [row for _, row in found], call))

    def find_model(self, request: Request) -> ServedModel:
        model, name = self.service.model, request.path_params["name"]
        version = request.path_params.get("version", model_version(model))
        if name != model.name or version != model_version(model):
            raise HttpError(
                404, f"this server has the model {model.name}, version {model_version(model)}"
            )
        return model


def model_version(model: ServedModel) -> str:
    return model.sha256[:12]


def describe_tensors(model: ServedModel) -> dict[str, Any]:
    classes = len(model.classifier.classes)
    return {
        "name": model.name,
        "versions": [model_version(model)],
        "platform": f"vitrail_{model.engine.split()[0]}",
        "inputs": [{"name": INPUT, "datatype": "BYTES", "shape": [-1]}],
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
            {"name": "probability", "datatype": "FP32", "shape": [-1]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, classes]},
        ],
        "parameters": {"sha256": model.sha256},
    }


def parse_call(body: bytes, header_length: str | None) -> tuple[dict[str, Any], list[bytes]]:
    """The JSON of a call, and its images."""
    if header_length is not None and not (
        header_length.isdecimal() and len(header_length) < 10 and int(header_length) <= len(body)
    ):
        raise HttpError(400, f"{HEADER_LENGTH} must be the number of bytes of JSON in the body")
    end = len(body) if header_length is None else int(header_length)
    try:
        call = json.loads(body[:end])
        (tensor,) = call["inputs"]
        kind, shape = tensor["datatype"], list(tensor["shape"])
        data = tensor.get("data")
        outputs = [entry["name"] for entry in call.get("outputs") or []]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise HttpError(
            400, "wanted JSON with one entry in inputs: name, datatype BYTES, shape [n], data"
        ) from error
    if kind != "BYTES":
        raise HttpError(400, f"the input {INPUT} has the datatype BYTES: one encoded image each")
    if data is None:
        images = split_binary(body[end:])
    elif isinstance(data, list):
        images = [expect_image(decode_base64(item)) for item in flatten(data)]
    else:
        raise HttpError(400, "data must be a list of base64 strings")
    if not 1 <= len(images) <= MAX_IMAGES or shape not in ([len(images)], [len(images), 1]):
        raise HttpError(
            400,
            f"{len(images)} images of shape {str(shape)[:40]}; "
            f"give 1 to {MAX_IMAGES} and the shape [{len(images)}]",
        )
    return {"id": call.get("id"), "outputs": outputs}, images


def flatten(data: list[Any]) -> list[Any]:
    """The items of a list, or of lists of one item, as clients send the shape (n, 1)."""
    return [item[0] if isinstance(item, list) and len(item) == 1 else item for item in data]


def expect_image(item: bytes | UserError) -> bytes:
    if isinstance(item, UserError):
        raise HttpError(400, str(item))
    return item


def split_binary(data: bytes) -> list[bytes]:
    """Elements of Triton's binary extension: each has its length in front, in four bytes."""
    images: list[bytes] = []
    at = 0
    while at < len(data) and len(images) <= MAX_IMAGES:
        size = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + size > len(data):
            raise HttpError(400, "the binary data end before the image that they announce")
        images.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return images


def describe_results(model: ServedModel, rows: list[Any], call: dict[str, Any]) -> dict[str, Any]:
    answers = [model.answer(row, top=1) for row in rows]
    probabilities = [model.probabilities(row) for row in rows]
    values = {
        "label": [one["label"] for one in answers],
        "probability": [one["probability"] for one in answers],
        "probabilities": [value for row in probabilities for value in row],
    }
    wanted = call["outputs"] or list(values)
    if unknown := set(wanted) - set(values):
        raise HttpError(
            400, f"unknown output {str(unknown.pop())[:40]}; known: {', '.join(values)}"
        )
    described = {one["name"]: one for one in describe_tensors(model)["outputs"]}
    outputs = [
        {
            **described[name],
            "shape": [len(rows), *described[name]["shape"][1:]],
            "data": values[name],
        }
        for name in wanted
    ]
    answer = {
        "model_name": model.name,
        "model_version": model_version(model),
        "outputs": outputs,
        "parameters": {"sha256": model.sha256},
    }
    return {**answer, "id": call["id"]} if isinstance(call["id"], str) else answer
