"""From what the operator calls a model to a local folder that the other processes can read."""

from streamserve.artifacts.resolve import ResolvedModel, resolve_model

__all__ = ["ResolvedModel", "resolve_model"]
