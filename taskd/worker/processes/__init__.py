"""Several worker processes under one parent: `taskd run --processes 4`.

The command line and worker.worker import it.
"""
