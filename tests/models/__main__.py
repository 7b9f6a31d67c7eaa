"""`python -m tests.models`: the models hold, and each fails without one of its mechanisms."""

from __future__ import annotations

import sys

from tests.models.check import main

sys.exit(main())
