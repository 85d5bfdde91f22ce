"""A probe looks through all that Python's collector tracks; what a session of tests holds by then is set aside."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def only_the_tests_own_objects() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
