"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from streamserve.errors import InvalidRequest
from streamserve.frontend.api.schema.common import GenerationRequest

MAX_PROMPTS = 1024


def _off(value: Any) -> Any:
    return None if value is False else value


class CompletionRequest(GenerationRequest):
    """A text, or token ids, to go on with; or a list of them."""

    prompt: Any
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_off)] = None
    echo: bool | None = None

    @property
    def _best_of(self) -> int:
        return self.best_of or self.num_choices

    @property
    def num_candidates(self) -> int:
        """Choices that are generated, for each prompt; the best of them are answered."""
        # Where nothing is generated, none is better than the others.
        return self.num_choices if self.is_scoring else self._best_of

    @property
    def num_top_logprobs(self) -> int | None:
        """Likeliest tokens told at each position; None tells no log probabilities."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """Whether the answer's text begins with the prompt."""
        return bool(self.echo)

    @property
    def is_scoring(self) -> bool:
        """Whether nothing but the prompt itself is asked for."""
        return self.echoes and self.max_tokens == 0

    def check(self) -> None:
        """Refuses fields that contradict each other.

        Raises:
            InvalidRequest: names one of them.
        """
        super().check()
        if self._best_of < self.num_choices:
            raise InvalidRequest("best_of must be at least n.", "best_of")
        if self.stream and self._best_of > self.num_choices:
            raise InvalidRequest("A stream cannot choose: best_of must be n when stream is true.", "best_of")

    def prompts(self) -> list[str | list[Any]]:
        """The prompts: each a string, or what should be token ids.

        Raises:
            InvalidRequest: they are neither, or too many.
        """
        prompt = self.prompt
        if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)):
            prompt = [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt: there may be at most {MAX_PROMPTS} prompts.", "prompt")
        kind = type(prompt[0])
        if kind not in (str, list) or any(type(item) is not kind for item in prompt):
            raise InvalidRequest(
                "prompt must be a string, a list of token ids, or a list of strings or of such lists.",
                "prompt",
            )
        return list(prompt)
