"""From what the operator calls a model to a local folder that the other processes can read."""

from streamserve.artifacts.resolve import resolve_model

__all__ = ["resolve_model"]
