"""Runs the supervisor on fakes: `run_supervisor.py MODEL ENGINE FRONTEND NUM_FRONTENDS {limits as JSON}`."""

import json
import sys

from streamserve.config import Config, ServerConfig, SupervisorConfig
from streamserve.logs import configure_logging
from streamserve.supervisor.launcher import ChildModules
from streamserve.supervisor.listener import bind
from streamserve.supervisor.process import supervise

model, engine, frontend, num_frontends, limits = sys.argv[1:]
configure_logging("supervisor", "info")
config = Config(
    server=ServerConfig(api_workers=int(num_frontends)), supervisor=SupervisorConfig(**json.loads(limits))
)
with bind("127.0.0.1", 0) as listener:
    sys.exit(supervise(config, listener, ChildModules(model, engine, frontend)))
