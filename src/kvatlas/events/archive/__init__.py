"""The archive: port, adapters, the archiver that fills it, and reading it back.

Read `port.py` first.
"""
