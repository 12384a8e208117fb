"""An engine that cannot start as configured."""

import sys

from child import begin

_, ready = begin()
ready.failed("--dtype: float8 is unknown\nto this model")
sys.exit(2)
