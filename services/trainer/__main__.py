"""`python -m services.trainer --config FILE [--set KEY=VALUE]…`, or the same under torchrun for several ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import warnings
from typing import TYPE_CHECKING

from services.trainer.config import TrainerConfig, load
from shared import log
from shared.errors import OpdError, run_main
from shared.model_folder import check_model_folder
from shared.redis_client import connect
from shared.service import check_port_free, health_thread, leave, stop_event

if TYPE_CHECKING:
    from services.trainer.ranks import Ranks
    from services.trainer.student import Student


def main() -> None:
    """Start this rank."""
    config = load()
    # OpenMP reads it when torch is imported: threads that wait must not spin on cores that other services need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # One queue to the GPU keeps the order in which Megatron overlaps communication with computing.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    warnings.filterwarnings("ignore", module="megatron|torch")
    rank = int(os.environ.get("RANK", "0"))
    log.configure(f"trainer/{rank}" if rank else "trainer")
    check_model_folder(config.student.model, setting="student.model")
    if rank:
        _follow(config)
        return
    check_port_free(config.trainer.host, config.trainer.port, setting="trainer.port")
    asyncio.run(_lead(config))
    leave(0)


def _ranks(config: TrainerConfig) -> tuple[Student, Ranks]:
    """This rank's model and the operations on it; torch and Megatron are imported only here, after the cheap checks."""
    from services.trainer.ranks import Ranks
    from services.trainer.student import Student

    student = Student(config)
    operations = {
        "step": student.step,
        "score": student.score,
        "push": student.push,
        "save": student.save,
        "load": student.load,
        "export": student.export,
    }
    return student, Ranks(operations)


def _follow(config: TrainerConfig) -> None:
    student, ranks = _ranks(config)
    # torchrun passes SIGTERM on to every rank; rank 0, which may want a last checkpoint from all, says when it is over.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ranks.follow()
    student.model.close()


async def _lead(config: TrainerConfig) -> None:
    from services.trainer.loop import Trainer

    # Until there is something to stop, SIGTERM ends the process at once: loading a model blocks the loop for long.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    status = {"ready": False, "reason": "loading the model"}
    client = await connect(config.redis.url)
    with health_thread(config.trainer.host, config.trainer.port, lambda: (status["ready"], status["reason"])):
        student, ranks = _ranks(config)
        stop = stop_event()
        status.update(ready=True, reason="training")
        try:
            await Trainer(config, student, ranks, client).run(stop)
        except OpdError:
            ranks.stop()  # the others wait for the next operation
            raise
        ranks.stop()
        student.model.close()
    await client.aclose()


if __name__ == "__main__":
    run_main(main)
