"""`taskd jobs`: list and show jobs; retry, cancel and change them, one by one or in bulk."""
