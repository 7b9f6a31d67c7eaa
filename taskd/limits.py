"""Limits of tasks: `@task(limit=Limit(concurrency=2, by="tenant"))`."""

from taskd.core.jobs.limit import Limit

__all__ = ["Limit"]
