"""The order in which causes are tried names every function that proposes one, of the core and of rings, and no other."""

from __future__ import annotations

from harness.core.causes import ORDER, ORDER_OF_FACTS, all_facts, all_suspects, sort_functions


def test_every_function_has_its_place() -> None:
    assert tuple(function.__name__ for function in all_suspects()) == ORDER
    assert tuple(function.__name__ for function in all_facts()) == ORDER_OF_FACTS


def test_a_function_without_a_place_is_asked_last() -> None:
    def of_a_new_ring() -> None: ...

    def layers_lost() -> None: ...

    assert sort_functions([of_a_new_ring, layers_lost], ORDER) == (layers_lost, of_a_new_ring)
