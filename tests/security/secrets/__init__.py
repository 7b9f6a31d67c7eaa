"""Secrets: redacted arguments, passwords and keys are where they belong, and nowhere else."""
