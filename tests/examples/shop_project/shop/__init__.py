"""A shop whose orders are paid and confirmed by jobs."""
