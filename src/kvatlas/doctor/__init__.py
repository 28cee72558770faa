"""Looks for silent misses: whether the router believes of an engine what the engine does."""
