"""Jobs as values: their states, keys, limits, backoff, verdicts and errors.

Of core, this package imports only core.validation. Any module may import this package.
"""
