"""What an actor process does: make the actor, and fill slots until there is no more to do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import cast

from unirl.core.actor import Actor, ActorContext, AnyActor, StreamingActor, is_async
from unirl.core.queue import QueueClient
from unirl.errors import DeadlineExceeded, DiscardSlot, LeaseExpired
from unirl.runners.async_actors import serve

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 60.0


def run_actor(
    make_actor: Callable[[ActorContext], AnyActor],
    context: ActorContext,
    queue: QueueClient,
    hang_seconds: float,
) -> None:
    """What an actor process does: make the actor, fill slots until the queue closes or this member
    is retired.
    """
    actor = make_actor(context)
    if is_async(actor):
        asyncio.run(serve(actor, queue, hang_seconds))
        return
    try:
        if isinstance(actor, StreamingActor):
            actor.serve(queue)
        else:
            _produce_until_closed(cast(Actor, actor), queue)
    except LeaseExpired as expired:
        log.info("%s", expired)
    finally:
        try:
            actor.close()
        except Exception:
            log.exception("the actor could not be closed")


def _produce_until_closed(actor: Actor, queue: QueueClient) -> None:
    while True:
        try:
            slot = queue.acquire(_PATIENCE_SECONDS)
        except DeadlineExceeded as deadline:
            # The learner lives, or the parent watch would have ended us: it evaluates, say.
            log.warning("%s", deadline)
            continue
        started = time.monotonic()
        try:
            actor.produce(slot)
        except DiscardSlot as discard:
            queue.discard(slot, discard.reason)
            continue
        slot.work_seconds = time.monotonic() - started
        queue.commit(slot)
