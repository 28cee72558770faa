"""Mechanisms that all packages share: backoff, child processes, budgets, own files and folders.

Each is defined once here; read the file that you need.
"""
