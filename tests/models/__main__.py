"""`python -m tests.models`: the models hold, and fail without any of their mechanisms."""

from __future__ import annotations

import sys

from tests.models.check import main

sys.exit(main())
