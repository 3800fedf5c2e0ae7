"""What a server says of itself without its engine: its page, its model and its version.

This file knows the routes of these alone; where they run, `app.state.about` is an `About`.
"""

from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jflash.server.errors import ApiError, json_response

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class About(NamedTuple):
    """What stays as long as a server runs."""

    name: str  # of the model
    version: str
    created: int  # seconds since 1970
    max_context: int  # tokens of a request

    def check_model(self, name: str | None) -> None:
        """ApiError for a model that the server does not have."""
        if name not in (None, self.name):
            raise ApiError(
                f"the model {name!r} does not exist: this server has {self.name!r}",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip

    def model(self) -> dict:
        """The model in OpenAI's form, with vLLM's length."""
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "jflash",
            "max_model_len": self.max_context,
        }  # fmt: skip


def _about(request: Request) -> About:
    return request.app.state.about


def _page(_: Request) -> Response:
    page = files("jflash.server").joinpath("page.html").read_bytes()
    headers = {"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)


async def _models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_about(request).model()]})


async def _model(request: Request) -> Response:
    about = _about(request)
    about.check_model(request.path_params["name"])
    return json_response(about.model())


async def _version(request: Request) -> Response:
    return json_response({"version": _about(request).version})


ROUTES = [
    Route("/", _page),
    Route("/v1/models", _models),
    Route("/v1/models/{name:path}", _model),
    Route("/version", _version),
]
