"""A probe looks through all that Python's collector tracks; what a session of tests holds by then is set aside."""

import gc

import pytest


@pytest.fixture(autouse=True)
def only_the_tests_own_objects() -> None:
    gc.collect()
    gc.freeze()
