"""The process beside an engine, `python -m kvatlas.worker_hooks.sidecar`.

Read `index_service.py` first.
"""
