"""A minimal Django project whose views enqueue jobs."""
