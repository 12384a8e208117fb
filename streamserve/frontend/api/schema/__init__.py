"""Request bodies as pydantic models. Types are strict: `"5"` and `true` are no numbers."""
