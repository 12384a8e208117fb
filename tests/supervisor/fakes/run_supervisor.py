"""Runs the supervisor on fakes: `run_supervisor.py ENGINE FRONTEND NUM_FRONTENDS {limits as JSON}`."""

import json
import sys
from pathlib import Path

from streamserve.artifacts import ResolvedModel
from streamserve.config import Config, ServerConfig, SupervisorConfig
from streamserve.logs import configure_logging
from streamserve.supervisor.launcher import ChildModules
from streamserve.supervisor.listener import bind
from streamserve.supervisor.process import supervise

engine, frontend, num_frontends, limits = sys.argv[1:]
configure_logging("supervisor", "info")
model = ResolvedModel(path=Path("/nowhere"), name="fake", dtype="float32", load_format="dummy")
config = Config(
    server=ServerConfig(api_workers=int(num_frontends)), supervisor=SupervisorConfig(**json.loads(limits))
)
with bind("127.0.0.1", 0) as listener:
    sys.exit(supervise(config, model, listener, ChildModules(engine, frontend)))
