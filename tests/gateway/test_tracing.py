"""One trace from the client through a real gateway to a real teacher process, as a collector receives it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from shared import tracing
from shared.errors import ConfigError
from tests.conftest import free_port, wait_until
from tests.gateway.bed import Bed

BODY = {"model": "math", "token_ids": [[5, 6, 7]], "prompt_len": [1]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Received:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    is_error: bool
    attributes: dict[str, Any]


@dataclass
class Collector:
    """OTLP over HTTP: decodes what is posted to /v1/traces."""

    port: int = 0
    spans: list[Received] = field(default_factory=list)

    def receive(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for span in [span for scope in resource.scope_spans for span in scope.spans]:
                ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                is_error = span.status.code == span.status.STATUS_CODE_ERROR
                self.spans.append(Received(service, span.name, *ids, is_error, _attributes(span.attributes)))

    async def wait(self, service: str, name: str, count: int = 1) -> Received:
        """The newest span of that name, once there are `count`."""

        def found() -> list[Received]:
            return [span for span in self.spans if (span.service, span.name) == (service, name)]

        await wait_until(lambda: len(found()) >= count, 40, f"{count} spans {name!r} of {service}: {self.spans}")
        return found()[-1]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.receive(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield collector
        server.shutdown()


async def test_a_trace_leads_from_the_client_to_the_engine(
    bed: Bed, run_service, collector: Collector, fake_model: Path
):
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    port = free_port()
    options = ["--name", "math", "--model", fake_model, "--port", port, "--dtype", "float32"]
    teacher = run_service("tests.teacher.fake_teacher", *options, env=env)
    await bed.gateway(port, env=env)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "me-1"}
    async with httpx.AsyncClient(base_url=bed.url, timeout=30) as client:
        answer = await client.post("/logprobs", json=BODY, headers=headers)
        assert answer.status_code == 200 and answer.headers["x-request-id"] == "me-1"
        outer = await collector.wait("opd-gateway", "POST /logprobs")
        attempt = await collector.wait("opd-gateway", "attempt /logprobs")
        inner = await collector.wait("opd-teacher", "POST /logprobs")
        assert {span.trace_id for span in (outer, attempt, inner)} == {TRACE}
        assert [outer.parent_id, attempt.parent_id, inner.parent_id] == [PARENT, outer.span_id, attempt.span_id]
        assert outer.attributes["opd.request_id"] == inner.attributes["opd.request_id"] == "me-1"
        assert (outer.attributes["opd.teacher"], outer.attributes["opd.key"]) == ("math", "anonymous")
        assert attempt.attributes == {"opd.replica": f"127.0.0.1:{port}", "opd.status": 200}
        usage = answer.json()["usage"]
        for name in ("tokens", "cached_tokens", "queue_ms", "engine_ms"):
            assert inner.attributes[f"opd.{name}"] == usage[name]
        assert not any(span.is_error for span in (outer, attempt, inner))

        metrics = (await client.get("/metrics")).text
        labels = f'{{replica="127.0.0.1:{port}",teacher="math"}}'
        assert f"opd_gateway_engine_tokens_total{labels} 3.0" in metrics
        assert f"opd_gateway_cached_tokens_total{labels} 0.0" in metrics
        for name, value in (("queue", usage["queue_ms"]), ("engine", usage["engine_ms"])):
            assert f"opd_gateway_{name}_seconds_count{labels} 1.0" in metrics
            (line,) = [line for line in metrics.splitlines() if line.startswith(f"opd_gateway_{name}_seconds_sum")]
            assert float(line.split()[-1]) == pytest.approx(value / 1000)

        teacher.stop(9)
        assert (await client.post("/logprobs", json=BODY)).status_code == 503
        outer = await collector.wait("opd-gateway", "POST /logprobs", 2)
        attempt = await collector.wait("opd-gateway", "attempt /logprobs", 2)
        assert outer.is_error and attempt.is_error and outer.attributes["opd.status"] == 503
        assert outer.trace_id not in ("", TRACE) and outer.parent_id == ""


async def test_without_a_collector_traces_pass_through_and_noise_does_not(bed: Bed):
    stand = await bed.replica()
    await bed.gateway(stand.port)
    async with httpx.AsyncClient(base_url=bed.url) as client:
        for text, expected in ((f"00-{TRACE}-{PARENT}-01", True), ("00-x\ty", False)):
            await client.post("/logprobs", json=BODY, headers={"traceparent": text})
            assert ((await stand.counts())["headers"].get("traceparent") == text) is expected


async def test_a_collector_that_is_away_costs_no_request_and_no_stop(bed: Bed):
    stand = await bed.replica()
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    gateway = await bed.gateway(stand.port, env=env)
    async with httpx.AsyncClient(base_url=bed.url) as client:
        for _ in range(3):
            assert (await client.post("/logprobs", json=BODY)).status_code == 200
    assert gateway.stop(timeout_s=15) == 0


def test_nothing_is_imported_unless_a_collector_is_configured():
    code = (
        "import sys, services.gateway.__main__, services.teacher.__main__, shared.tracing; "
        "shared.tracing.configure('x'); print('opentelemetry' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, "opentelemetry is not installed: pip install"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf"),
    ],
)
def test_a_collector_that_cannot_be_reached_from_here_is_said(monkeypatch, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "shared.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError) as caught:
        tracing.configure("opd-gateway")
    assert words in str(caught.value)


async def test_lines_of_a_request_carry_its_id(bed: Bed):
    failing = await bed.replica("fail")
    gateway = await bed.gateway(failing.port)
    async with httpx.AsyncClient(base_url=bed.url) as client:
        await client.post("/logprobs", json=BODY, headers={"x-request-id": "me-2"})
        assert (await failing.counts())["headers"]["x-request-id"] == "me-2"
    lines = [json.loads(line) for line in gateway.output().splitlines()]
    assert [line["request_id"] for line in lines if line["event"] == "attempt_failed"] == ["me-2"]
