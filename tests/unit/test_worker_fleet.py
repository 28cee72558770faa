"""What `serve` starts its workers with."""

import msgspec

from kvatlas.runtime.worker_fleet import EngineOptions, _arguments, _environment
from kvatlas.schemas.settings import NatsSettings, Settings, load_settings

URL = "nats://kv:p4ss-w0rd@127.0.0.1:4222"
ENGINES = EngineOptions(1, 100, 16_384, 16, 20_000.0, 50.0, 1.0)


def test_no_secret_is_an_argument() -> None:
    arguments = _arguments(ENGINES, "w0", "/run/w0")
    assert not [each for each in arguments if "nats" in each or "creds" in each]


def test_the_broker_and_its_credentials_travel_in_the_environment() -> None:
    settings = Settings(nats=NatsSettings(credentials="file.creds", folder="/data"))
    told = load_settings(None, environment=_environment(settings, URL))
    assert told.nats == msgspec.structs.replace(settings.nats, url=URL, folder="")
