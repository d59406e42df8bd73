"""`python -m moe28t_jax.cli` is `moe28t`."""

import sys

from moe28t_jax.cli import main

sys.exit(main())
