"""`python -m offbench.offload.zerocopy`."""

import sys

from offbench.offload.zerocopy.rates import main

sys.exit(main())
