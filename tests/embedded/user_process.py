"""A process that uses the embedded server: user_process.py <home> <json options>.

It starts or joins, prints one line of JSON, and does what the lines on its stdin say:
query, close, wait (close and wait for the end), fork (leave a child behind), exit (os._exit).
At the end of stdin it ends.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from taskd import embedded
from taskd.errors import EmbeddedError


def query(server):
    import asyncpg

    async def ask():
        connection = await asyncpg.connect(**server.connect_args())
        try:
            return await connection.fetchval("select current_database()")
        finally:
            await connection.close()

    return asyncio.run(ask())


def say(**words):
    print(json.dumps(words), flush=True)


def act(server, command):
    if command == "query":
        say(answer=query(server))
    elif command == "close":
        server.close()
        say(closed=True)
    elif command == "wait":
        server.close(wait_s=10)
        say(running=embedded.status(server.home).running)
    elif command == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        say(child=child)
    elif command == "exit":
        os._exit(0)
    elif command == "stop":
        try:
            say(stopped=embedded.stop(server.home))
        except EmbeddedError as error:
            say(error=str(error))


def main():
    # A shell's background job ignores it, and so would every test that it runs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    home = Path(sys.argv[1]) if sys.argv[1] else None
    try:
        server = embedded.start(home, **json.loads(sys.argv[2]))
    except EmbeddedError as error:
        say(error=str(error))
        return
    say(started=server.started, host=server.host, home=str(server.home), pid=os.getpid())
    for line in sys.stdin:
        act(server, line.strip())


main()
