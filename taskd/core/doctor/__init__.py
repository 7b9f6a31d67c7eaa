"""Check a database and an installation: from rows to findings, in words for people.

`checks.py` lists the checks; each is a function of the rows that it needs, and returns findings.
"""
