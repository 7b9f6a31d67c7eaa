"""Put the name of the installation's schema into SQL.

The files of sql/ name the schema `taskd`, so that psql can run them as they are. An installation
with another schema (the setting `schema`) runs the same text with another name. The pattern below
finds the names to replace: those of the schema and its objects, channels of NOTIFY, roles, and the
application names of connections.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache

from taskd.config.parsing import SCHEMA_DEFAULT

# PostgreSQL allows 63 bytes for the name of a channel: this prefix, an underscore, and a queue.
CHANNEL_PREFIX_MAX = 14

_PLACE = re.compile(
    r"""
    (?P<schema>
        # An object of the schema, but not the parameter 'taskd.notify', which transactions set, and
        # no file or module that a text for people names.
        (?<![\w.])taskd(?=\.(?!notify'|notify[ ]=|(?:toml|testing|service|sql)\b)[a-z_%'":])
      | (?<=SCHEMA[ ])taskd\b
      | (?<=schema[ ])taskd\b
      | (?<=name[ ]=[ ]')taskd(?=')
      | (?<=')taskd(?='::regnamespace)
      | (?<![\w.])taskd(?=_(?:owner|producer|worker|observer|admin)\b)
      | (?<=['^])taskd(?=[ ][(%]|[ ](?:work|lease)')
    )
    | (?P<channel> (?<=')taskd(?=_'|:ended') | (?<=notify\(')taskd(?=') )
    """,
    re.VERBOSE,
)

# The names of the schemas that this process uses.
_used = {SCHEMA_DEFAULT}


def in_schema(text: str, schema: str) -> str:
    """Return SQL, or a text that quotes SQL, with this schema in place of `taskd`."""
    if schema == SCHEMA_DEFAULT:
        return text
    _used.add(schema)
    names = {"schema": schema, "channel": channel_prefix(schema)}
    return _PLACE.sub(lambda found: names[found.lastgroup or "schema"], text)


@cache
def channel_prefix(schema: str) -> str:
    """Return the first part of the names of the schema's channels; it is also a channel's name."""
    if len(schema) <= CHANNEL_PREFIX_MAX:
        return schema
    digest = hashlib.sha256(schema.encode()).hexdigest()
    return f"{schema[:5]}_{digest[:8]}"


def names_schema(message: str) -> str | None:
    """Return the schema that a message of PostgreSQL about a missing object or schema names.

    Only schemas that this process uses are found. The message contains the name in every language
    of the server.
    """
    for each in _used - {SCHEMA_DEFAULT}:
        # Not behind a dot: `jobs` can also be a table of another application.
        if re.search(rf"(?<![\w.]){each}(?!\w)", message):
            return each
    return SCHEMA_DEFAULT if re.search(rf"\b{SCHEMA_DEFAULT}\b", message) else None


def is_schema(name: str) -> bool:
    """Return whether this process uses the schema of this name."""
    return name in _used
