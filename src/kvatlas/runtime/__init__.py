"""What every process has: HTTP server, health, broker, start and stop; the processes of `serve`.

Read `role.py` first, then `serve.py`, which puts the parts together.
"""
