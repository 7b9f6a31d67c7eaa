"""The long form: every fault at its full length, with one line of figures for each.

python -m tests.system.faults             # all of them, about ten minutes
python -m tests.system.faults outage lock
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from tests.system.faults import test_failover as failover
from tests.system.faults import test_limits as limits
from tests.system.faults import test_network as network
from tests.system.faults import test_outages as outages
from tests.system.faults import test_pooler as pooler
from tests.system.faults.fixture import Outcome

SCENARIOS: dict[str, Callable[[], Coroutine[Any, Any, Outcome]]] = {
    "restarts": outages.restarts,
    "outage": outages.outage,
    "missing": outages.missing,
    "half_open": network.half_open,
    "partition": network.partition,
    "link_down": network.link_down,
    "slow_and_cut": network.slow_and_cut,
    "lost_claims": network.lost_claims,
    "lost_claims_silently": partial(network.lost_claims, silently=True),
    "lost_acks": network.lost_acks,
    "lost_acks_silently": partial(network.lost_acks, silently=True),
    "failover_synchronous": failover.failover,
    "failover_leaderless": partial(failover.failover, leaderless_s=45.0),
    "failover_asynchronous": partial(failover.failover, synchronous=False),
    "claims_undone": failover.claims_undone,
    "read_only": failover.read_only,
    "direct": pooler.direct,
    "pooler": pooler.pooler,
    "pooler_listen_dsn": partial(pooler.pooler, listens=True),
    "pooler_ignoring": partial(pooler.pooler, ignored=pooler.REFUSES_NOTHING),
    "connections": limits.connections,
    "lock": limits.lock,
    "disk_full": limits.disk_full,
    "disk_full_wal": partial(limits.disk_full, wal=True),
}


def main() -> int:
    """Return 0 if every promise held, 4 if one did not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCENARIOS))
    names = parser.parse_args().names or list(SCENARIOS)
    unknown = set(names) - SCENARIOS.keys()
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    broken = 0
    for name in names:
        try:
            outcome = asyncio.run(SCENARIOS[name]())
        except pytest.skip.Exception as reason:
            print(f"{name}: skipped: {reason}", flush=True)
        except (AssertionError, TimeoutError) as error:
            broken += 1
            print(f"{name}: failed: {error or 'it took too long'}", flush=True)
        else:
            broken += not outcome.verdict.ok
            print(outcome, flush=True)
    return 4 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
