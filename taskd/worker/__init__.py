"""Waits: every loop, every signal, every asyncio task of a worker lives on this floor."""

from taskd.worker.asked import Answerer
from taskd.worker.lifeline import Lifeline, Place, longest_stop_s
from taskd.worker.notify import Notify
from taskd.worker.processes import Processes
from taskd.worker.report import Report
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
