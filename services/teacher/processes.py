"""The last resort against processes left behind: ends what the engine has started and not stopped itself."""

from __future__ import annotations

import psutil

from shared import log

_log = log.get(__name__)
_PATIENCE_S = 2.0


def end_children() -> None:
    """End all child processes of this one, first politely. An engine that was stopped while it started leaves some."""
    children = psutil.Process().children(recursive=True)
    for signal_name in ("terminate", "kill"):
        children = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        if not children:
            return
        for child in children:
            _log.warning("ending_child", extra=log.fields(pid=child.pid, how=signal_name))
            try:
                getattr(child, signal_name)()
            except psutil.NoSuchProcess:
                continue  # it was faster
        _, children = psutil.wait_procs(children, timeout=_PATIENCE_S)
