"""`python -m offbench`."""

from __future__ import annotations

import sys

from offbench.cli import main

sys.exit(main())
