"""`python -m pdserve.bench.compare`: the same as `pdserve bench compare`."""

import sys

from pdserve.bench.compare.command import main

if __name__ == "__main__":
    sys.exit(main())
