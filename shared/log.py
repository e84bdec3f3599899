"""Structured logs: one JSON object a line on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_FIELDS = "opd_fields"
_bound: ContextVar[dict[str, Any]] = ContextVar("bound")


@contextmanager
def bound(**values: Any) -> Iterator[None]:
    """Adds values to every line that is logged in the course of the block, also by tasks begun in it."""
    token = _bound.set({**_bound.get({}), **values})
    try:
        yield
    finally:
        _bound.reset(token)


def fields(**values: Any) -> dict[str, Any]:
    """Structured values of a log line: `log.info("pushed", extra=fields(version=3))`."""
    return {_FIELDS: values}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object with time, level, service, event and the structured fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        created = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{created}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self.service,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update(_bound.get({}))
        line.update(getattr(record, _FIELDS, {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(service: str, level: str | None = None) -> None:
    """Send all logs of this process to stderr as JSON lines.

    Args:
        service: name shown in every line, e.g. "teacher/math".
        level: "debug", "info", "warning"; default is the environment variable OPD_LOG_LEVEL, then "info".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel((level or os.environ.get("OPD_LOG_LEVEL", "info")).upper())
    for noisy in ("httpx", "httpcore", "uvicorn.access", "megatron"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def get(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)
