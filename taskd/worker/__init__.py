"""Waits: every loop, every signal, every asyncio task of a worker lives on this floor."""

from taskd.worker.finishing.drain_report import Report
from taskd.worker.processes.parent import Processes
from taskd.worker.processes.stats_socket import Answerer
from taskd.worker.sd_notify import Notify
from taskd.worker.stopping.parent_watch import Lifeline, Place, longest_stop_s
from taskd.worker.worker import Worker

__all__ = [
    "Answerer",
    "Lifeline",
    "Notify",
    "Place",
    "Processes",
    "Report",
    "Worker",
    "longest_stop_s",
]
