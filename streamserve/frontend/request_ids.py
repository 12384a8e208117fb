"""Ids that callers give their requests, as far as they are fit for headers, logs and the ids of answers."""

from __future__ import annotations

# Of a whole id.
PATTERN = "[A-Za-z0-9._:-]{1,128}"
