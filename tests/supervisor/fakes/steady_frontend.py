"""A frontend that says what the status board shows, and stops when asked to."""

from child import begin, exit_on_order, follow_board, report_ready

bootstrap, ready = begin()
exit_on_order(f"frontend {bootstrap.index}")
report_ready(bootstrap, ready)
follow_board(bootstrap)
