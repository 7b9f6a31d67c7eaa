"""Jobs as values: their states, keys, limits, backoff, verdicts and errors.

The lowest room of core: of core, it imports only core.validation. Any module may import it.
"""
