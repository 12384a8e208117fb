"""`python -m streamserve.config > docs/configuration.md`."""

import sys

from streamserve.config.table import page

sys.stdout.write(page())
