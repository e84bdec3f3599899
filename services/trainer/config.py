"""What the trainer needs of a run's configuration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shared.overrides import add_config_arguments
from shared.parts import TrainerPart, load_part

TrainerConfig = TrainerPart


def load(argv: Sequence[str] | None = None) -> TrainerConfig:
    """Read the command line. Raises ConfigError for anything that cannot work."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer", description="Trains the student.")
    add_config_arguments(parser, required=True)
    arguments = parser.parse_args(argv)
    return load_part(TrainerConfig, arguments.config, arguments.overrides)
