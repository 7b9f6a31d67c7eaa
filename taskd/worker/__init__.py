"""Waits: every loop, every signal, every asyncio task of a worker lives on this floor."""

from taskd.worker.worker import Report, Worker

__all__ = ["Report", "Worker"]
