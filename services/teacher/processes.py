"""The last resort against processes left behind: ends what the engine has started and not stopped itself."""

from __future__ import annotations

import psutil

from shared import log

_log = log.get(__name__)
_PATIENCE_S = 2.0


def end_children() -> None:
    """End all child processes of this one, first politely. An engine that was stopped while it started leaves some."""
    # multiprocessing's resource tracker ends by itself, after its parent, and not on SIGTERM
    children = [child for child in psutil.Process().children(recursive=True) if not _is_tracker(child)]
    for signal_name in ("terminate", "kill"):
        if not children:
            return
        for child in children:
            _log.warning("ending_child", extra=log.fields(pid=child.pid, how=signal_name))
            try:
                getattr(child, signal_name)()
            except psutil.NoSuchProcess:
                continue  # it was faster
        _, children = psutil.wait_procs(children, timeout=_PATIENCE_S)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return True
