"""What is asked of the server before it is measured: its model, and how it cuts text."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from streamserve.bench.words import USUAL_COST
from streamserve.errors import RequestFailed


def first_model(client: httpx.Client) -> str:
    """The first model that the server lists.

    Raises:
        RequestFailed: it cannot be reached, or lists none.
    """
    try:
        response = client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise RequestFailed(
            f"{client.base_url}/v1/models answers {error.response.status_code}; keys go into OPENAI_API_KEY."
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RequestFailed(f"cannot reach {client.base_url}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise RequestFailed(f"{client.base_url} lists no models; name one with --model.") from error


def server_count(client: httpx.Client, model: str, say: Callable[[str], None]) -> Callable[[str], int]:
    """Counts tokens by the server's /tokenize; as one for each text where it has none.

    Args:
        client: for the server.
        model: whose tokens are counted.
        say: told about a server that cannot count.
    """

    def count(text: str) -> int:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        response = client.post("/tokenize", json=body)
        response.raise_for_status()
        return int(response.json()["count"])

    try:
        count(" word")
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        say("the server has no /tokenize: prompts have a word for each token (see --tokenizer)")
        return lambda text: USUAL_COST
    return count
