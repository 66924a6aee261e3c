"""An engine and an address for tests of the server: `pytest_plugins = ["served_fixtures"]`."""

import pytest
import served
from served import listening

from weft import serve


@pytest.fixture(scope="session")
def engine():
    """An engine that is warmed up once, whichever files ask for it."""
    with serve.Engine(served.speaker_of(), most_waiting=400) as made:
        assert made.wait_compiled(served.PATIENCE)
        yield made


@pytest.fixture(scope="module")
def url(engine):
    with listening(engine, body_limit=5000, name="tiny") as url:
        yield url


@pytest.fixture(scope="session")
def speaker():
    return served.speaker()
