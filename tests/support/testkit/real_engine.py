"""Where a real vLLM is, and tiny models for it. It has an environment of its own.

KVATLAS_ENGINE_PYTHON names its interpreter, else `.venv-engine` is looked at, else this process's.
KVATLAS_ENGINE_MODELS names a folder that keeps the models between runs.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvatlas.worker_hooks.sidecar import detached as sidecar_apart

ROOT = Path(__file__).parents[3]
START_SECONDS = 180.0


def engine_python() -> str:
    """Return an interpreter with vLLM, or skip the test."""
    beside = ROOT / ".venv-engine" / "bin" / "python"
    python = os.environ.get("KVATLAS_ENGINE_PYTHON") or (
        str(beside) if beside.exists() else sys.executable
    )
    looked = [python, "-P", "-c", "import importlib.util as u; exit(u.find_spec('vllm') is None)"]
    if subprocess.run(looked, check=False).returncode:
        pytest.skip("no environment with vLLM: make .venv-engine, or KVATLAS_ENGINE_PYTHON")
    return python


def tiny_models(python: str, folder: Path) -> Path:
    """Return a folder with the models of tests/engine/models.py: `folder`, or the kept one."""
    kept = Path(os.environ.get("KVATLAS_ENGINE_MODELS") or folder).absolute()
    writer = ROOT / "tests" / "engine" / "models.py"
    subprocess.run([python, "-P", str(writer), str(kept)], check=True)
    return kept


class EngineProcess:
    """A vLLM in a process of its own (tests/engine/engine_main.py), asked line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self.pid = process, process.pid

    async def ask(self, **question: Any) -> dict[str, Any]:
        """Return the answer to {"do": "generate" | "reset" | "held", ...}."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        line = await self._process.stdout.readline()
        assert line, "the engine has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def family(self) -> list[psutil.Process]:
        """Return the engine's process, its sidecar, and all that these have started."""
        engine, sidecars = psutil.Process(self.pid), sidecars_of(self.pid)
        others = [child for one in sidecars for child in one.children(recursive=True)]
        return [*others, *sidecars, *engine.children(recursive=True), engine]


def sidecars_of(pid: int) -> list[psutil.Process]:
    """Return the sidecars of an engine, which are no children of it but name it."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if sidecar_apart.MODULE in (line := process.info["cmdline"] or []) and line[-1] == str(pid)
    ]


@asynccontextmanager
async def engine_process(
    python: str, options: dict[str, Any], environment: dict[str, str] | None = None
) -> AsyncIterator[EngineProcess]:
    """Start an engine; it ends when left, by SIGKILL, as a crash would."""
    process = await asyncio.create_subprocess_exec(
        python,
        "-P",
        str(ROOT / "tests" / "engine" / "engine_main.py"),
        json.dumps(options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        assert json.loads(line) == {"ready": True}
        yield EngineProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
