"""A dashboard, and a worker with an endpoint, for attacks over HTTP."""

from __future__ import annotations

from tests.web.conftest import desk, other, silent_loop
from tests.web.conftest import serve as serve_worker
from tests.web.dashboard.conftest import anybody, guarded, often, serve
from tests.web.dashboard.test_acting import emitted

__all__ = [
    "anybody", "desk", "emitted", "guarded", "often", "other", "serve", "serve_worker",
    "silent_loop",
]  # fmt: skip
