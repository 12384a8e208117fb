"""The command-line clients: a conversation and a completion against any OpenAI-compatible server."""

from streamserve.terminal.chat import chat
from streamserve.terminal.complete import complete

__all__ = ["chat", "complete"]
