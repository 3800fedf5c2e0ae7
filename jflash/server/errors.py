"""Errors in OpenAI's form. This file knows neither routes nor the engine."""

import msgspec
from starlette.responses import Response

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A refusal with its HTTP status; `param` is the wrong field, `code` names the error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = headers

    def body(self) -> dict:
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, usual)
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A value of records, lists and plain types as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def unsupported(param: str, why: str) -> ApiError:
    """For a field that the server knows and cannot honour: to ignore it would change the answer."""
    return ApiError(f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


def invalid(param: str, why: str) -> ApiError:
    return ApiError(f"{param}: {why}", param=param, code="invalid_value")


def too_late(seconds: float) -> ApiError:
    """For an answer that the time limit has ended."""
    return ApiError(
        f"the request took longer than {seconds:g} seconds", status=408, code="timeout",
        headers={"x-should-retry": "false"},
    )  # fmt: skip
