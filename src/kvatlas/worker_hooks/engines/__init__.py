"""One file an engine: its batches become raw events. Nothing else knows an engine's format."""
