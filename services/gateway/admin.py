"""Members over HTTP: who they are, registering one, removing one. Changes need the registration key."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, ValidationError

from services.gateway import docs, routing
from services.gateway.gateway import Gateway
from shared.config import Section
from shared.errors import Problem
from shared.service_url import ServiceUrl, check_url

MAX_BODY_BYTES = 4096


class Registration(Section):
    """What a replica says to become a member.

    Attributes:
        instance: names the process; a process that was removed by hand cannot register again, its successor can.
    """

    url: ServiceUrl
    instance: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,64}$")] = ""


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """GET, PUT and DELETE of /replicas."""

    @app.get("/replicas")
    async def replicas(request: Request) -> dict[str, Any]:
        """All members: where they come from, their states and what they have in flight."""
        gateway.keys.identify(request.headers)
        return {"replicas": gateway.members.describe()}

    @app.put("/replicas/{teacher}", openapi_extra=docs.REGISTER, responses=docs.REGISTER_RESPONSES)
    async def register(teacher: str, request: Request) -> Response:
        """Become a member, or renew the lease; a replica does so at least every `ttl_s`."""
        gateway.keys.check_registration(request.headers)
        name = routing.find_pool(gateway.pools, teacher).name
        registration = _parse(await _read(request))
        replica, is_new = gateway.members.register(name, registration.url, registration.instance)
        document = {"teacher": name, **replica.describe(), "ttl_s": gateway.settings.registration_ttl_s}
        return JSONResponse(document, 201 if is_new else 200)

    @app.delete("/replicas/{teacher}", openapi_extra=docs.WITHDRAW, responses=docs.WITHDRAW_RESPONSES)
    async def withdraw(teacher: str, request: Request) -> Response:
        """Drain a member: no new requests. Waits up to x-timeout-s for those in flight; 202 when some are left."""
        gateway.keys.check_registration(request.headers)
        name = routing.find_pool(gateway.pools, teacher).name
        limit_s = gateway.settings.request_timeout_s
        wait_s = routing.timeout_s(request.headers, limit_s) if routing.TIMEOUT_HEADER in request.headers else 0.0
        replica = gateway.members.withdraw(name, _query_url(request))
        with contextlib.suppress(TimeoutError):  # the answer says what is left
            async with asyncio.timeout(wait_s):
                await gateway.members.drained(replica)
        return JSONResponse({"teacher": name, **replica.describe()}, 202 if replica.in_flight else 200)


def _query_url(request: Request) -> str:
    try:
        return check_url(request.query_params.get("url", ""))
    except ValueError as error:
        raise Problem("opd:malformed", f"query parameter url: {error}") from error


async def _read(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Problem("opd:too-large", f"the body is larger than {MAX_BODY_BYTES} bytes")
    return body


def _parse(body: bytes) -> Registration:
    try:
        return Registration.model_validate(json.loads(body))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Problem(
            "opd:malformed", f"{where or 'the body'}: {first['msg'].removeprefix('Value error, ')}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise Problem("opd:malformed", f"the body is not valid JSON: {str(error)[:160]}") from error
