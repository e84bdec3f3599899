"""What the rollout worker needs of a run's configuration."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from shared.overrides import add_config_arguments
from shared.parts import RolloutPart, load_part


class RolloutConfig(RolloutPart):
    """A worker's part of the run, and what follows from it."""

    @property
    def num_prompts(self) -> int:
        """Prompts that the whole run trains on."""
        return -(-self.run.steps * self.trainer.batch_size // self.rollout.n)


@dataclass(frozen=True)
class Arguments:
    """A worker's command line. `worker` tells workers of one run apart."""

    config: RolloutConfig
    worker: str
    port: int


def load(argv: Sequence[str] | None = None) -> Arguments:
    """Read the command line. Raises ConfigError for anything that cannot work."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout", description="Samples from the student.")
    add_config_arguments(parser, required=True)
    parser.add_argument("--worker-id", default=None, help="name of this worker, unique in the run")
    parser.add_argument(
        "--port", type=int, default=None, help="port of /healthz /readyz /metrics; default rollout.port"
    )
    arguments = parser.parse_args(argv)
    config = load_part(RolloutConfig, arguments.config, arguments.overrides)
    worker = arguments.worker_id or f"{socket.gethostname()}-{os.getpid()}"
    return Arguments(config, worker, arguments.port or config.rollout.port)
