"""Load and goodput: sends a stated workload to an endpoint and says how many requests met their objectives.

`workload` says when and what is sent, `slo` and `goodput` what counts as good, `runner` sends it, `results`
keeps what was measured. README.md has the map; docs/bench.md is for users.
"""
