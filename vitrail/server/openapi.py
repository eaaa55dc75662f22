"""The OpenAPI document of the server, from one table of its endpoints."""

from typing import Any

from vitrail import __version__
from vitrail.insight.methods import BEST, METHODS
from vitrail.server.config import MAX_IMAGES
from vitrail.server.model import ServedModel

PARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {  # name: description, schema
    "top": ("number of most likely classes in the answer", {"type": "integer", "minimum": 1}),
    "class": ("name or index of a class", {"type": "string"}),
    "mask": ("patches to fill with the mean colour, such as 0,1,17", {"type": "string"}),
    "cropped": ("1: the image is the model's input, not to be resized", {"enum": ["0", "1"]}),
    "crop": ("1: answer with the model's input as a data URI", {"enum": ["0", "1"]}),
    "method": ("how to explain", {"enum": [BEST, *METHODS]}),
    "layer": ("block, counted from 0, or from the end as -1", {"type": "integer"}),
    "head": ("attention head, counted from 0, or mean", {"type": "string"}),
    "row": ("whose attention: cls, dist, mean, all, or a patch number", {"type": "string"}),
    "format": ("packed: all layers and heads, quantized to bytes", {"enum": ["packed"]}),
    "name": ("name of the model", {"type": "string"}),
    "version": ("version of the model", {"type": "string"}),
}
IMAGE = {"*/*": {"schema": {"type": "string", "format": "binary"}}}
IMAGE_OR_LIST = {
    **IMAGE,
    "application/json": {
        "schema": {
            "type": "array",
            "maxItems": MAX_IMAGES,
            "items": {"type": "string", "contentEncoding": "base64"},
        }
    },
}
JSON_OBJECT = {"application/json": {"schema": {"type": "object"}}}
MODEL = "/v2/models/{name}"
VERSION = MODEL + "/versions/{version}"

ENDPOINTS: list[tuple[str, str, str, tuple[str, ...], dict[str, Any] | None]] = [
    # method, path, summary, query parameters, body
    (
        "post",
        "/predict",
        "Classify one image, or a list",
        ("top", "class", "mask", "cropped", "crop"),
        IMAGE_OR_LIST,
    ),
    ("post", "/explain", "Which patches support a class", ("class", "method", "cropped"), IMAGE),
    ("post", "/attention", "Attention maps", ("layer", "head", "row", "format", "cropped"), IMAGE),
    ("post", "/features", "The input of the head", ("cropped",), IMAGE),
    ("get", "/model", "What the model file says", (), None),
    ("get", "/examples", "Validation images of the run", (), None),
    ("get", "/live", "Whether the process answers", (), None),
    ("get", "/ready", "Whether the model answers: computes a stored image", (), None),
    ("get", "/metrics", "Numbers for Prometheus", (), None),
    ("get", "/openapi.json", "This document", (), None),
    ("get", "/", "The page", (), None),
    ("get", "/v2", "KServe: server metadata", (), None),
    ("get", "/v2/health/live", "KServe: liveness", (), None),
    ("get", "/v2/health/ready", "KServe: readiness", (), None),
    ("get", MODEL, "KServe: model metadata", (), None),
    ("get", f"{MODEL}/ready", "KServe: model readiness", (), None),
    ("post", f"{MODEL}/infer", "KServe: inference with one BYTES input", (), JSON_OBJECT),
    ("get", VERSION, "KServe: model metadata", (), None),
    ("get", f"{VERSION}/ready", "KServe: model readiness", (), None),
    ("post", f"{VERSION}/infer", "KServe: inference with one BYTES input", (), JSON_OBJECT),
]
OTHER_TYPES = {"/": "text/html", "/metrics": "text/plain"}
ERRORS = {
    "400": "the request is malformed",
    "401": "a token is required",
    "408": "the body did not arrive in time",
    "413": "the body or the image is too large",
    "415": "the body is not an image",
    "422": "the image is damaged",
    "429": "the server is busy: wait as long as Retry-After says",
    "501": "this model cannot be explained",
    "503": "the server is not ready",
}
COMMON = ("400", "401")
BODY = (*COMMON, "408", "413", "415", "422", "429")


def describe_api(model: ServedModel) -> dict[str, Any]:
    """The document that `/openapi.json` answers."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, query, body in ENDPOINTS:
        operation = describe_endpoint(path, summary, query, body)
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Vitrail: {model.name}",
            "version": __version__,
            "description": "Send an image as the body of POST /predict.",
        },
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def describe_endpoint(
    path: str, summary: str, query: tuple[str, ...], body: dict[str, Any] | None
) -> dict[str, Any]:
    in_path = [name for name in ("name", "version") if f"{{{name}}}" in path]
    kind = OTHER_TYPES.get(path, "application/json")
    errors: tuple[str, ...] = BODY if body else COMMON
    errors += ("501",) if path in ("/explain", "/attention", "/features") else ()
    errors += ("503",) if path.endswith("/ready") else ()
    operation: dict[str, Any] = {
        "summary": summary,
        "parameters": [
            *(describe_parameter(name, "path", required=True) for name in in_path),
            *(describe_parameter(name, "query", required=False) for name in query),
        ],
        "responses": {
            "200": {"description": "the answer", "content": {kind: {}}},
            **{status: {"description": ERRORS[status]} for status in errors},
        },
    }
    return {**operation, "requestBody": {"required": True, "content": body}} if body else operation


def describe_parameter(name: str, place: str, *, required: bool) -> dict[str, Any]:
    description, schema = PARAMETERS[name]
    return {
        "name": name,
        "in": place,
        "required": required,
        "description": description,
        "schema": schema,
    }
