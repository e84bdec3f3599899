"""API keys: who gets in, what each may ask for, when the gateway refuses to start without any."""

from __future__ import annotations

import asyncio
import hmac
from pathlib import Path

import httpx
import pytest

from services.gateway import keys as keys_module
from services.gateway.config import GatewayConfig
from services.gateway.keys import Keys, load_keys
from shared.config import GatewaySection
from shared.errors import ConfigError, Problem
from tests.conftest import wait_until
from tests.gateway.bed import BODY, Bed, counted

SECRETS = ("OPD_API_KEY", "OPD_API_KEYS", "OPD_REGISTRATION_KEY")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Loads keys from an environment that holds nothing else, for a gateway with such settings."""
    for name in ["OPD_AUTH", *SECRETS, *(f"{name}_FILE" for name in SECRETS)]:
        monkeypatch.delenv(name, raising=False)

    def load(environment: dict[str, str], **settings: object) -> Keys:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        config = {"gateway": settings, "teachers": {"math": ["http://127.0.0.1:1"]}}
        return load_keys(GatewayConfig.model_validate(config))

    return load


def test_named_keys_from_environment_and_file(load, tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# who\nrollout=r-1\n\neval = e=2\n")
    keys = load({"OPD_API_KEY": "d-0", "OPD_API_KEYS_FILE": str(file), "OPD_REGISTRATION_KEY": "admin"})
    assert sorted(keys.clients) == ["default", "eval", "rollout"] and keys.is_on and keys.upstream == "d-0"
    for name, key in (("default", "d-0"), ("rollout", "r-1"), ("eval", "e=2")):
        assert keys.identify(bearer(key)).name == name
    for wrong in ({}, bearer("r-2"), bearer(""), {"authorization": "Basic r-1"}, bearer("admin"), bearer("ü")):
        with pytest.raises(Problem) as caught:
            keys.identify(wrong)
        assert caught.value.status == 401
    keys.check_registration(bearer("admin"))
    with pytest.raises(Problem):
        keys.check_registration(bearer("d-0"))
    assert load({"OPD_API_KEYS_FILE": "", "OPD_API_KEYS": "a=1,b=2"}).identify(bearer("2")).name == "b"


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch):
    compared: list[tuple[int, int]] = []
    original = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return original(left, right)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    keys = Keys(GatewaySection(), {"a": "short", "b": "a much longer key", "c": "x"})
    assert keys.identify(bearer("short")).name == "a"
    assert compared == [(32, 32)] * 3  # also after the right one, and digests of one length


@pytest.mark.parametrize(
    ("environment", "settings", "words"),
    [
        ({}, {"host": "0.0.0.0"}, "OPD_AUTH=off"),
        ({}, {"host": "::"}, "without a key"),
        ({}, {"host": "gateway"}, "without a key"),
        ({"OPD_AUTH": "no"}, {}, "only value is `off`"),
        ({"OPD_API_KEYS": "a=s3cret,a=other"}, {}, "'a' is given twice"),
        ({"OPD_API_KEYS": "a=s3cret,b=s3cret"}, {}, "'b' has the key of another name"),
        ({"OPD_API_KEYS": "default=s3cret", "OPD_API_KEY": "x"}, {}, "given twice"),
        ({"OPD_API_KEYS": "a=s3c ret"}, {}, "entry 1 is not NAME=KEY"),
        ({"OPD_API_KEYS": "s3cret"}, {}, "entry 1"),
        ({"OPD_API_KEY": "s3cret", "OPD_REGISTRATION_KEY": "s3cret"}, {}, "take another"),
        ({"OPD_API_KEYS": "a=s3cret"}, {"limits": {"b": {}}}, "known: a"),
        ({}, {"limits": {"default": {}}}, "known: anonymous"),
    ],
)
def test_slips_name_the_mend_and_never_the_key(load, environment, settings, words):
    with pytest.raises(ConfigError) as caught:
        load(environment, **settings)
    assert words in str(caught.value) and "s3c" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"host": "127.0.0.9"}, {"host": "::1"}, {"host": "localhost"}])
def test_no_key_is_needed_where_nobody_else_can_reach_it(load, settings):
    assert not load({}, **settings).is_on
    assert load({}, **settings).identify({}).name == "anonymous"


def test_off_is_said_so(load):
    assert not load({"OPD_AUTH": "off"}, host="0.0.0.0").is_on
    assert load({"OPD_AUTH": "off", "OPD_API_KEY": "k"}, host="0.0.0.0").is_on


def test_limits_of_a_key_are_stricter_than_the_gateways():
    with pytest.raises(ValueError, match=r"limits.a.max_concurrency=9 is over gateway.max_concurrency=8"):
        GatewaySection.model_validate({"max_concurrency": 8, "limits": {"a": {"max_concurrency": 9}}})


async def test_limits_hold_for_one_key_and_not_for_another(bed: Bed):
    stand = await bed.replica("hold")
    limits = "gateway.limits={small: {max_concurrency: 2, max_body_bytes: 200, request_timeout_s: 0.2}}"
    env = {"OPD_API_KEYS": "small=k-small,large=k-large"}
    gateway = await bed.gateway(stand.port, args=("--set", limits), env=env, wait=False)
    small, large = bearer("k-small"), bearer("k-large")
    async with httpx.AsyncClient(base_url=bed.url, timeout=30) as client:

        async def ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await wait_until(ready)
        late = await client.post("/logprobs", json=BODY, headers=small)
        assert (late.status_code, late.json()["type"]) == (504, "opd:deadline")  # 0.2 s are its limit
        await stand.behave("good")
        big = {**BODY, "token_ids": [list(range(1, 200))]}
        assert (await client.post("/logprobs", json=big, headers=small)).status_code == 413
        assert (await client.post("/logprobs", json=big, headers=large)).status_code == 200
    assert "k-small" not in gateway.output() and "k-large" not in gateway.output()
    assert '"keys": ["large", "small"]' in gateway.output()


async def test_too_many_requests_of_one_key_are_429_and_counted(bed: Bed):
    stand = await bed.replica("hold")
    env = {"OPD_API_KEYS": "small=k-small,large=k-large"}
    await bed.gateway(stand.port, args=("--set", "gateway.limits={small: {max_concurrency: 2}}"), env=env, wait=False)
    async with httpx.AsyncClient(base_url=bed.url, timeout=30) as client:

        async def ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await wait_until(ready)
        held = [asyncio.create_task(client.post("/logprobs", json=BODY, headers=bearer("k-small"))) for _ in range(2)]
        await wait_until(lambda: counted(stand, "in_flight", 2))
        refused = await client.post("/logprobs", json=BODY, headers=bearer("k-small"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["type"] == "opd:overloaded" and "'small'" in refused.json()["detail"]
        held.append(asyncio.create_task(client.post("/logprobs", json=BODY, headers=bearer("k-large"))))
        await wait_until(lambda: counted(stand, "in_flight", 3))
        assert 'opd_gateway_key_in_flight{key="small"} 2.0' in (await client.get("/metrics")).text
        await stand.behave("good")
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 3
        assert (await client.post("/logprobs", json=BODY, headers=bearer("k-small"))).status_code == 200
        assert (await client.post("/logprobs", json=BODY)).status_code == 401
        metrics = (await client.get("/metrics")).text
    assert 'opd_gateway_key_requests_total{key="small",status="429"} 1.0' in metrics
    assert 'opd_gateway_key_requests_total{key="small",status="200"} 3.0' in metrics
    assert 'opd_gateway_key_requests_total{key="",status="401"} 1.0' in metrics
    assert 'opd_gateway_key_in_flight{key="small"} 0.0' in metrics
