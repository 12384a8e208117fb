"""An engine in a native call that never returns and never drops the GIL."""

import ctypes

from child import begin, report_ready

bootstrap, ready = begin()
report_ready(bootstrap, ready)
ctypes.PyDLL(None).pause()
