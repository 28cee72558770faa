"""What a reference worker looks after beside its engine."""

import subprocess
from pathlib import Path

import pytest

from kvatlas.reference import worker as reference_worker
from kvatlas.reference.worker import end_hung
from kvatlas.worker_hooks.reporting.ring import RingReader, RingWriter
from kvatlas.worker_hooks.sidecar.launch import SidecarProcess
from testkit.peer import stop


def a_process() -> SidecarProcess:
    return SidecarProcess(subprocess.Popen(["sleep", "600"]))


async def test_a_sidecar_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reference_worker, "SIDECAR_SILENT_SECONDS", 0.05)
    monkeypatch.setattr(reference_worker, "LOOK_SECONDS", 0.01)
    ring = RingWriter.create(tmp_path / "ring")
    reader, sidecar = RingReader(tmp_path / "ring"), a_process()
    try:
        reader.beat()
        stop(sidecar.pid)
        await end_hung(sidecar, ring)
        assert sidecar.exit_status == -9
        assert "the sidecar gave no sign of life" in caplog.text
    finally:
        sidecar.kill()
        reader.close()
        ring.close()
