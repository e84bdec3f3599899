"""What one replica of one teacher needs to know, from `--config FILE --name NAME` or from options alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from shared.config import Port, Section, ServiceName, TeacherSection, parse
from shared.errors import ConfigError
from shared.model_folder import check_model_folder
from shared.overrides import add_config_arguments
from shared.parts import TeacherPart, load_part
from shared.service_url import ServiceUrl, join


class TeacherConfig(Section):
    """One replica: the teacher's name and settings, and the port of this replica.

    Attributes:
        gateways: where this replica registers itself.
        advertise: the address that it registers.
    """

    name: ServiceName
    port: Port
    teacher: TeacherSection
    gateways: tuple[ServiceUrl, ...] = ()
    advertise: ServiceUrl | None = None


def load(argv: Sequence[str] | None = None) -> TeacherConfig:
    """The configuration of a command line, checked as far as it can be without an engine.

    Raises:
        ConfigError: unknown keys or teachers, a missing or unreadable model folder.
    """
    arguments = _parser().parse_args(argv)
    settings = {name: value for name in ("model", "dtype", "host") if (value := getattr(arguments, name)) is not None}
    if arguments.config is not None:
        config = _from_run(arguments, settings)
        setting = f"teachers.{config.name}.model"
    else:
        config = _from_options(arguments, settings)
        setting = "--model"
    check_model_folder(config.teacher.model, setting=setting)
    return config


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.teacher", description="Serve one teacher replica.")
    parser.add_argument("--name", required=True, help="the teacher's name, as requests and routes say it")
    parser.add_argument(
        "--model", type=Path, help="Hugging Face model folder (config.json, tokenizer.json, *.safetensors)"
    )
    parser.add_argument("--port", type=int, help="port to listen on (default: teachers.NAME.ports[REPLICA])")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--dtype", help="float32 or bfloat16")
    parser.add_argument(
        "--register", action="append", default=[], metavar="URL", help="a gateway to register with; repeat it for more"
    )
    parser.add_argument(
        "--advertise", metavar="URL", help="where gateways reach this replica (default: http://HOST:PORT)"
    )
    parser.add_argument("--replica", type=int, default=0, help="which of the teacher's ports this process takes")
    add_config_arguments(parser, required=False)
    return parser


def _from_run(arguments: argparse.Namespace, settings: dict[str, Any]) -> TeacherConfig:
    overrides = [*arguments.overrides, *(f"teachers.{arguments.name}.{key}={settings[key]}" for key in settings)]
    teachers = load_part(TeacherPart, arguments.config, overrides).teachers
    if arguments.name not in teachers:
        known = ", ".join(sorted(teachers))
        raise ConfigError(f"--name {arguments.name}: {arguments.config} has no such teacher; known teachers: {known}")
    return _build(arguments, teachers[arguments.name])


def _from_options(arguments: argparse.Namespace, settings: dict[str, Any]) -> TeacherConfig:
    if "model" not in settings:
        raise ConfigError("--model PATH is missing (or --config FILE, which names the teacher's model)")
    for override in arguments.overrides:
        key, sign, text = override.partition("=")
        if not sign:
            raise ConfigError(f"--set {override}: write it as key=value, e.g. max_model_len=1024")
        if "." in key:
            raise ConfigError(
                f"--set {override}: without --config write the teacher's key alone, e.g. max_model_len=1024"
            )
        try:
            settings[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override}: the value is not YAML") from error
    return _build(arguments, parse(TeacherSection, settings, origin="command line"))


def _build(arguments: argparse.Namespace, teacher: TeacherSection) -> TeacherConfig:
    port = arguments.port
    if port is None:
        if not 0 <= arguments.replica < len(teacher.ports):
            raise ConfigError(
                f"--replica {arguments.replica}: teacher {arguments.name!r} has {len(teacher.ports)} ports, "
                "count from 0 or add one to teachers.NAME.ports"
            )
        port = teacher.ports[arguments.replica]
    fields = {"name": arguments.name, "port": port, "teacher": teacher.model_dump()}
    fields |= {"gateways": arguments.register, "advertise": arguments.advertise}
    if arguments.register and arguments.advertise is None:
        if teacher.host in ("0.0.0.0", "::"):
            raise ConfigError(f"--register needs --advertise http://HOST:PORT: nobody can call {teacher.host}")
        fields["advertise"] = join("http", teacher.host, port)
    return parse(TeacherConfig, fields, origin="command line")
