"""`python -m clipstream.precompute STORE …`."""

from __future__ import annotations

import sys

from clipstream.precompute import main

sys.exit(main())
