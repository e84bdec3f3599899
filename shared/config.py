"""The configuration of a run: one YAML file, checked before anything starts. Every default of the system lives here.

`load_run` reads the file, applies `--set dotted.key=value` overrides and validates. A service gets its part of it only
(`shared/parts.py`). Relative paths are relative to the working directory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.config_faults import explain, nearest
from shared.errors import ConfigError
from shared.overrides import apply_override

Dtype = Literal["float32", "bfloat16"]
LossName = Literal["forward_kl", "policy_gradient"]
Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
ServiceName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class RunSection(Section):
    """Name, place and length of the run."""

    name: ServiceName
    dir: Path
    steps: Positive
    seed: int = 0


class StudentSection(Section):
    """The model that learns."""

    model: Path
    dtype: Dtype = "bfloat16"
    max_model_len: Positive


class ReplicasSection(Section):
    """Where the replicas of one teacher listen, one per port.

    `discovery` says where the gateway finds them: at `host` and `ports`, at every address behind the DNS name `host`,
    or nowhere until they register themselves.
    """

    host: str = "127.0.0.1"
    ports: list[Port] = Field(default=[8101], min_length=1)
    discovery: Literal["ports", "dns", "register"] = "ports"


class TeacherSection(ReplicasSection):
    """One teacher, and what its opinion counts for in the loss."""

    model: Path
    dtype: Dtype = "bfloat16"
    max_model_len: Positive = 4096
    max_top_k: Positive = 256
    max_num_batched_tokens: Annotated[int, Field(ge=32, le=2048)] = 2048
    max_num_seqs: Positive = 64
    max_queued_tokens: Positive = 262_144
    max_body_bytes: Positive = 16 * 2**20
    kv_cache_bytes: Positive = 256 * 2**20
    threads: Positive = 1
    loss: LossName = "forward_kl"
    coefficient: Annotated[float, Field(gt=0)] = 1.0


class SourceSection(Section):
    """A source of prompts: a JSONL file, or a task that generates them.

    Its prompts are routed by `data_source`; `weight` is its share in the mixture. Beside a file, `task` names what
    checks its answers.
    """

    data_source: str
    file: Path | None = None
    task: str | None = None
    params: dict[str, Any] = {}
    size: Positive = 1000
    format: Literal["raw", "chat"] = "raw"
    system_prompt: str | None = None
    weight: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _one_origin(self) -> SourceSection:
        if self.file is None and self.task is None:
            raise ValueError("give `file` (JSONL) or `task` (generated prompts)")
        return self


class PromptsSection(Section):
    """The prompts that the student answers."""

    sources: list[SourceSection] = Field(min_length=1)
    shuffle: bool = True


class KeyLimits(Section):
    """What one API key may ask for, where it is less than the gateway's own limits."""

    max_body_bytes: Positive | None = None
    request_timeout_s: Annotated[float, Field(gt=0)] | None = None
    max_concurrency: Positive | None = None


class GatewaySection(Section):
    """The load balancer in front of all teachers.

    `urls` are the addresses at which clients reach several gateways side by side; without it there is the one at
    `host` and `port`. `max_concurrency` counts the requests of each API key; `limits` has stricter limits by key name.
    """

    host: str = "127.0.0.1"
    port: Port = 8100
    urls: list[Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+$")]] = []
    request_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    max_body_bytes: Positive = 16 * 2**20
    eject_after_failures: Positive = 2
    probe_interval_s: Annotated[float, Field(gt=0)] = 1.0
    dns_interval_s: Annotated[float, Field(gt=0)] = 5.0
    registration_ttl_s: Annotated[float, Field(gt=0)] = 15.0
    registration_hosts: list[str] = []
    max_concurrency: Positive = 4096
    limits: dict[ServiceName, KeyLimits] = {}

    @model_validator(mode="after")
    def _limits_are_stricter(self) -> GatewaySection:
        for name, limits in self.limits.items():
            for key, value in limits.model_dump(exclude_none=True).items():
                if value > getattr(self, key):
                    raise ValueError(f"limits.{name}.{key}={value} is over gateway.{key}={getattr(self, key)}")
        return self

    @property
    def addresses(self) -> list[str]:
        """Where clients find the gateways."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return self.urls or [f"http://{host}:{self.port}"]


class RedisSection(Section):
    """Where stream and state live. Without a url `opd up` starts an embedded Valkey in the run's folder."""

    url: str | None = None


class RolloutSection(Section):
    """Workers that sample from the student. `n` completions a prompt; the teacher scores `top_k` ids a token."""

    host: str = "127.0.0.1"
    port: Port = 8200
    n: Positive = 4
    max_tokens: Positive = 64
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 64
    concurrency: Positive = 32
    max_num_seqs: Positive = 128
    kv_cache_bytes: Positive = 256 * 2**20
    threads: Positive = 1
    lease_s: Annotated[float, Field(gt=0)] = 60.0
    max_attempts: Positive = 5

    @model_validator(mode="after")
    def _temperature_is_one(self) -> RolloutSection:
        if self.temperature != 1.0:
            raise ValueError(
                "rollout.temperature other than 1 samples from another policy than the one whose divergence the losses "
                "measure; no loss here states an objective for that, so write 1.0"
            )
        return self


class FlowSection(Section):
    """How far sampling may run ahead of training."""

    max_staleness: Annotated[int, Field(ge=0)] = 4
    max_queue_bytes: Positive = 256 * 2**20


class TrainerSection(Section):
    """Optimizer, batch and checkpoints. `batch_size` counts trajectories a step over all ranks."""

    host: str = "127.0.0.1"
    port: Port = 8300
    batch_size: Positive = 64
    microbatch_tokens: Positive = 2048
    lr: Annotated[float, Field(gt=0)] = 1e-5
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    checkpoint_every: Positive = 10
    keep_checkpoints: Positive = 2
    keep_weights: Annotated[int, Field(ge=2)] = 3
    max_bad_trajectories: Annotated[float, Field(ge=0, le=1)] = 0.05
    max_skipped_steps: Positive = 5
    data_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    threads: Positive = 2


class EvalSection(Section):
    """Evaluation on held-out prompts, before the first step, every `every_steps` (0: never) and after the last."""

    size: Positive = 64
    every_steps: Annotated[int, Field(ge=0)] = 0


class RunConfig(Section):
    """Everything a run needs."""

    run: RunSection
    student: StudentSection
    teachers: dict[ServiceName, TeacherSection] = Field(min_length=1)
    routes: dict[str, str]
    prompts: PromptsSection
    gateway: GatewaySection = GatewaySection()
    redis: RedisSection = RedisSection()
    rollout: RolloutSection = RolloutSection()
    flow: FlowSection = FlowSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, tree: Any) -> Any:
        """Keys that other systems have, at the top and among the teachers, where any name would pass."""
        teachers = tree.get("teachers")
        places = {"": tree, "teachers.": teachers if isinstance(teachers, dict) else {}}
        found = [f"{place}{key}" for place, section in places.items() for key in section if key in _REMOVED]
        if found:
            mends = [f"{where}: this key does not exist here; {_REMOVED[where.split('.')[-1]]}" for where in found]
            raise ValueError("; ".join(mends))
        return tree

    @model_validator(mode="after")
    def _agrees(self) -> RunConfig:
        faults = [*self._route_faults(), *self._teacher_faults(), *self._batch_faults()]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _route_faults(self) -> Iterator[str]:
        for data_source, teacher in self.routes.items():
            if teacher not in self.teachers:
                known = ", ".join(sorted(self.teachers))
                yield (
                    f"routes.{data_source}: there is no teacher {teacher!r}; did you mean "
                    f"{nearest(teacher, self.teachers)!r}? Known teachers: {known}"
                )
        for source in self.prompts.sources:
            if source.data_source not in self.routes:
                yield (
                    f"data_source {source.data_source!r} has no teacher: "
                    f"add `{source.data_source}: TEACHER` under routes"
                )

    def _teacher_faults(self) -> Iterator[str]:
        for name, teacher in self.teachers.items():
            if name not in self.routes.values():
                yield f"teachers.{name}: no data_source is routed to it; add one under routes or remove it"
            if teacher.loss == "forward_kl" and self.rollout.top_k < 1:
                yield f"teachers.{name}.loss forward_kl needs rollout.top_k of at least 1"
            if self.rollout.top_k > teacher.max_top_k:
                yield (
                    f"rollout.top_k={self.rollout.top_k} is over teachers.{name}.max_top_k={teacher.max_top_k}: "
                    "lower the one or raise the other"
                )

    def _batch_faults(self) -> Iterator[str]:
        if self.trainer.batch_size % self.rollout.n:
            yield (
                f"trainer.batch_size={self.trainer.batch_size} must be a multiple of rollout.n={self.rollout.n}, "
                "since a prompt's completions arrive together"
            )
        if self.rollout.max_tokens >= self.student.max_model_len:
            yield (
                f"rollout.max_tokens={self.rollout.max_tokens} leaves no room for a prompt in "
                f"student.max_model_len={self.student.max_model_len}"
            )


_REMOVED = {
    "distillation": "teachers, routes and losses have sections of their own: see configs/ for examples",
    "enable_resource_pool": "teachers always run on their own; delete the key, set teachers.NAME.ports (one a replica)",
    "teacher_model": "name every teacher under `teachers:` (teachers.NAME.model: PATH) and route to it under `routes:`",
    "teacher": "name every teacher under `teachers:` (teachers.NAME.model: PATH) and route to it under `routes:`",
    "n_gpus_per_node": "replicas are processes or containers: set teachers.NAME.ports, or scale the service",
    "teacher_models": "write `teachers:` with one entry per teacher name",
}

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run's configuration.

    Args:
        path: the YAML file.
        overrides: `dotted.key=value` texts; values are read as YAML.

    Raises:
        ConfigError: names the file, the key, what is wrong with it and what to write instead.
    """
    tree = read_tree(path)
    for override in overrides:
        apply_override(tree, override)
    return parse(RunConfig, tree, origin=str(path))


def read_tree(path: Path) -> dict[str, Any]:
    """A configuration file as it stands. ConfigError when it cannot be read or holds no sections."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections (run, student, teachers, routes, prompts, …)")
    return tree


def parse(model: type[ConfigT], tree: dict[str, Any], *, origin: str) -> ConfigT:
    """Validate a tree against a model; all faults are reported in one ConfigError."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        lines = [explain(model, item) for item in error.errors(include_url=False)]
        raise ConfigError(f"{origin}: " + "; ".join(lines)) from error


def add_config_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds `--config FILE` and `--set dotted.key=value` to a service's command line."""
    parser.add_argument("--config", type=Path, required=required, help="the run's YAML file")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, e.g. trainer.lr=1e-5",
    )


def check_model_folder(path: Path, *, setting: str) -> None:
    """Raises ConfigError unless `path` is a readable Hugging Face model folder; `setting` is the key that names it."""
    if not path.is_dir():
        raise ConfigError(
            f"{setting}: there is no model folder {path}; give one with config.json, tokenizer.json and *.safetensors "
            "(`opd fetch` makes some)"
        )
    wanted = [path / "config.json", path / "tokenizer.json", *sorted(path.glob("*.safetensors"))]
    if len(wanted) < 3:
        raise ConfigError(f"{setting}: {path} holds no *.safetensors file; weights in other formats are not read")
    for file in wanted:
        try:
            with file.open("rb") as handle:
                handle.read(1)
        except FileNotFoundError as error:
            raise ConfigError(f"{setting}: {path} lacks {file.name}") from error
        except PermissionError as error:
            import getpass

            raise ConfigError(
                f"{setting}: user {getpass.getuser()} may not read {file}; make it readable (chmod a+r)"
            ) from error
