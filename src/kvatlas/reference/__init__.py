"""An engine without a model: it caches, evicts, queues and moves KV as a real one would."""
