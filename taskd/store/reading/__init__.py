"""Statements that only read.

Reports, the dashboard, `top` and `tail`, metrics, the doctor; and the helpers of bench, demo and
tests. Imports the rooms of the store below it.
"""
