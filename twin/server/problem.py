"""What is wrong with a request, as OpenAI's error object."""

from __future__ import annotations

from typing import Any

from twin.errors import TwinError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class Problem(TwinError):
    """A request that is not served: status, what is wrong, and which field of it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_s = retry_s  # when to try again, for Retry-After

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error")
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}
