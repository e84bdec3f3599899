"""Every error that crosses a module border, in one tree.

OpdError
├── ConfigError     the run cannot start: what is wrong, where, and the mend (exit code 2)
├── Problem         an HTTP answer, RFC 9457 problem details
├── WireError       bytes that are not what they claim to be
├── PayloadError    a trajectory that must not be trained on
├── TeacherError    a teacher could not score
├── WeightsError    a weight push that must not be loaded
├── LeaseLost       a prompt that somebody else has by now
├── RunFailed       the run cannot go on; the reason is stored in the run's state
└── EngineDied      an engine process has ended; a new start may help
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

EXIT_CONFIG = 2
"""Exit status of a process that refused to start."""

EXIT_FAILED = 3
"""Exit status of a process whose run failed for a reason that a new start would not change. Any other end is an
accident (1 is what Python exits with after an uncaught exception)."""


SAID_CONFIG, SAID_FAILED, SAID_DIED = "error: ", "failed: ", "died: "
"""How the last line of such a process begins, of an engine's death in the third place; the reason follows."""


class OpdError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(OpdError):
    """The configuration, a file that it names, or the surroundings make a start impossible."""


class WireError(OpdError):
    """A body, array or frame whose bytes do not match what it declares."""


class PayloadError(OpdError):
    """A trajectory that must not be trained on.

    Attributes:
        trajectory_id: the id, or the stream entry's id where none could be read.
    """

    def __init__(self, trajectory_id: str, reason: str) -> None:
        super().__init__(f"trajectory {trajectory_id}: {reason}")
        self.trajectory_id = trajectory_id
        self.reason = reason


class TeacherError(OpdError):
    """A teacher did not score a request.

    Attributes:
        status: HTTP status, 0 when no answer came at all.
        retry_after_s: seconds after which another try makes sense, None when it never does.
    """

    def __init__(self, status: int, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"teacher answered {status}: {reason}" if status else reason)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class WeightsError(OpdError):
    """A weight push is damaged, out of order, or serves other logprobs than the trainer computed."""


class LeaseLost(OpdError):
    """A prompt's lease ran out and the prompt belongs to somebody else now."""


class RunFailed(OpdError):
    """The run cannot go on."""


class EngineDied(OpdError):
    """The engine behind a service has died; the service ends so that it gets started again."""


_PROBLEM_TYPES: dict[str, tuple[int, str]] = {
    "opd:malformed": (400, "Malformed request"),
    "opd:unauthorized": (401, "No or wrong API key"),
    "opd:forbidden": (403, "Forbidden"),
    "opd:unknown-teacher": (404, "Unknown teacher"),
    "opd:unknown-replica": (404, "Unknown replica"),
    "opd:conflict": (409, "Conflict"),
    "opd:too-large": (413, "Too long or too large"),
    "opd:media-type": (415, "Unsupported media type"),
    "opd:invalid": (422, "Invalid value"),
    "opd:overloaded": (429, "Overloaded"),
    "opd:internal": (500, "Internal error"),
    "opd:unavailable": (503, "Unavailable"),
    "opd:deadline": (504, "Deadline exceeded"),
}


class Problem(OpdError):
    """An HTTP error as RFC 9457 problem details.

    Attributes:
        type: a stable identifier, one of the table above; it decides status and title.
        retry_after_s: value of the Retry-After header, in seconds.
    """

    content_type = "application/problem+json"

    def __init__(self, type_: str, detail: str, *, retry_after_s: float | None = None, **extra: Any) -> None:
        self.type = type_
        self.status, self.title = _PROBLEM_TYPES[type_]
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.extra = extra
        super().__init__(f"{self.status} {type_}: {detail}")

    def to_dict(self) -> dict[str, Any]:
        """The problem document."""
        return {"type": self.type, "title": self.title, "status": self.status, "detail": self.detail, **self.extra}

    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def run_main(main: Callable[[], None]) -> None:
    """Run a main function; a refusal to start is one line on stderr and status 2, a failed run status 3."""
    try:
        main()
    except ConfigError as error:
        sys.stderr.write(f"{SAID_CONFIG}{error}\n")
        sys.exit(EXIT_CONFIG)
    except RunFailed as error:
        sys.stderr.write(f"{SAID_FAILED}{error}\n")
        sys.exit(EXIT_FAILED)
    except EngineDied as error:
        sys.stderr.write(f"{SAID_DIED}{error}\n")
        sys.exit(1)
