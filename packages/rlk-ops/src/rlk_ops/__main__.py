"""`python -m rlk_ops`: see :mod:`rlk_ops.testing.cli`."""

import sys

from rlk_ops.testing.cli import main

sys.exit(main())
