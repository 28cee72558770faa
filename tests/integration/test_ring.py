"""The ring between two processes."""

import subprocess
import sys
from pathlib import Path

from kvatlas.worker_hooks.reporting.ring import Lost, RingReader, RingWriter

NUM_RECORDS = 60_000

WRITER = """
import sys, time
from pathlib import Path
from kvatlas.worker_hooks.reporting.ring import RingWriter
ring = RingWriter.create(Path(sys.argv[1]), 1 << 14)
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[2])):
    ring.append(i.to_bytes(4, "little") * (1 + i * 37 % 200))
    if i % 500 == 0:
        time.sleep(0)
print(ring.num_dropped, flush=True)
sys.stdin.readline()
"""

SECOND_END = """
import sys
from pathlib import Path
from kvatlas.schemas.errors import RingUnusable
from kvatlas.worker_hooks.reporting import ring
try:
    getattr(ring, sys.argv[2])(Path(sys.argv[1]))
except RingUnusable:
    sys.exit(7)
"""


def test_whole_records_arrive_in_order_and_every_loss_is_told(tmp_path: Path) -> None:
    """A small ring, a writer that is faster than the reader, and a reader that starts again."""
    path = tmp_path / "ring"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", WRITER, path, str(NUM_RECORDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        reader = RingReader(path)
        process.stdin.write("\n")
        process.stdin.flush()
        expected, num_taken, num_lost, num_looks = 0, 0, 0, 0
        while num_taken + num_lost < NUM_RECORDS:
            for record in reader.read(2000):
                if isinstance(record, Lost):
                    num_lost += record.num_records
                    expected += record.num_records
                    continue
                number = int.from_bytes(record[:4], "little")
                assert number == expected
                assert record == number.to_bytes(4, "little") * (1 + number * 37 % 200)
                expected += 1
                num_taken += 1
            num_looks += 1
            if num_looks % 1000 == 0:
                reader.close()
                reader = RingReader(path)
        assert int(process.stdout.readline()) == num_lost
        assert num_taken > 0
        assert reader.has_writer()
        process.stdin.close()
        process.wait()
        assert not reader.has_writer()
        reader.close()


def test_each_end_has_one_owner(tmp_path: Path) -> None:
    writer = RingWriter.create(tmp_path / "ring")
    reader = RingReader(tmp_path / "ring")
    for end in ("RingReader", "RingWriter"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", SECOND_END, tmp_path / "ring", end], check=False
        )
        assert done.returncode == 7
    reader.close()
    writer.close()
