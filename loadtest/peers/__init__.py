"""Races servers: the same model, prompts, sampling, client and number of streams for each.

`python -m loadtest.peers.install` puts the other servers where they are found, and `python -m loadtest.peers`
runs the race: in each round every server is started, timed, driven and stopped, one after the other, so that
a machine that gets busier is busier for all of them. What is compared is the ratio within a round, and then
its median.
"""
