"""The worker: it claims jobs, runs their handlers, and writes the outcomes.

This package imports client, store, core, events, errors and config; the command line, the dashboard
and taskd.testing import this package.
"""

from taskd.worker.finishing.drain_report import DrainReport
from taskd.worker.processes.parent import Processes
from taskd.worker.processes.stats_socket import StatsServer
from taskd.worker.sd_notify import Notify
from taskd.worker.stopping.parent_watch import ParentWatch, ProcessIndex, longest_stop_s
from taskd.worker.worker import Worker

__all__ = [
    "DrainReport",
    "Notify",
    "ParentWatch",
    "ProcessIndex",
    "Processes",
    "StatsServer",
    "Worker",
    "longest_stop_s",
]
