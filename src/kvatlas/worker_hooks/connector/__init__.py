"""Parts of the vLLM connector that need no vLLM; `vllm_connector.py` beside it is the glue.

finding.py    scheduler side: who holds a prompt that came without a plan
decoding.py   scheduler side: what a request wants of peers, what it leaves for them
orders.py     what the scheduler side tells the worker side in each step
slots.py      worker side: which block is in which slot of the serve pool
loads.py      worker side: pulls, off the engine's thread
stats.py      what became of them, for the engine's log and metrics
layers.py     worker side: between a slot and the engine's tensors
"""
