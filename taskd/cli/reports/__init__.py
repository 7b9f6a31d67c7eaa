"""Commands that only report: actions by hand, statistics, events of jobs, and why a job waits."""
