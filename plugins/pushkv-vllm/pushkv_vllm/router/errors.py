"""What the router answers when it has no answer of a server: OpenAI's error object, with the right status."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class RequestFailed(Exception):
    """A request ends with this status and message; ``kind`` is OpenAI's error type."""

    def __init__(self, status: int, message: str, kind: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The error as JSON."""
        return error_body(self.status, str(self), self.kind)


def error_body(status: int, message: str, kind: str) -> bytes:
    """OpenAI's error object as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
