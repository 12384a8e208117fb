"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any

from streamserve.errors import InvalidRequest
from streamserve.frontend.api.schema.common import GenerationRequest


class CompletionRequest(GenerationRequest):
    """A text, or token ids, to go on with."""

    prompt: Any

    def one_prompt(self) -> str | list[Any]:
        """The prompt: a string, or what should be token ids. A list of one is that one.

        Raises:
            InvalidRequest: it is neither, or there are several.
        """
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise InvalidRequest("prompt: a list of several prompts is not supported here.", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str | list):
            return prompt
        raise InvalidRequest("prompt must be a string or a list of token ids.", "prompt")
