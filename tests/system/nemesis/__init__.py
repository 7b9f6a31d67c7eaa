"""The nemesis: several hosts of workers, jobs of every kind, faults at random, and the judge.

    python -m tests.system.nemesis --minutes 3
    python -m tests.system.nemesis --minutes 60 --seed 7
    python -m tests.system.nemesis --minutes 15 --jobs 50000 --load ledger

A host is a name of its own (so that no other can prove its processes dead), worker processes that
are started again whenever they end, and a proxy before the database that can be broken. Faults
come every few seconds, and several may last at a time; each is taken back in the end, and then
everything must end by itself.
"""
