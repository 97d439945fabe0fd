"""`python -m fattn` is the command line `fattn`."""

from ._command import main

if __name__ == "__main__":
    main()
