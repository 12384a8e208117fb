"""The options of the HTTP side: socket, limits, keys, TLS, what requests may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from streamserve.config.options import option


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the outside sees: the socket and its limits."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is every network.", kind="str")
    port: int = option(8000, "TCP port; 0 takes a free one.", kind="int", minimum=0)
    api_workers: int = option(
        1,
        "Frontend processes that share the port; for more streams than one core can tokenise and write for.",
        kind="int",
        minimum=1,
    )
    root_path: str = option("", "Prefix that a proxy in front takes off the path, such as /llm.", kind="str")
    forwarded_allow_ips: tuple[str, ...] = option(
        ("127.0.0.1", "::1"),
        "Addresses of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; * believes all.",
        kind="list",
    )
    max_waiting: int = option(
        1024,
        "Most requests waiting for the engine, shared evenly between the frontends; more are answered 429.",
        kind="count",
        minimum=1,
    )
    max_body_bytes: int = option(
        32 * 2**20, "Largest HTTP body; larger ones are answered 413.", kind="bytes", minimum=1024
    )
    max_head_bytes: int = option(
        64 * 2**10, "Largest head of a request; larger ones are answered 431.", kind="bytes", minimum=1024
    )
    max_headers: int = option(128, "Most headers of a request; more are answered 431.", kind="int", minimum=8)
    head_timeout: float = option(
        30.0,
        "Seconds that the head of a request may take to arrive; then it is answered 408.",
        kind="float",
        minimum=0.1,
    )
    body_timeout: float = option(
        120.0,
        "Seconds that the body of a request may take to arrive; then it is answered 408.",
        kind="float",
        minimum=0.1,
    )
    keep_alive_timeout: int = option(
        75,
        "Seconds that an idle connection is kept; must be longer than that of a load balancer in front.",
        kind="int",
        minimum=1,
    )
    sse_ping_interval: float = option(
        15.0,
        "Seconds of silence after which a stream carries a comment line; one that waits begins with it.",
        kind="float",
        minimum=0.1,
    )
    ws_ping_interval: float = option(
        20.0, "Seconds between two pings on a WebSocket.", kind="float", minimum=0.1
    )
    ws_ping_timeout: float = option(
        20.0,
        "Seconds after a ping within which something must be heard from the other side of a WebSocket.",
        kind="float",
        minimum=0.1,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names by which the server may be called without a key, besides addresses and localhost; * is every "
        "one. By default none where it listens for this machine only and asks for no keys, else every one.",
        kind="list",
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Origins of web pages that may call the server; * is every one.", kind="list"
    )
    allowed_methods: tuple[str, ...] = option(("*",), "Methods that they may use.", kind="list")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that they may send.", kind="list")
    allow_credentials: bool = option(False, "Let them send cookies.", kind="bool")
    deep_health_timeout: float = option(
        30.0,
        "Seconds in which the token of /health?deep=1 must have come.",
        kind="float",
        minimum=0.1,
    )
    log_level: str = option(
        "info", "Least severe line to log.", kind="str", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option("text", "Form of a line in the log.", kind="str", choices=("text", "json"))
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector (http://127.0.0.1:4318/v1/traces) that is sent a span for each "
        "request; needs the extra `otel`.",
        kind="str",
    )
    chat_page: bool = option(
        True, "Serve a page at / on which people chat with the model in their browsers.", kind="bool"
    )
    dashboard: bool = option(
        True,
        "Serve a page at /dashboard that shows what the server is doing; its numbers need a key where "
        "/metrics does.",
        kind="bool",
    )
    access_log: bool = option(
        True,
        "Log a line for each request: who, what and how long, never what was said. Probes are left out.",
        kind="bool",
    )


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """Who may use the server."""

    api_key: tuple[str, ...] = option(
        (),
        "Keys of which each request must bring one as `Authorization: Bearer KEY`; written KEY or NAME:KEY, "
        "where the name shows in metrics and shares. Without any, everybody may use the server. Better given "
        "as a variable or in a file: flags can be read in the process list.",
        kind="list",
        secret=True,
    )
    api_key_file: str | None = option(
        None, "File of such keys, one a line; lines that begin with # are comments.", kind="str"
    )
    admin_key: tuple[str, ...] = option(
        (),
        "Keys for calls that concern all users, such as /reset_prefix_cache; valid everywhere else too. "
        "Without any, those calls are refused.",
        kind="list",
        secret=True,
    )
    admin_key_file: str | None = option(None, "File of such keys.", kind="str")
    metrics_open: bool = option(
        False, "Answer /metrics, and show the dashboard's numbers, without a key.", kind="bool"
    )
    ws_query_key: bool = option(
        False,
        "Accept the key of a WebSocket as ?api_key=KEY too; proxies tend to log that.",
        kind="bool",
    )


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """HTTPS, where no proxy takes care of it."""

    ssl_keyfile: str | None = option(None, "File of the private key, PEM.", kind="str")
    ssl_certfile: str | None = option(
        None, "File of the certificate and its chain, PEM; turns HTTPS on.", kind="str"
    )
    ssl_ca_certs: str | None = option(
        None, "File of the authorities that client certificates are checked against, PEM.", kind="str"
    )
    ssl_cert_reqs: str = option(
        "none",
        "Whether clients need a certificate.",
        kind="str",
        choices=("none", "optional", "required"),
    )
    ssl_ciphers: str | None = option(None, "OpenSSL's list of ciphers to allow.", kind="str")


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """What requests may ask for."""

    max_n: int = option(128, "Most choices of a request.", kind="count", minimum=1)
    max_logprobs: int = option(
        20,
        "Most likeliest tokens that a request may have reported at each position.",
        kind="count",
        minimum=0,
    )
    max_queue_time: float = option(
        0.0,
        "Seconds that a request may wait for its turn before it is answered 503; 0 is no limit. A request "
        "may ask for less.",
        kind="float",
        minimum=0,
    )
    stream_write_timeout: float = option(
        120.0,
        "Seconds that a stream waits for its client to read before the client is dropped.",
        kind="float",
        minimum=0.1,
    )
    resume_window: float = option(
        60.0,
        "Seconds for which a stream that was asked for as resumable goes on without a connection, and its "
        "events are kept; 0 makes no stream resumable.",
        kind="float",
        minimum=0,
    )
    resume_buffer_bytes: int = option(
        64 * 2**20,
        "Memory of each frontend for the events of resumable streams; one stream may have an eighth of it.",
        kind="bytes",
        minimum=64 * 2**10,
    )
    chat_template: str | None = option(
        None, "File of a Jinja chat template to use instead of the model's own.", kind="str"
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring a chat template of their own.", kind="bool"
    )
