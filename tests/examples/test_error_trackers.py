"""The examples for error trackers: a real worker, the trackers' own SDKs, and what they send."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent / "error_trackers"
WITHIN_S = 60.0


class Tracker(ThreadingHTTPServer):
    """A tracker on this host; `bodies` are the requests that it has received."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Receive)


class _Receive(BaseHTTPRequestHandler):
    server: Tracker

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        zipped = self.headers.get("Content-Encoding") == "gzip"
        self.server.bodies.append(gzip.decompress(body) if zipped else body)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"err": 0, "result": {}}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def tracker() -> Iterator[Tracker]:
    with Tracker() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


async def run(dsn: str, sql: Any, tmp_path: Path, app: str, **environ: str) -> None:
    """Run jobs that fail, with an app that consists of these lines."""
    (tmp_path / "tracked_app.py").write_text(app)
    for task in ("charge", "ship", "render"):
        await sql.execute("SELECT taskd.enqueue($1, '{\"order\": 7}', queue => 'shop')", task)
    ended = subprocess.run(
        [sys.executable, "-m", "taskd", "run", "--app", "tracked_app", "--until-empty"],
        cwd=tmp_path,
        env=os.environ
        | {"TASKD_DSN": dsn, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])}
        | environ,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr  # jobs have failed
    assert "errors.not_reported" not in ended.stderr


async def test_sentry_receives_the_exception_its_frames_and_the_lines_of_its_attempt(
    dsn: str, sql: Any, tmp_path: Path, tracker: Tracker
) -> None:
    await run(
        dsn,
        sql,
        tmp_path,
        # What is set at the import stays on every event.
        "import tracked_shop, with_sentry, sentry_sdk\nsentry_sdk.set_tag('service', 'shop')\n",
        SENTRY_DSN=f"http://key@127.0.0.1:{tracker.server_port}/1",
    )
    found = {}
    for body in tracker.bodies:
        for line in body.splitlines():
            item = json.loads(line)
            if "exception" in item:
                found[item["tags"]["task"]] = item
    assert found.keys() == {"charge", "ship", "render"}
    for task, text, crumb in (
        ("charge", "the card has expired", "charging order 7"),
        ("ship", "nobody has packed it", "shipping order 7"),
    ):
        event = found[task]
        (error,) = event["exception"]["values"]
        assert (error["type"], error["value"]) == ("LookupError", text)
        frame = error["stacktrace"]["frames"][-1]
        assert (frame["function"], frame["vars"]["order"]) == (task, "7")
        assert event["contexts"]["job"]["attempt"] == 1
        assert event["tags"]["service"] == "shop"
        crumbs = [each["message"] for each in event["breadcrumbs"]["values"]]
        assert crumbs == [crumb]
    cause, error = found["render"]["exception"]["values"]
    assert error["value"] == "ArithmeticError: no such size"
    assert 'raise ArithmeticError("no such size")' in cause["value"]


async def test_rollbar_receives_the_exception_and_its_frames(
    dsn: str, sql: Any, tmp_path: Path, tracker: Tracker
) -> None:
    await run(
        dsn,
        sql,
        tmp_path,
        "import rollbar, tracked_shop, with_rollbar\n"
        f"rollbar.SETTINGS['endpoint'] = 'http://127.0.0.1:{tracker.server_port}/api/1/'\n",
        ROLLBAR_TOKEN="token",
    )
    found = {}
    for body in tracker.bodies:
        data = json.loads(body)["data"]
        found[data["custom"]["task"]] = data["body"]
    assert found.keys() == {"charge", "ship", "render"}
    assert found["charge"]["trace"]["exception"] == {
        "class": "LookupError",
        "message": "the card has expired",
    }
    assert found["charge"]["trace"]["frames"][-1]["method"] == "charge"


async def test_opentelemetry_receives_a_span_in_the_trace_of_the_attempt(
    dsn: str, sql: Any, tmp_path: Path
) -> None:
    await run(
        dsn,
        sql,
        tmp_path,
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor\n"
        "provider = TracerProvider()\n"
        "exporter = ConsoleSpanExporter(\n"
        "    out=open('spans', 'a'), formatter=lambda span: span.to_json(indent=None) + '\\n'\n"
        ")\n"
        "provider.add_span_processor(SimpleSpanProcessor(exporter))\n"
        "trace.set_tracer_provider(provider)\n"
        "import tracked_shop, with_opentelemetry\n",
    )
    spans = [json.loads(line) for line in (tmp_path / "spans").read_text().splitlines()]
    errors = {each["attributes"]["task"]: each for each in spans if each["name"] == "error"}
    assert errors.keys() == {"charge", "ship", "render"}
    attempts = {each["name"]: each for each in spans}
    for task, error in errors.items():
        attempt = attempts[f"run {task}"]["context"]
        assert error["context"]["trace_id"] == attempt["trace_id"]
        assert error["parent_id"] == attempt["span_id"]
        assert error["events"][0]["attributes"]["exception.type"]
