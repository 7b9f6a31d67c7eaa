"""Attacks on taskd, and what each of them is refused."""
