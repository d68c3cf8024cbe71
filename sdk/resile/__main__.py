"""`python -m resile` is the command `resile`."""

import sys

from .cli import main

sys.exit(main())
