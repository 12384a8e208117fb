"""An engine that dies without a word."""

import sys

from child import begin

begin()
sys.exit(3)
