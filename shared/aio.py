"""Running coroutines side by side and ending them for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
_CANCEL_AGAIN_S = 0.2


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and return when all have ended, whatever their outcome.

    redis-py 8.1 swallows a cancellation that arrives at certain moments of a command, so one `cancel()` may be lost.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)


async def first(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Return when the first coroutine has ended; the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(tasks)


class Stopped(Exception):
    """A signal to stop came before what was waited for."""


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; when `stop` comes first it is cancelled and Stopped raised."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Stopped
        return task.result()
    finally:
        await end([task, stopped])


async def run_loops(
    stop: asyncio.Event, work: Coroutine[Any, Any, None], companions: list[Coroutine[Any, Any, None]]
) -> None:
    """Run `work` until it ends, with companions that run for ever; one that fails stops the work, then raises."""
    main_task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(companion) for companion in companions]
    try:
        await asyncio.wait([main_task, *others], return_when=asyncio.FIRST_COMPLETED)
        failed = [task for task in others if task.done()]
        stop.set()
        await asyncio.wait([main_task])
    finally:
        await end([main_task, *others])
    for task in [*failed, main_task]:
        task.result()
