"""Promises checked with hypothesis's examples: by subject, one module each."""
