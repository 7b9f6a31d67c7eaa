"""The parameters of libpq's connection strings: which of them taskd honours, ignores or refuses.

taskd checks their keywords (`sslmode`) and values itself: the driver, asyncpg, would pass an
unknown keyword to the server as a setting.
"""

from __future__ import annotations

from collections.abc import Mapping

SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
TLS_VERSIONS = ("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3")

# Parameters of a URI that other clients read, and that no server knows. The clients are Prisma,
# Supabase's integrations and node-postgres.
OF_OTHER_CLIENTS = frozenset(
    {"connection_limit", "pgbouncer", "pool_timeout", "schema", "supa", "uselibpqcompat"}
)
# taskd ignores these parameters. It names its connections itself. It always uses UTF-8, and version
# 3.0 of the protocol without compression.
WITHOUT_EFFECT = frozenset(
    {
        "application_name",
        "client_encoding",
        "fallback_application_name",
        "max_protocol_version",
        "sslcompression",
    }
)
# The values that taskd honours. taskd refuses any other value, because its connection would not
# give the guarantee that such a value asks for.
VALUES: Mapping[str, tuple[str, ...]] = {
    "channel_binding": ("disable", "prefer", "require"),
    "gssdelegation": ("0",),
    "gssencmode": ("disable", "prefer"),
    "load_balance_hosts": ("disable", "random"),
    "min_protocol_version": ("3.0",),
    "replication": ("false", "off", "no", "0"),
    "ssl_max_protocol_version": TLS_VERSIONS,
    "ssl_min_protocol_version": TLS_VERSIONS,
    "sslcertmode": ("allow",),
    "sslmode": SSL_MODES,
    "sslnegotiation": ("postgres", "direct"),
    "sslsni": ("1",),
    # taskd writes, so it always connects to a host that accepts writes.
    "target_session_attrs": ("any", "read-write", "primary"),
}
NUMBERS = frozenset(
    {
        "connect_timeout",
        "keepalives",
        "keepalives_count",
        "keepalives_idle",
        "keepalives_interval",
        "tcp_user_timeout",
    }
)
DRIVER = "the driver cannot do this"
REFUSED: Mapping[str, str] = {
    "oauth_client_id": DRIVER,
    "oauth_client_secret": DRIVER,
    "oauth_issuer": DRIVER,
    "oauth_scope": DRIVER,
    "require_auth": "the driver does not tell how the server authenticates",
    "requirepeer": "the driver does not check the user of a socket",
    "scram_client_key": DRIVER,
    "scram_server_key": DRIVER,
    "sslcrldir": "name one file with sslcrl",
    "sslkeylogfile": "set the variable SSLKEYLOGFILE instead",
}
# The keywords of parameters for the connection itself. All other parameters are settings of the
# session in the server.
OF_CONNECTION = (
    frozenset(
        {
            "dbname", "gsslib", "host", "hostaddr", "krbsrvname", "passfile", "password", "port",
            "service", "servicefile", "sslcert", "sslcrl", "sslkey", "sslpassword", "sslrootcert",
            "user",
        }
    )
    | WITHOUT_EFFECT | frozenset(VALUES) | NUMBERS | frozenset(REFUSED)
)  # fmt: skip

# The variables of libpq whose name is not made of `PG` and the keyword.
_VARIABLES = {"connect_timeout": "PGCONNECT_TIMEOUT", "dbname": "PGDATABASE"}
_WITHOUT_VARIABLE = {
    "fallback_application_name", "keepalives", "keepalives_count", "keepalives_idle",
    "keepalives_interval", "oauth_client_id", "oauth_client_secret", "oauth_issuer", "oauth_scope",
    "replication", "scram_client_key", "scram_server_key", "sslkeylogfile", "sslpassword",
    "tcp_user_timeout",
}  # fmt: skip
VARIABLES: Mapping[str, str] = {
    keyword: _VARIABLES.get(keyword, "PG" + keyword.replace("_", "").upper())
    for keyword in (OF_CONNECTION | {"options"}) - WITHOUT_EFFECT - _WITHOUT_VARIABLE
}


def check_parameters(parameters: Mapping[str, str]) -> None:
    """Check that taskd can honour these parameters of libpq.

    Raises:
        ValueError: taskd cannot honour a parameter; the message names it.
    """
    for keyword, value in parameters.items():
        if keyword in REFUSED:
            raise ValueError(f"taskd cannot honour its parameter {keyword}: {REFUSED[keyword]}")
        if keyword in VALUES and value not in VALUES[keyword]:
            raise ValueError(
                f"its parameter {keyword} is {value!r}; taskd supports only "
                f"{', '.join(VALUES[keyword])}"
            )
        if keyword in NUMBERS and not value.strip().isdecimal():
            raise ValueError(f"its parameter {keyword} is {value!r}, which is not a whole number")
    ports = parameters.get("port", "").split(",")
    if not all(port.isdecimal() and int(port) <= 65535 for port in ports if port):
        raise ValueError("its parameter port is not a number up to 65535")
    if len(ports) not in (1, parameters.get("host", "").count(",") + 1):
        raise ValueError("the number of its ports is neither one nor the number of its hosts")
    if "hostaddr" in parameters and "host" in parameters:
        raise ValueError("taskd cannot honour host and hostaddr together: give one of them")
