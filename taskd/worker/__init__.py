"""Waits: every loop, every signal, every asyncio task of a worker lives on this floor."""

from taskd.worker.report import Report
from taskd.worker.worker import Worker

__all__ = ["Report", "Worker"]
