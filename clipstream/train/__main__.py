"""`python -m clipstream.train …`."""

from __future__ import annotations

import sys

from clipstream.train import main

sys.exit(main())
