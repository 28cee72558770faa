"""What an engine image has to carry: the base dependencies, and the bus only in the sidecar."""

import subprocess
import sys

import pytest

HEAVY = {"fastapi", "nixl", "numba", "numpy", "sqlalchemy", "torch", "uvicorn"}


def modules_after(module: str) -> set[str]:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["worker_hooks.sidecar.__main__", "reference.engine"])
def test_no_part_needs_more_than_the_base(module: str) -> None:
    assert modules_after(f"kvatlas.{module}") & HEAVY == set()


@pytest.mark.parametrize(
    "module",
    ["worker_hooks.reporting.hook", "worker_hooks.sidecar.launch", "worker_hooks.sidecar.channel"],
)
def test_what_an_engine_imports_does_not_load_the_bus(module: str) -> None:
    assert "nats" not in modules_after(f"kvatlas.{module}")
