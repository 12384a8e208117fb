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
_ZERO = (None, 0, 0.0)
_ONE = (None, 1, 1.0)

_BOTH: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "presence_penalty": _ZERO,
    "frequency_penalty": _ZERO,
    "repetition_penalty": _ONE,
    "length_penalty": _ONE,
    "use_beam_search": _OFF,
    "logit_bias": _EMPTY_OBJECT,
    "logprobs": _OFF,
    "prompt_logprobs": _NONE,
    "logprob_token_ids": _EMPTY_LIST,
    "allowed_token_ids": _NONE,
    "bad_words": _EMPTY_LIST,
    "response_format": (None, {"type": "text"}),
    "structured_outputs": _NONE,
    "guided_json": _NONE,
    "guided_regex": _NONE,
    "guided_choice": _NONE,
    "guided_grammar": _NONE,
    "echo": _OFF,
    "include_stop_str_in_output": _OFF,
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": _NONE,
    "cache_salt": _NONE,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "stream_interval": (None, 1),
    "repetition_detection": _NONE,
    "thinking_token_budget": _NONE,
}

CHAT = {
    **_BOTH,
    "top_logprobs": (None, 0),
    "tools": _EMPTY_LIST,
    "tool_choice": (None, "none", "auto"),
    "functions": _EMPTY_LIST,
    "function_call": (None, "none", "auto"),
    "reasoning_effort": (None, "none"),
    "continue_final_message": _OFF,
    "add_special_tokens": _OFF,
    "chat_template": _NONE,
    "documents": _EMPTY_LIST,
    "modalities": (None, [], ["text"]),
    "audio": _NONE,
    "web_search_options": _NONE,
    "store": _OFF,
}

COMPLETION = {
    **_BOTH,
    "suffix": (None, ""),
    "prompt_embeds": _NONE,
    "add_special_tokens": (None, True),
}

_STREAM_OPTIONS = {"continuous_usage_stats": _OFF, "resumable": _OFF}


def refuse_unsupported(body: dict[str, Any], unsupported: dict[str, tuple[Any, ...]]) -> None:
    """Checks `body` against the fields in `unsupported` and their harmless values.

    Raises:
        InvalidRequest: names the first field that asks for something.
    """
    _refuse(body, unsupported, "")
    options = body.get("stream_options")
    if isinstance(options, dict):
        _refuse(options, _STREAM_OPTIONS, "stream_options.")


def _refuse(body: dict[str, Any], unsupported: dict[str, tuple[Any, ...]], prefix: str) -> None:
    for name, given in body.items():
        harmless = unsupported.get(name)
        # By type as well: true is no 1.
        if harmless and not any(type(given) is type(value) and given == value for value in harmless):
            shown = " or ".join(orjson.dumps(value).decode() for value in harmless)
            raise InvalidRequest(
                f"{prefix}{name} is not supported here; leave it out or set it to {shown}.", prefix + name
            )
