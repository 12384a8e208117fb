"""What is asked of the server before it is measured: its model, and how it cuts text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import httpx

from streamserve.bench.words import USUAL_COST, WORDS, Costs
from streamserve.errors import RequestFailed

_NO_KEY = (401, 403)
# As text, in byte-level vocabularies, and in SentencePiece's.
_SPACES = (" ", "Ġ", "▁")


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
        status = error.response.status_code
        hint = "keys go into OPENAI_API_KEY" if status in _NO_KEY else "name a model with --model"
        if str(client.base_url).rstrip("/").endswith("/v1"):
            hint = "the address is without its /v1"
        raise RequestFailed(f"{error.request.url} answers {status}; {hint}.") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RequestFailed(f"cannot reach {client.base_url}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise RequestFailed(f"{client.base_url} lists no models; name one with --model.") from error


def context_length(client: httpx.Client, model: str) -> int | None:
    """Most tokens of a request to `model`, as the server lists it; None if it does not say."""
    try:
        models = client.get("/v1/models").raise_for_status().json()["data"]
        return next((entry.get("max_model_len") for entry in models if entry["id"] == model), None)
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
        return None


def word_costs(client: httpx.Client, model: str, say: Callable[[str], None]) -> Costs:
    """What words cost by the server's /tokenize; `USUAL_COST` each where it has none, or cuts text otherwise.

    Args:
        client: for the server.
        model: whose tokens are counted.
        say: told about a server that cannot count.
    """
    text = "".join(f" {word}" for word in WORDS)
    body = {"model": model, "prompt": text, "add_special_tokens": False, "return_token_strs": True}
    try:
        tokens = client.post("/tokenize", json=body).raise_for_status().json()["token_strs"]
        counts = [len(word) for word in _words(tokens)]
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
        counts = []
    if len(counts) != len(WORDS):
        say("the server does not say how it cuts words: prompts have a word for each token")
        return dict.fromkeys(WORDS, USUAL_COST)
    return dict(zip(WORDS, counts, strict=True))


def special_tokens(client: httpx.Client, model: str) -> int:
    """Tokens that the server adds to each prompt, such as a BOS, by its /tokenize; 0 where it has none."""
    counts = []
    for adds in (True, False):
        body = {"model": model, "prompt": WORDS[0], "add_special_tokens": adds}
        try:
            counts.append(len(client.post("/tokenize", json=body).raise_for_status().json()["tokens"]))
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return 0
    return max(counts[0] - counts[1], 0)


def _words(tokens: Sequence[str]) -> Iterator[list[str]]:
    """The tokens of each word; one begins at a space, however the vocabulary writes that."""
    word: list[str] = []
    for token in tokens:
        if token.startswith(_SPACES) and word:
            yield word
            word = []
        word.append(token)
    if word:
        yield word
