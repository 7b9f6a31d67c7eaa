"""The embedded PostgreSQL: without a DSN, taskd starts its own server or joins a running server.

The processes that start, use and stop the server coordinate by flock() on five empty files in the
home of the server. Locks replace a pid file: the kernel releases a lock when its last holder ends,
even if that process was killed. The list shows each file, the mode of its lock, and the process
that holds the lock:

```
start.lock   EX  a process that initialises, starts or stops the server; initdb inherits the lock
users.lock   SH  every process that uses the server; the last one to end frees the lock
server.lock  EX  postmaster and backends, which inherit the lock; it is held while the server runs
watch.lock   EX  the watcher, a process that stops the server after its last user
keep.lock    EX  the holder, a process that counts as a user (`taskd db start`)
```

This package imports config and errors; the client, the command line and taskd.testing import this
package.
"""

from taskd.embedded.binaries import pg_binary
from taskd.embedded.data_directory import default_home
from taskd.embedded.server import Server, Status, keep, start, status, stop

__all__ = ["Server", "Status", "default_home", "keep", "pg_binary", "start", "status", "stop"]
