"""`python -m clipstream.bench …`."""

from __future__ import annotations

import sys

from clipstream.bench import main

if __name__ == "__main__":
    sys.exit(main())
