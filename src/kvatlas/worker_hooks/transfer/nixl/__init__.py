"""Transfers over NIXL, which runs in a process of its own (ADR-0005). Read `transport.py` first."""
