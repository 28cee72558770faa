"""The service around the fold: it follows the log and executes effects.

Read `index_service.py` first.
"""
