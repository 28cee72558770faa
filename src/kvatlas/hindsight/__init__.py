"""The past: replay, explain and check of an archive. Read `replay.py` first."""
