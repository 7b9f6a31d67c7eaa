"""Turn successive reads of the database into the screens of `taskd top` and `taskd tail`.

Imports core.jobs. The command line imports it.
"""
