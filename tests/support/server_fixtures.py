"""An engine and an address for tests of the server: `pytest_plugins = ["server_fixtures"]`."""

import pytest
import server_process
from server_process import listening

from weft import serve


@pytest.fixture(scope="session")
def engine():
    """One compiled engine for all test files of a session."""
    with serve.Engine(server_process.make_generator(), most_waiting=400) as made:
        assert made.wait_compiled(server_process.PATIENCE)
        yield made


@pytest.fixture(scope="module")
def url(engine):
    with listening(engine, body_limit=5000, name="tiny") as url:
        yield url


@pytest.fixture(scope="session")
def generator():
    return server_process.shared_generator()
