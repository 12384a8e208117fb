"""/v1/streams and /v1/streams/{id}: the caller's live answers, what they are doing, and how to end one.

With several frontends the one that is asked need not be the one that runs an answer; it asks the others.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from streamserve.frontend.api.http import document
from streamserve.frontend.api.resume import Resumption, position_of, reach_of, wants_events
from streamserve.frontend.api.service import Service
from streamserve.frontend.deployment import Deployment
from streamserve.frontend.registry import Record
from streamserve.frontend.resume.errors import not_found

# Who comes back wants to know at once that the stream is there; another frontend takes so long to give of it.
RETURN_PATIENCE_S = 0.05

SHOW, CANCEL, LIST = "streams.show", "streams.cancel", "streams.list"


class Streams:
    """The endpoints. A caller sees and ends what was asked with its own key; an administrator, everything.

    Args:
        service: its registry knows the live answers of this frontend.
        deployment: how many frontends there are.
        resumption: finds streams that outlive their connections.
    """

    def __init__(self, service: Service, deployment: Deployment, resumption: Resumption) -> None:
        self._service = service
        self._resumption = resumption
        self._index = deployment.index
        self._num_frontends = deployment.server.api_workers

    async def show_all(self, http: Request) -> Response:
        """All of the caller's live answers, oldest first."""
        tenant = reach_of(http.scope)
        found = self._list(tenant)
        others = [index for index in range(self._num_frontends) if index != self._index]
        questions = [{"method": LIST, "frontend": index, "tenant": tenant} for index in others]
        answers = await asyncio.gather(*[self._service.client.relay(question) for question in questions])
        for answer in answers:
            found += answer or []
        return document({"object": "list", "data": sorted(found, key=lambda stream: stream["created"])})

    async def one(self, http: Request) -> Response:
        """GET shows it, or sends its events to who comes back to it; DELETE ends it."""
        if http.method == "DELETE":
            return await self.cancel(http)
        return await (self.resume(http) if wants_events(http) else self.show(http))

    async def show(self, http: Request) -> Response:
        """One of them.

        Raises:
            StreamNotFound: the caller has no live answer of that id.
        """
        answer_id, tenant = http.path_params["id"], reach_of(http.scope)
        found = self._show(answer_id, tenant)
        if found is None:
            found = await self._ask_others(SHOW, answer_id, tenant)
        return _found(found, answer_id)

    async def resume(self, http: Request) -> Response:
        """The events of one of them that the caller has not had, and all that follow.

        Raises:
            StreamNotFound: the caller has no resumable stream of that id.
            InvalidRequest: the last event that it says it has is none of this stream's.
            EventsGone: what came after that is no longer held.
        """
        stream_id = http.path_params["id"]
        after = position_of(stream_id, http.headers, http.query_params)
        reading = await self._resumption.resume(stream_id, reach_of(http.scope), after)
        return await self._resumption.respond(http.receive, reading, RETURN_PATIENCE_S)

    async def cancel(self, http: Request) -> Response:
        """Ends it: the answer ends with the text so far and the finish reason `abort`.

        Raises:
            StreamNotFound: the caller has no live answer of that id.
        """
        answer_id, tenant = http.path_params["id"], reach_of(http.scope)
        here, there = self._cancel(answer_id, tenant), await self._ask_others(CANCEL, answer_id, tenant)
        return _found(here or there, answer_id)

    def answer(self, question: dict[str, Any]) -> Any:
        """What another frontend wants to know of this one; None if there is nothing to say."""
        match question:
            case {"method": "streams.show", "id": answer_id, "tenant": tenant}:
                return self._show(answer_id, tenant)
            case {"method": "streams.cancel", "id": answer_id, "tenant": tenant}:
                return self._cancel(answer_id, tenant)
            case {"method": "streams.list", "frontend": self._index, "tenant": tenant}:
                return self._list(tenant)
        return None

    def _list(self, tenant: str | None) -> list[dict[str, Any]]:
        return [self._describe(record) for record in self._service.registry.all(tenant)]

    def _show(self, answer_id: str, tenant: str | None) -> dict[str, Any] | None:
        records = self._service.registry.find(answer_id, tenant)
        return self._describe(records[-1]) if records else None

    def _describe(self, record: Record) -> dict[str, Any]:
        is_detached = self._resumption.is_detached(record.id, record.tenant)
        return record.describe(is_detached=is_detached)

    def _cancel(self, answer_id: str, tenant: str | None) -> dict[str, Any] | None:
        records = self._service.registry.find(answer_id, tenant)
        for record in records:
            record.cancel()
        return self._describe(records[-1]) if records else None

    async def _ask_others(self, method: str, answer_id: str, tenant: str | None) -> Any | None:
        if self._num_frontends == 1:
            return None
        return await self._service.client.relay({"method": method, "id": answer_id, "tenant": tenant})


def _found(stream: dict[str, Any] | None, answer_id: str) -> Response:
    if stream is None:
        raise not_found(answer_id)
    return document(stream)
