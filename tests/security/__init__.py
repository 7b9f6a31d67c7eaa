"""Attacks: what a role, a stranger or a hostile text tries, and what it can cost the others."""
