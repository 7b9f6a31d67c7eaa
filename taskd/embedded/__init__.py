"""The embedded PostgreSQL: without a DSN, taskd starts its own server, or joins a running one.

The state of the server is in flock() locks on five empty files in its home, and in no pid file.
The kernel releases a lock when the process that holds it ends, in whatever way. The files, the mode
of the lock, and who holds it:

```
start.lock   EX  a process that initialises, starts or stops the server; initdb inherits it
users.lock   SH  every process that uses the server: the reference count
server.lock  EX  postmaster and backends, which inherit it: while it is locked, the server runs
watch.lock   EX  the watcher, which stops the server after its last user
keep.lock    EX  the holder of a kept server (`taskd db start`)
```

Imports config and errors; the client, the command line and taskd.testing import it.
"""

from taskd.embedded.binaries import pg_binary
from taskd.embedded.data_directory import default_home
from taskd.embedded.server import Server, Status, keep, start, status, stop

__all__ = ["Server", "Status", "default_home", "keep", "pg_binary", "start", "status", "stop"]
