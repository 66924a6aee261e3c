"""An engine and an address for tests of the server: `pytest_plugins = ["server_fixtures"]`."""

import pytest
import server_process
from server_process import listening

from weft import serve


@pytest.fixture(scope="session")
def engine():
    """An engine that is warmed up once, whichever files ask for it."""
    with serve.Engine(server_process.speaker_of(), most_waiting=400) as made:
        assert made.wait_compiled(server_process.PATIENCE)
        yield made


@pytest.fixture(scope="module")
def url(engine):
    with listening(engine, body_limit=5000, name="tiny") as url:
        yield url


@pytest.fixture(scope="session")
def speaker():
    return server_process.speaker()
