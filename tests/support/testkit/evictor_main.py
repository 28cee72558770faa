"""An engine process that evicts and fills slots of a pool as fast as it can.

Run as `python evictor_main.py POOL`; ends with standard input and prints how often it evicted.
"""

import random
import select
import sys
from pathlib import Path

from kvatlas.worker_hooks.transfer.pool import ServePool
from testkit.blocks import a_block, a_hash


def main(path: str) -> None:
    pool = ServePool.attach(Path(path))
    rng, number, num_evicted = random.Random(7), 0, 0
    blocks = [a_block(n, pool.block_bytes) for n in range(64)]
    for slot in range(pool.num_slots):
        pool.commit(slot, a_hash(slot), blocks[slot % 64])
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        slots = rng.sample(range(pool.num_slots), 2)
        for slot in pool.try_evict(slots):
            number = (number + 1) % 64
            pool.commit(slot, a_hash(number), blocks[number])
            num_evicted += 1
    print(num_evicted, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
