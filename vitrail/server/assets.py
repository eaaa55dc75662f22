"""The page and its files, read once and served from memory."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vitrail.display import page as display_page

PAGE = Path(__file__).parent / "page"
LOOK = Path(display_page.__file__).parent / "look.css"  # the style of all pages
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def load_assets() -> list[Route]:
    """A route for each file of the page; no path is ever made from a request."""
    routes = [asset_route("/", PAGE / "index.html"), asset_route("/assets/look.css", LOOK)]
    for file in sorted(PAGE.iterdir()):
        if file.suffix in TYPES and file.name != "index.html":
            routes.append(asset_route(f"/assets/{file.name}", file))
    return routes


def asset_route(path: str, file: Path) -> Route:
    content, kind = file.read_bytes(), TYPES[file.suffix]

    async def serve_asset(request: Request) -> Response:
        return Response(content, media_type=kind)

    return Route(path, serve_asset)
