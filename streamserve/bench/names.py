"""Names that the command line and the figures share, without what they need to be worked out."""

DATASET_NAMES = ("random", "sharegpt-like", "prefix_repetition")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
# Name and heading of each distribution.
METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
