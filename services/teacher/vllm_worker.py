"""What runs inside vLLM's worker process, mixed into its Worker as `worker_extension_cls`."""

from __future__ import annotations

from shared.service import end_with


class WorkerExtension:
    """Methods that the teacher calls on the worker."""

    def opd_end_with(self, pid: int) -> None:
        """End this process when the teacher's process `pid` is gone, which vLLM's engine does not do by itself."""
        end_with(pid)
