"""The configuration of a run: one YAML file, checked before anything starts. Every default of the system lives here
(those of single losses in `shared/losses.py`).

`load_run` reads the file, applies `--set dotted.key=value` overrides and validates. A service gets its part of it only
(`shared/parts.py`). Relative paths are relative to the working directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shared.config_faults import explain, nearest, removed_keys
from shared.errors import ConfigError
from shared.losses import LOSSES, loss_faults
from shared.overrides import apply_override

Dtype = Literal["float32", "bfloat16"]
Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1)]
MixtureWeight = Annotated[float, Field(gt=0, lt=1)]
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


class ObjectiveSection(Section):
    """What a teacher's opinion counts for: one of `shared.losses.LOSSES` and its factor.

    `beta` (jsd) and `alpha` (skew_kl) are the teacher's weight in those losses' mixtures; null: the loss's default.
    """

    loss: str = "forward_kl"
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    beta: MixtureWeight | None = None
    alpha: MixtureWeight | None = None

    @property
    def teacher_weight(self) -> float:
        """Of the teacher in the loss's mixture; 0 for a loss without one."""
        spec = LOSSES[self.loss]
        written = getattr(self, spec.weight_key) if spec.weight_key else None
        return spec.default_weight if written is None else written


class TeacherSection(ReplicasSection, ObjectiveSection):
    """One teacher: its model, its engine, where its replicas listen, and what its opinion counts for."""

    model: Path
    dtype: Dtype = "bfloat16"
    max_model_len: Positive = 4096
    max_top_k: Positive = 256
    max_num_batched_tokens: Annotated[int, Field(ge=32, le=2048)] = 2048
    max_num_seqs: Positive = 64
    max_queued_tokens: Positive = 262_144
    max_body_bytes: Positive = 16 * 2**20
    kv_cache_bytes: Positive = 256 * 2**20
    prefix_caching: bool = True
    threads: Positive = 1


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
    `host` and `port`. With `hedge_quantile` (0.95, say) a request slower than that part of the recent ones is asked a
    second time, elsewhere. `max_concurrency` counts the requests of each API key; `limits` has stricter limits
    by key name.
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
    hedge_quantile: Annotated[float, Field(ge=0.5, lt=1)] | None = None
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
    """Optimizer, batch and checkpoints. `batch_size` counts trajectories over all ranks (docs/trainer.md).

    `reward_coefficient` above 0 adds the task reward's policy gradient to every teacher's loss; its advantage is the
    reward minus the mean over the prompt's n completions. `clip_range` and `max_importance_weight` bound both.
    """

    host: str = "127.0.0.1"
    port: Port = 8300
    batch_size: Positive = 64
    microbatch_tokens: Positive = 2048
    lr: Annotated[float, Field(gt=0)] = 1e-5
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    reward_coefficient: Annotated[float, Field(ge=0)] = 0.0
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 0.2
    max_importance_weight: Annotated[float, Field(ge=1)] = 2.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    context_parallel: Positive = 1
    data_parallel: Positive = 1
    expert_parallel: Positive = 1
    recompute: bool = False
    checkpoint_every: Positive = 10
    keep_checkpoints: Positive = 2
    keep_weights: Annotated[int, Field(ge=2)] = 3
    max_bad_trajectories: Annotated[float, Field(ge=0, le=1)] = 0.05
    max_skipped_steps: Positive = 5
    data_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    threads: Positive = 2

    @property
    def num_ranks(self) -> int:
        """Processes that the trainer consists of."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @model_validator(mode="after")
    def _experts_fit(self) -> TrainerSection:
        if self.num_ranks // self.pipeline_parallel % self.expert_parallel:
            raise ValueError("trainer.expert_parallel must divide tensor_parallel x context_parallel x data_parallel")
        return self


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

    @property
    def objectives(self) -> Mapping[str, ObjectiveSection]:
        """By teacher, what it counts for in the loss."""
        return self.teachers

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, tree: Any) -> Any:
        if found := removed_keys(tree):
            raise ValueError("; ".join(found))
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
            weight_keys = frozenset(key for key in ("beta", "alpha") if getattr(teacher, key) is not None)
            yield from loss_faults(teacher.loss, teacher=name, top_k=self.rollout.top_k, weight_keys=weight_keys)
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
        if self.trainer.reward_coefficient and self.rollout.n == 1:
            yield (
                "trainer.reward_coefficient is set, but with rollout.n=1 a completion's reward is its own baseline and "
                "every advantage is 0: write rollout.n of 2 or more"
            )
        if self.rollout.max_tokens >= self.student.max_model_len:
            yield (
                f"rollout.max_tokens={self.rollout.max_tokens} leaves no room for a prompt in "
                f"student.max_model_len={self.student.max_model_len}"
            )


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
