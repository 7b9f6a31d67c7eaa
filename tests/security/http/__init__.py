"""Attacks on the dashboard, the probes and the metrics."""
