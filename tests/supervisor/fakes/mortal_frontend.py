"""A frontend that the first connection kills; it says which life of its it was."""

import os
import socket

from child import begin, say

bootstrap, ready = begin()
ready.ready({})
socket.socket(fileno=bootstrap.listen).accept()
say(f"life {bootstrap.channels[0].incarnation}")
os._exit(7)
