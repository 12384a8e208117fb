"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from streamserve.errors import EngineUnavailable, ModelNotFound
from streamserve.frontend.api.http import document
from streamserve.frontend.api.service import Service


class Models:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, _http: Request) -> Response:
        """All models, which is the one."""
        return document({"object": "list", "data": [self._card()]})

    async def show(self, http: Request) -> Response:
        """One model by name.

        Raises:
            ModelNotFound: it is not the one there is.
        """
        name = http.path_params["model"]
        if not name:
            raise ModelNotFound("There is no model without a name.", "model")
        self._service.check_model(name)
        return document(self._card())

    def _card(self) -> dict[str, Any]:
        service = self._service
        card: dict[str, Any] = {
            "id": service.model_name,
            "object": "model",
            "created": service.created_s,
            "owned_by": "streamserve",
        }
        # Known only once the engine has loaded the model; the name is known before.
        with contextlib.suppress(EngineUnavailable):
            card["max_model_len"] = service.client.engine().max_model_len
        return card
