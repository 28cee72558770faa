"""Recordings of engines' events: written, redacted, and decoded again. Read `captures.py` first."""
