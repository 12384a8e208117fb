"""Fields of the API that change the answer and are not served yet.

They are refused by name: an answer that silently ignored them would be wrong. A value that asks for nothing
is accepted, because many clients always send it.
"""

from __future__ import annotations

from typing import Any

import orjson

from streamserve.errors import InvalidRequest

_OFF = (None, False)
_NONE: tuple[Any, ...] = (None,)
_EMPTY_LIST: tuple[Any, ...] = (None, [])
_EMPTY_OBJECT: tuple[Any, ...] = (None, {})
_ONE = (None, 1, 1.0)

_BOTH: dict[str, tuple[Any, ...]] = {
    "length_penalty": _ONE,
    "use_beam_search": _OFF,
    "logprob_token_ids": _EMPTY_LIST,
    "response_format": (None, {"type": "text"}),
    "structured_outputs": _NONE,
    "guided_json": _NONE,
    "guided_regex": _NONE,
    "guided_choice": _NONE,
    "guided_grammar": _NONE,
    "stream_interval": (None, 1),
    "repetition_detection": _NONE,
    "thinking_token_budget": _NONE,
    "watermarking": _OFF,
    "return_prompt_text": _OFF,
    "kv_transfer_params": _NONE,
    "vllm_xargs": _EMPTY_OBJECT,
}

CHAT = {
    **_BOTH,
    "best_of": (None, 1),
    "echo": _OFF,
    "tools": _EMPTY_LIST,
    "tool_choice": (None, "none", "auto"),
    "functions": _EMPTY_LIST,
    "function_call": (None, "none", "auto"),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "modalities": (None, [], ["text"]),
    "audio": _NONE,
    "web_search_options": _NONE,
    "store": _OFF,
}

COMPLETION = {
    **_BOTH,
    "suffix": (None, ""),
    "prompt_embeds": _NONE,
}

TOKENIZE = {"tools": _EMPTY_LIST}


def refuse_unsupported(body: dict[str, Any], unsupported: dict[str, tuple[Any, ...]]) -> None:
    """Checks `body` against the fields in `unsupported` and their harmless values.

    Raises:
        InvalidRequest: names the first field that asks for something.
    """
    for name, harmless in unsupported.items():
        given = body.get(name)
        # By type as well: true is no 1.
        if not any(type(given) is type(value) and given == value for value in harmless):
            shown = " or ".join(orjson.dumps(value).decode() for value in harmless)
            raise InvalidRequest(f"{name} is not supported here; leave it out or set it to {shown}.", name)
