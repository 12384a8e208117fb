"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from streamserve.frontend.api.schema.chat import Chat
from streamserve.frontend.api.schema.common import Schema, TokenIds


class TextTokenizeRequest(Schema):
    """A text to tokenise, as a completion's prompt would be."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class ChatTokenizeRequest(Chat):
    """A conversation to tokenise, as a chat's would be."""

    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Schema):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: TokenIds
