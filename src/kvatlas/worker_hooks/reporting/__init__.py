"""From what an engine does to batches in the log: hook, ring, engine state, outbox.

Read `hook.py` (the engine's side), then `reporter.py` (the sidecar's side).
"""
