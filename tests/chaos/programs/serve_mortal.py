"""`streamserve serve` with another engine: `serve_mortal.py MODEL [options]`."""

from __future__ import annotations

import argparse
import sys

from streamserve import config
from streamserve.logs import configure_logging
from streamserve.supervisor.launcher import ChildModules
from streamserve.supervisor.listener import bind
from streamserve.supervisor.process import supervise

parser = argparse.ArgumentParser()
config.add_arguments(parser)
settings = config.load(parser.parse_args())
configure_logging("supervisor", "info")
with bind(settings.server.host, settings.server.port) as listener:
    sys.exit(supervise(settings, listener, ChildModules(engine="mortal_engine")))
