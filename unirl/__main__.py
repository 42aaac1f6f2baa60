"""`python -m unirl` is the `unirl` command."""

import sys

from unirl.cli import main

if __name__ == "__main__":
    sys.exit(main())
