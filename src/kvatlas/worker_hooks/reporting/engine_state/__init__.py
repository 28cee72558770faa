"""What an engine holds, by its own hashes and by ours, and which changes of it are published.

Read `tracker.py` first: raw events in, events of the log out.
"""
