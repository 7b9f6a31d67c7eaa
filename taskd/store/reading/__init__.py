"""Statements that only read.

They serve reports, the dashboard, `top` and `tail`, metrics and the doctor. The statements of
bench, demo and taskd.testing are here, too; some of them write. Imports the other packages of the
store.
"""
