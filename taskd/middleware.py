"""`from taskd.middleware import middleware`: what an app puts around the attempts of its tasks."""

from taskd.core.middleware import CallNext, middleware

__all__ = ["CallNext", "middleware"]
