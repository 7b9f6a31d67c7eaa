"""Attacks: each test is one that a stranger, a producer, a worker's login or a text has tried."""
