"""`python -m tests.models`: the models hold, and miss every mechanism that is taken out."""

from __future__ import annotations

import sys

from tests.models.check import main

sys.exit(main())
