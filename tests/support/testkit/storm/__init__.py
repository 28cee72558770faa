"""A storm: the whole control plane as processes, under load, killed and paused at random.

chains.py      the prompts that everybody knows
engine.py      what a worker's engine does: stores and removes, and keeps the truth
truth.py       the truth as a file that survives a kill
worker_main.py a worker as a process: that engine with the real ring, sidecar and publisher
processes.py   brokers, roles and workers, to be killed, paused and started again
faults.py      the seeded schedule
watching.py    requests to the router, and looks at what the indexers say
fleet.py       all of it at once: `run_storm`
verifying.py   afterwards: every answer against the truth
"""
