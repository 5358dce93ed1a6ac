"""`python -m traincluster`: the command without an installed entry point."""

import sys

from traincluster.command import main

sys.exit(main())
