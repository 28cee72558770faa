"""Pipelined publishing to JetStream. Read `publisher.py` first (ADR-0007, ADR-0011)."""
