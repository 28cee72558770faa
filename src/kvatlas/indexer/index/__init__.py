"""The prefix index: port, plain twin, flat arrays with compiled kernels, shared memory.

Read `port.py` first, then `reference.py`, which is the index in plain Python.
"""
