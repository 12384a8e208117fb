"""The load test behind `locust -f loadtest/`.

What is asked (`mixes`), when (`arrivals`), what an answer said (`answers`), what it all comes to
(`histogram`, `timeline`, `summary`, `thresholds`, `plot`) and the clients (`sse`, `websocket`) know nothing
of locust; `users`, `recorder`, `options` and `session` join them to it.
"""
