"""Makes `python -m clipstream VERB` the same as the console script."""

import sys

from clipstream.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
