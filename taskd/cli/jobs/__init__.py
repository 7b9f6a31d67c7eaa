"""`taskd jobs`: list and show jobs; retry, cancel, change, complete, restart and delete them."""
