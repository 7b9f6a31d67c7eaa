"""The embedded PostgreSQL: with no DSN configured, taskd starts or joins a server of its own.

The state is flock() on five empty files in the server's home, which the kernel drops with the
process that held them, however it ended; no pid is stored or believed.

```
start.lock   EX  whoever initialises, starts or stops; initdb inherits it
users.lock   SH  every process that uses the server: the reference count
server.lock  EX  postmaster and backends inherit it: taken means running
watch.lock   EX  the watcher, which stops the server after its last user
keep.lock    EX  the holder of a kept server (`taskd db start`)
```
"""

from taskd.embedded.binaries import pg_binary
from taskd.embedded.data_directory import default_home
from taskd.embedded.server import Server, Status, keep, start, status, stop

__all__ = ["Server", "Status", "default_home", "keep", "pg_binary", "start", "status", "stop"]
