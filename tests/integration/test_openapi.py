"""The HTTP surface against its own OpenAPI document, with generated requests."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.registries import Registry
from testkit.fleet import Fleet, a_prompt, a_request

from kvatlas.router.app import create_app
