"""The embedded PostgreSQL: without a DSN, taskd starts its own server, or joins a running one.

The state is flock() on five empty files in the server's home. The kernel drops a lock with the
process that held it, however it ended; no pid file is trusted.

```
start.lock   EX  a process that initialises, starts or stops; initdb inherits it
users.lock   SH  every process that uses the server: the reference count
server.lock  EX  postmaster and backends inherit it: locked means running
watch.lock   EX  the watcher, which stops the server after its last user
keep.lock    EX  the holder of a kept server (`taskd db start`)
```

Imports config and errors; the client, the command line and taskd.testing import it.
"""

from taskd.embedded.binaries import pg_binary
from taskd.embedded.data_directory import default_home
from taskd.embedded.server import Server, Status, keep, start, status, stop

__all__ = ["Server", "Status", "default_home", "keep", "pg_binary", "start", "status", "stop"]
