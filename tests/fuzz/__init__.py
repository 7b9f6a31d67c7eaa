"""Promises held against whatever hypothesis thinks of: by subject, one module each."""
