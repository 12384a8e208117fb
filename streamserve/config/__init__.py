"""Every option of the server, each defined once.

A section is a frozen dataclass; a field made by `option()` is at the same time the command-line flag
(`--max-num-seqs`), the environment variable (`STREAMSERVE_MAX_NUM_SEQS`), the YAML key (`max_num_seqs`) and
the row of the table in docs/configuration.md. Later sources win: default < YAML < environment < flag.
This is the only room that reads the environment. Each other room is handed its own section, never the whole.
"""

from streamserve.config.cache_folder import cache_root
from streamserve.config.client import client_api_key
from streamserve.config.http import ApiConfig, AuthConfig, ServerConfig, TlsConfig
from streamserve.config.options import parse_bytes, parse_count
from streamserve.config.sections import (
    CacheConfig,
    Config,
    ModelConfig,
    SchedulerConfig,
    SupervisorConfig,
    WorkerConfig,
)
from streamserve.config.sources import ENV_PREFIX, add_arguments, load, unknown_variables
from streamserve.config.table import documentation, page

__all__ = [
    "ENV_PREFIX",
    "ApiConfig",
    "AuthConfig",
    "CacheConfig",
    "Config",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SupervisorConfig",
    "TlsConfig",
    "WorkerConfig",
    "add_arguments",
    "cache_root",
    "client_api_key",
    "documentation",
    "load",
    "page",
    "parse_bytes",
    "parse_count",
    "unknown_variables",
]
