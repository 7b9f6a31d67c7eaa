"""Statements that collect rows for people: reports, dashboard, `top`, `tail`, metrics, doctor.

Nearly all of them only read. The statements of bench, demo and taskd.testing are here, too. This
package imports the other packages of the store.
"""
