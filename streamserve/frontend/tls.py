"""HTTPS from files."""

from __future__ import annotations

import ssl

from streamserve.config import TlsConfig
from streamserve.errors import ConfigError

_VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


def server_context(config: TlsConfig) -> ssl.SSLContext | None:
    """What connections are secured with; None for plain HTTP.

    Raises:
        ConfigError: a file cannot be read or does not hold what it should; names the option.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile}: {error}."
        ) from error
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {error}.") from error
    context.verify_mode = _VERIFY[config.ssl_cert_reqs]
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError as error:
            raise ConfigError(f"--ssl-ciphers: {error}.") from error
    return context
