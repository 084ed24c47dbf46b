import itertools
import os

import pytest

_numbers = itertools.count()


@pytest.fixture
def name():
    """A name for an endpoint or job that no other test uses."""
    return f"pytest-{os.getpid()}-{next(_numbers)}"
