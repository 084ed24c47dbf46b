import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

_numbers = itertools.count()


@pytest.fixture
def name():
    """A name for an endpoint or job that no other test uses."""
    return f"pytest-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def in_worker():
    """Runs a function in a thread while the main thread, which gives buffers back later, waits for it."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result()
