"""Formats log lines, as text for people or JSON for programs, with the context of the current work."""

import datetime
import json
import logging
from typing import Literal

from services.common.telemetry.context import fields

LogFormat = Literal["text", "json"]


def formatter(kind: LogFormat, service: str = "") -> logging.Formatter:
    """Returns a formatter of one line per record: time, level, service, logger, message, and run, step and group."""
    return _Json(service) if kind == "json" else _Text(service)


class _Text(logging.Formatter):
    def __init__(self, service: str):
        super().__init__(" ".join(filter(None, ("%(asctime)s %(levelname).1s", service, "%(name)s: %(message)s"))))

    def formatMessage(self, record: logging.LogRecord) -> str:
        known = " ".join(f"{name}={value}" for name, value in fields().items())
        return super().formatMessage(record) + (f"  [{known}]" if known else "")


class _Json(logging.Formatter):
    def __init__(self, service: str):
        super().__init__()
        self._service = {"service": service} if service else {}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, **self._service, "logger": record.name}
        line |= {"message": record.getMessage(), **fields()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
