"""What is wrong with a database and a set-up: from rows to findings. The words are for people.

`checks.py` lists the checks; each is a function of the rows that it needs and says what it found.
"""
