"""The paths that the server answers, for rooms that must know them without the application."""

from __future__ import annotations

HEALTH, LIVE, READY, PING, METRICS = "/health", "/live", "/ready", "/ping", "/metrics"

# What orchestrators and load balancers ask. They have no key, and nobody wants to read of each in a log.
PROBES = frozenset({HEALTH, LIVE, READY, PING})

# Web pages, and the files that they load.
CHAT_PAGE, DASHBOARD, PAGE_FILES = "/", "/dashboard", "/web/{path:path}"

# What the dashboard shows, as a stream.
DASHBOARD_EVENTS = "/dashboard/events"

# What shows the whole server to those who watch over it: needs a key unless the operator opens it, and is
# not counted in what it shows.
MONITORING = frozenset({METRICS, DASHBOARD_EVENTS})

# Each is followed by an id. What asks for EVENT_STREAM there takes the stream over.
STREAMS = "/v1/streams/"
EVENT_STREAM = "text/event-stream"

RESET_PREFIX_CACHE = "/reset_prefix_cache"

# Control over what all users share.
ADMIN = frozenset({RESET_PREFIX_CACHE})

# Route templates as they appear in metrics; "none" is every path that is no route.
HANDLERS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/ws",
    "/v1/models",
    "/v1/models/{model:path}",
    "/v1/streams",
    "/v1/streams/{id}",
    "/tokenize",
    "/detokenize",
    "/load",
    "/version",
    "/openapi.json",
    "/docs",
    CHAT_PAGE,
    DASHBOARD,
    PAGE_FILES,
    RESET_PREFIX_CACHE,
    "none",
)
