"""`python -m clipstream.audit precision`."""

import sys

from clipstream.audit import main

sys.exit(main())
