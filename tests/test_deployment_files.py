"""Compose files, Dockerfiles and run configurations fit each other. (Bringing them up is the deployment's own test.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shared.config import load_run

REPO = Path(__file__).resolve().parent.parent
SERVICES = {"redis", "teacher-math", "teacher-chat", "gateway", "rollout", "trainer"}


def compose(name: str) -> dict:
    return yaml.safe_load((REPO / name).read_text())["services"]


def test_compose_names_every_service_with_a_healthcheck() -> None:
    services = compose("docker-compose.yml")
    assert set(services) == SERVICES
    for name, service in services.items():
        assert service["healthcheck"]["test"], name
        assert "container_name" not in service, f"{name} could not be scaled"
    for name in SERVICES - {"gateway"}:
        assert "ports" not in services[name], f"{name} must not be published"
    assert services["gateway"]["ports"] == ["127.0.0.1:8100:8100"]


def test_the_gateway_starts_without_a_key_only_where_that_is_said() -> None:
    environment = compose("docker-compose.yml")["gateway"]["environment"]
    assert environment["OPD_AUTH"] == "${OPD_AUTH:-}" and environment["OPD_API_KEY"] == "${OPD_API_KEY:-}"
    assert compose("docker-compose.cpu.yml")["gateway"]["environment"] == {"OPD_AUTH": "off"}
    assert "\nOPD_AUTH=off\n" in (REPO / ".env.example").read_text()


def test_gpu_reservations_are_loaded_by_default_and_absent_on_cpu() -> None:
    reserved = compose("docker-compose.override.yml")
    for name in ("teacher-math", "teacher-chat", "rollout", "trainer"):
        (device,) = reserved[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
    assert all("deploy" not in service for service in compose("docker-compose.cpu.yml").values())
    assert set(compose("docker-compose.cpu.yml")) == SERVICES - {"redis"}


@pytest.mark.parametrize("name", ["teacher", "gateway", "rollout", "trainer"])
def test_every_service_has_its_image_and_distribution(name: str) -> None:
    dockerfile = (REPO / "services" / name / "Dockerfile").read_text()
    assert f'ENTRYPOINT ["python", "-m", "services.{name}"]' in dockerfile
    assert "\nUSER opd\n" in dockerfile
    assert (REPO / "services" / name / "pyproject.toml").exists()


@pytest.mark.parametrize("file", sorted((REPO / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_every_configuration_is_valid(file: Path) -> None:
    run = load_run(file)
    assert {source.data_source for source in run.prompts.sources} <= set(run.routes)


@pytest.mark.parametrize(
    ("files", "config"), [("docker-compose.yml", "compose"), ("docker-compose.cpu.yml", "compose-cpu")]
)
def test_commands_name_configured_teachers(files: str, config: str) -> None:
    run = load_run(REPO / "configs" / f"{config}.yaml")
    for name, service in compose(files).items():
        if name.startswith("teacher-"):
            command = service["command"]
            teacher = run.teachers[command[command.index("--name") + 1]]
            assert teacher.host == name and teacher.ports == [8101]
            assert teacher.discovery == "dns", "`--scale` would not be followed"
            assert f"/configs/{config}.yaml" in command
