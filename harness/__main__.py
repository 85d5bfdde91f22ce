"""`python -m harness`: the same as the script `harness`."""

import sys

from harness.cli import main

sys.exit(main())
