"""The hosts of a DSN: `postgresql://a:5432,b:5433/jobs`, or `?host=a,b`, also with sockets.

The driver has one time limit for all hosts together: if the first host does not answer (a dead
machine, a cut network), the driver never tries the second one. So taskd passes one host at a time
to the driver, and each host has a limit of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

HOST_AND_PORT = re.compile(r"(\[[^\]]*\]|[^:]*)(?::(\d+))?")


def addresses(connect_args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of the driver that choose each host; [{}] without several hosts."""
    dsn = connect_args.get("dsn")
    if dsn is None or "," not in dsn:
        return [{}]
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    found = [
        HOST_AND_PORT.fullmatch(unquote(text))
        for text in parts.netloc.rpartition("@")[2].split(",")
        if text
    ]
    hosts = [(match[1].strip("[]"), match[2]) for match in found if match]
    if not hosts:
        ports = query.get("port", [""])[-1].split(",")
        names = [name for name in query.get("host", [""])[-1].split(",") if name]
        # As in libpq, a single port applies to all hosts.
        fill = ports[0] if len(ports) == 1 else ""
        hosts = list(zip_longest(names, ports[: len(names)], fillvalue=fill))
    if len(hosts) < 2:
        return [{}]
    return [{"host": host} | ({"port": int(port)} if port else {}) for host, port in hosts]
