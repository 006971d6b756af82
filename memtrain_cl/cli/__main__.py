"""`python -m memtrain_cl.cli` is `memtrain-cl`."""

import sys

from memtrain_cl.cli import main

if __name__ == "__main__":
    sys.exit(main())
