"""The process beside an engine, `python -m kvatlas.worker_hooks.sidecar`.

Read `service.py` first.
"""
