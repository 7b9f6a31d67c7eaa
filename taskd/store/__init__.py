"""Remembers: the only floor that speaks SQL. Statements live in sql/queries, whole and named."""
