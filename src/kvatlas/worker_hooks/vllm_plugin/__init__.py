"""kvatlas inside vLLM: loaded by its entry point `vllm.general_plugins`.

plugin.py       what vLLM calls, and what of vLLM is patched
publisher.py    one engine's publisher: its batches to the ring, nothing else
told_blocks.py  what has been told, to tell it again after a loss
facts.py        what vLLM's configuration says of the worker
running.py      what runs in this process, for the KV connector
"""
