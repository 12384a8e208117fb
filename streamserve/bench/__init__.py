"""`streamserve bench serve`: measures a running server with the definitions of `vllm bench serve`.

Requests are made up (`datasets`) and sent at chosen times (`arrivals`, `run`) over connections that note when
each byte came (`connection`). Answers are read as streams of tokens (`timing`); `metrics` works the figures
out and `report` shows them.
"""
