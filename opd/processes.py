"""Processes that `opd up` starts: each in a process group of its own, so that nothing of it can be left behind."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import EXIT_CONFIG, EXIT_FAILED, SAID_CONFIG, SAID_DIED, SAID_FAILED

STOP_TIMEOUT_S = 15.0
_MAX_RESTARTS = 3
_HEALTHY_S = 600.0
_MAX_READ_BYTES = 2**20
_PR_SET_PDEATHSIG = 1
_EXCEPTION = re.compile(r"\b[A-Za-z_][\w.]*(?:Error|Exception)(?:: .*|$)")
_RECORD_FRAME = ("time", "level", "service", "logger", "event", "exception")


@dataclass
class Process:
    """A service's process, its log file and how often it was started again."""

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    _log_start: int = 0
    _started_at: float = 0.0
    _popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start or start again; output is appended to the log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._started_at = time.monotonic()
        with self.log.open("ab") as out:
            self._popen = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._popen.pid if self._popen else 0

    def status(self) -> int | None:
        """Exit status, None while it runs (negative: ended by that signal)."""
        return self._popen.poll() if self._popen else None

    def may_restart(self) -> bool:
        """Whether its end is worth another try: not after a refusal to start or a reasoned failure.

        torchrun ends with status 1 whatever its ranks end with, so what they said counts as much as the status.
        """
        prefix, _ = self._last_words()
        if self.status() in (EXIT_CONFIG, EXIT_FAILED) or prefix in (SAID_CONFIG, SAID_FAILED):
            return False
        return self.restarts < _MAX_RESTARTS or time.monotonic() - self._started_at > _HEALTHY_S

    def restart(self) -> None:
        """Start again after an unexpected end. One that ran well for a while has all its tries again."""
        healthy = time.monotonic() - self._started_at > _HEALTHY_S
        self.restarts = 1 if healthy else self.restarts + 1
        self._kill_group()
        self.start()

    def terminate(self) -> None:
        """Ask it to stop."""
        if self._popen and self._popen.poll() is None:
            self._popen.terminate()

    def wait(self, deadline: float) -> bool:
        """Wait until `deadline` (monotonic seconds), then kill what is left of the group; False when it had to."""
        clean = True
        if self._popen:
            try:
                self._popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                clean = False
            self._kill_group()
            self._popen.wait()
        return clean

    def complaint(self) -> str:
        """The reason that the process gave before it ended, else the last error in its log and where to read on."""
        prefix, reason = self._last_words()
        if prefix:
            return reason
        lines = [line.strip() for line in self._said() if line.strip()]
        errors = (found for line in reversed(lines) if (found := error_in(line)))
        last = next(errors, lines[-1] if lines else "it said nothing")
        return f"{last[:300]} (exit status {self.status()}, log: {self.log})"

    def _last_words(self) -> tuple[str, str]:
        """How `run_main` began its last line, and the reason in it; two empty texts when there is none."""
        for line in reversed(self._said()):
            for prefix in (SAID_CONFIG, SAID_FAILED, SAID_DIED):
                if line.startswith(prefix):
                    return prefix, line.removeprefix(prefix)
        return "", ""

    def _said(self) -> list[str]:
        """Lines of the log since the last start."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, self.log.stat().st_size - _MAX_READ_BYTES))
            return log.read().decode(errors="replace").splitlines()

    def _kill_group(self) -> None:
        if self._popen is None:
            return
        try:
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def error_in(line: str) -> str | None:
    """What a log line says of an error: one of our records of that level, or the end of a traceback. Else None."""
    try:
        record = json.loads(line)
    except ValueError:
        found = _EXCEPTION.search(line)
        return found.group() if found else None
    if not isinstance(record, dict) or record.get("level") not in ("error", "critical"):
        return None
    details = [f"{key}={value}" for key, value in record.items() if key not in _RECORD_FRAME]
    exception = str(record.get("exception", "")).strip().splitlines()[-1:]
    return " ".join([str(record.get("event")), *details, *exception])


def stop_all(processes: Sequence[Process]) -> list[str]:
    """Stop all at once; returns the names of those that did not stop in time and were killed."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    return [process.name for process in processes if not process.wait(deadline)]


def _die_with_parent() -> None:
    """Runs in the child: the kernel ends it when `opd up` itself is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
