"""A frontend whose streams do not end."""

import signal

from child import begin, follow_board, report_ready

from streamserve.bootstrap import STOP_ORDER

bootstrap, ready = begin()
signal.signal(STOP_ORDER, signal.SIG_IGN)
report_ready(bootstrap, ready)
follow_board(bootstrap)
