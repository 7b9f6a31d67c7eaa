"""Decides: given a job, a task and what happened, what comes next. Pure: no clock, no I/O."""
