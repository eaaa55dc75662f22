"""The endpoints: what each one reads, computes and answers."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from vitrail.errors import UserError
from vitrail.server import kserve
from vitrail.server.admission import Refusal
from vitrail.server.assets import load_assets
from vitrail.server.explaining import NotExplainable
from vitrail.server.model import ModelReplaced
from vitrail.server.openapi import describe_api
from vitrail.server.requests import (
    HttpError,
    check_image,
    check_parameters,
    clean,
    image_error,
    image_options,
    number_parameter,
    read_body,
    split_images,
    switch_parameter,
    unless_disconnected,
)
from vitrail.server.service import Service

Handler = Callable[[Request], Awaitable[Response]]

TOP = 5  # classes in an answer
MAX_TOP = 1_000_000  # a model with fewer classes answers all of them
INTERNAL = "internal error; the log of the server says more"


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return Response(body, status, headers, media_type="application/json")


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return json_response({"error": message}, status, headers)


def routing_error(error: HTTPException) -> Response:
    """The answer to a path or method that no route has."""
    headers = dict(error.headers or {})
    if "Allow" in headers:  # in the order of a set, which differs between processes
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    message = {
        404: "no such endpoint; openapi.json lists them",
        405: f"this endpoint takes {headers.get('Allow', 'other')} requests",
    }.get(error.status_code, error.detail)
    return error_response(error.status_code, message, headers)


class Endpoints:
    """One method for each route; `openapi` describes them."""

    def __init__(self, service: Service):
        self.service = service

    async def predict(self, request: Request) -> Response:
        check_parameters(request, ("top", "class", "mask", "cropped", "crop"))
        service, model = self.service, self.service.model
        top = number_parameter(request, "top", TOP, 1, MAX_TOP)
        index = self.class_parameter(request)
        options, crop = image_options(request), switch_parameter(request, "crop")
        with service.admission.count_reading():
            body = await read_body(request, service.config)
        images = split_images(body)

        async def answer(image: bytes) -> dict[str, Any]:
            check_image(image)
            try:
                x, row = await service.batcher.compute(model, image, options)
            except UserError as error:
                raise image_error(error) from error
            found = model.answer(row, top, index)
            return {**found, "crop": model.crop_uri(x)} if crop else found

        service.admission.admit()
        if images is None:
            return json_response(await unless_disconnected(request, answer(body)))
        del body

        async def answer_or_error(image: bytes | UserError) -> dict[str, Any]:
            try:
                if isinstance(image, UserError):
                    raise image
                return await answer(image)
            except (HttpError, UserError) as error:
                return {"error": clean(error), "sha256": model.sha256}

        work = asyncio.gather(*map(answer_or_error, images))
        return json_response(await unless_disconnected(request, work))

    async def explain(self, request: Request) -> Response:
        check_parameters(request, ("class", "method", "cropped"))
        from vitrail.insight.methods import BEST, METHODS

        method = request.query_params.get("method") or BEST
        if method not in (BEST, *METHODS):
            raise HttpError(400, f"unknown method; choose one of {', '.join((BEST, *METHODS))}")
        index = self.class_parameter(request)
        explainer, model = self.service.explainer, self.service.model
        return await self.in_lane(
            request, lambda body, cropped: explainer.explain(model, body, cropped, index, method)
        )

    async def attention(self, request: Request) -> Response:
        check_parameters(request, ("layer", "head", "row", "format", "cropped"))
        explainer, model, query = self.service.explainer, self.service.model, request.query_params
        if query.get("format", "") not in ("", "packed"):
            raise HttpError(400, "unknown format; leave it out, or give packed")
        if query.get("format"):
            return await self.in_lane(
                request, lambda body, cropped: explainer.packed_attention(model, body, cropped)
            )
        size = model.architecture or {"depth": 1, "heads": 1}
        patches = model.grid[0] * model.grid[1] if model.grid else 1
        layer = number_parameter(request, "layer", -1, -size["depth"], size["depth"] - 1)
        mean = query.get("head", "") in ("", "mean")
        head = None if mean else number_parameter(request, "head", 0, 0, size["heads"] - 1)
        row: str | int | None = query.get("row") or None
        if row not in (None, "cls", "dist", "mean", "all"):
            row = number_parameter(request, "row", 0, 0, patches - 1)
        return await self.in_lane(
            request,
            lambda body, cropped: explainer.attention(
                model, body, cropped, layer=layer, head=head, row=row
            ),
        )

    async def features(self, request: Request) -> Response:
        check_parameters(request, ("cropped",))
        explainer, model = self.service.explainer, self.service.model
        return await self.in_lane(
            request, lambda body, cropped: explainer.features(model, body, cropped), "features"
        )

    async def in_lane(
        self, request: Request, compute: Callable[[bytes, bool], dict[str, Any]], output: str = ""
    ) -> Response:
        """Reads one image and computes the answer in the thread of explanations.

        An exported model needs `output` among its outputs.
        """
        self.service.explainer.check(self.service.model, output)
        self.service.explainer.admit()
        cropped = switch_parameter(request, "cropped")
        body = await read_body(request, self.service.config)
        check_image(body)
        self.service.explainer.admit()
        work = self.service.explainer.run(lambda: compute(body, cropped))
        try:
            return json_response(await unless_disconnected(request, work))
        except ModelReplaced as error:
            raise HttpError(503, str(error)) from error
        except UserError as error:
            raise image_error(error) from error

    async def model(self, request: Request) -> Response:
        return json_response(self.service.describe())

    async def examples(self, request: Request) -> Response:
        return json_response(self.service.examples)

    async def live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        if self.service.draining:
            return error_response(503, "the server is shutting down")
        try:
            seconds = await self.service.probe()
        except Exception:  # whatever it is: this server cannot answer now
            return error_response(503, "the model does not answer")
        answer = {"ready": True, "seconds": round(seconds, 4), "sha256": self.service.model.sha256}
        return json_response(answer)

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        return json_response(describe_api(self.service.model))

    def class_parameter(self, request: Request) -> int | None:
        name = request.query_params.get("class") or None
        if name is None:
            return None
        try:
            return self.service.model.classifier.index(name[:1000])
        except UserError as error:
            raise HttpError(400, clean(error)) from error


def build_app(service: Service) -> Starlette:
    """The routes of a server."""
    own, v2 = Endpoints(service), kserve.Endpoints(service)
    model = "/v2/models/{name}"
    routes = [
        Route("/predict", own.predict, methods=["POST"]),
        Route("/explain", own.explain, methods=["POST"]),
        Route("/attention", own.attention, methods=["POST"]),
        Route("/features", own.features, methods=["POST"]),
        Route("/model", own.model),
        Route("/examples", own.examples),
        Route("/live", own.live),
        Route("/ready", own.ready),
        Route("/metrics", own.metrics),
        Route("/openapi.json", own.openapi),
        Route("/v2", v2.server),
        Route("/v2/health/live", own.live),
        Route("/v2/health/ready", own.ready),
        Route(model, v2.metadata),
        Route(f"{model}/versions/{{version}}", v2.metadata),
        Route(f"{model}/ready", v2.ready),
        Route(f"{model}/versions/{{version}}/ready", v2.ready),
        Route(f"{model}/infer", v2.infer, methods=["POST"]),
        Route(f"{model}/versions/{{version}}/infer", v2.infer, methods=["POST"]),
        *load_assets(),
    ]
    handlers: dict[Any, Any] = {
        HttpError: lambda _, error: error_response(error.status, error.message, error.headers),
        HTTPException: lambda _, error: routing_error(error),
        Refusal: lambda _, error: error_response(
            429, str(error), {"retry-after": str(error.retry_after)}
        ),
        NotExplainable: lambda _, error: error_response(501, str(error)),
        UserError: lambda _, error: error_response(500, clean(error)),
        Exception: lambda _, error: error_response(500, INTERNAL),
        ClientDisconnect: lambda _, error: error_response(499, "the caller hung up"),
    }
    return Starlette(routes=routes, exception_handlers=handlers)
