"""A model that is not to be had."""

import sys

from child import begin

_, ready = begin()
ready.failed("MODEL fake: no such path;\n  name another")
sys.exit(2)
