"""A real teacher process without an engine: `python -m tests.teacher.fake_teacher OPTIONS OF services.teacher`.

POST /gate?shut holds all scoring back, POST /gate?open lets it go on.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

import services.teacher.__main__ as teacher
from services.teacher.service import TeacherService
from shared.errors import run_main
from shared.tracing import Tracer
from tests.teacher.fake_scorer import FakeScorer

_scorer = FakeScorer()
_create_app = teacher.create_app


def _with_gate(service: TeacherService, key: str | None, tracer: Tracer | None) -> FastAPI:
    app = _create_app(service, key, tracer)

    @app.post("/gate")
    async def gate(request: Request) -> Response:
        (_scorer.gate.clear if request.url.query == "shut" else _scorer.gate.set)()
        return Response(str(_scorer.in_flight))

    return app


if __name__ == "__main__":
    teacher.VllmScorer = lambda section: _scorer
    teacher.create_app = _with_gate
    run_main(teacher.main)
