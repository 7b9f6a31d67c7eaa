"""`python -m taskd` is the command `taskd`."""

from taskd.cli import main

if __name__ == "__main__":
    main()
