"""Snapshots of the fold: their format, checks, loading, writing.

Read `contents.py` first (ADR-0008).
"""
