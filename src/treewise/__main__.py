"""`python -m treewise` is the command, for launchers that start modules (torchrun, accelerate)."""

import sys

from treewise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
