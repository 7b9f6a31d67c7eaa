"""The checks of `taskd doctor`: pure functions from rows to findings, worded for people.

`checks.py` lists the checks, and the statements that return the rows of each check.
"""
