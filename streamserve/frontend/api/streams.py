"""/v1/streams and /v1/streams/{id}: the caller's live answers, what they are doing, and how to end one.

With several frontends the one that is asked need not be the one that runs an answer; it asks the others.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from streamserve.errors import RequestError
from streamserve.frontend.api.endpoint import tenant_of
from streamserve.frontend.api.http import document
from streamserve.frontend.api.service import Service
from streamserve.frontend.auth import is_admin
from streamserve.frontend.deployment import Deployment

SHOW, CANCEL, LIST = "streams.show", "streams.cancel", "streams.list"


class StreamNotFound(RequestError):
    """No live answer of this caller has that id."""

    status = 404
    code = "stream_not_found"


class Streams:
    """The endpoints. A caller sees and ends what was asked with its own key; an administrator, everything.

    Args:
        service: its registry knows the live answers of this frontend.
        deployment: how many frontends there are.
    """

    def __init__(self, service: Service, deployment: Deployment) -> None:
        self._service = service
        self._index = deployment.index
        self._num_frontends = deployment.server.api_workers

    async def show_all(self, http: Request) -> Response:
        """All of the caller's live answers, oldest first."""
        tenant = _scope_of(http)
        found = self._list(tenant)
        others = [index for index in range(self._num_frontends) if index != self._index]
        questions = [{"method": LIST, "frontend": index, "tenant": tenant} for index in others]
        answers = await asyncio.gather(*[self._service.client.relay(question) for question in questions])
        for answer in answers:
            found += answer or []
        return document({"object": "list", "data": sorted(found, key=lambda stream: stream["created"])})

    async def one(self, http: Request) -> Response:
        """GET shows it, DELETE ends it."""
        return await (self.cancel(http) if http.method == "DELETE" else self.show(http))

    async def show(self, http: Request) -> Response:
        """One of them.

        Raises:
            StreamNotFound: the caller has no live answer of that id.
        """
        answer_id, tenant = http.path_params["id"], _scope_of(http)
        found = self._show(answer_id, tenant)
        if found is None:
            found = await self._ask_others(SHOW, answer_id, tenant)
        return _found(found, answer_id)

    async def cancel(self, http: Request) -> Response:
        """Ends it: the answer ends with the text so far and the finish reason `abort`.

        Raises:
            StreamNotFound: the caller has no live answer of that id.
        """
        answer_id, tenant = http.path_params["id"], _scope_of(http)
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
        return [record.describe() for record in self._service.registry.all(tenant)]

    def _show(self, answer_id: str, tenant: str | None) -> dict[str, Any] | None:
        records = self._service.registry.find(answer_id, tenant)
        return records[-1].describe() if records else None

    def _cancel(self, answer_id: str, tenant: str | None) -> dict[str, Any] | None:
        records = self._service.registry.find(answer_id, tenant)
        for record in records:
            record.cancel()
        return records[-1].describe() if records else None

    async def _ask_others(self, method: str, answer_id: str, tenant: str | None) -> Any | None:
        if self._num_frontends == 1:
            return None
        return await self._service.client.relay({"method": method, "id": answer_id, "tenant": tenant})


def _scope_of(http: Request) -> str | None:
    """Whose answers a caller may see; None is everybody's."""
    return None if is_admin(http.scope) else tenant_of(http.scope)


def _found(stream: dict[str, Any] | None, answer_id: str) -> Response:
    if stream is None:
        raise StreamNotFound(f"No live stream of yours has the id {answer_id[:200]!r}.", "id")
    return document(stream)
