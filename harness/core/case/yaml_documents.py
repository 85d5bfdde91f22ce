"""YAML as people mean it: a key that is written twice is an error, and what is nested or grows without bound is refused."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from harness.core.case import limits


class _UniqueKeyLoader(yaml.SafeLoader):
    """Python's YAML loader, except that a key written twice is an error, not the last one winning."""


if yaml.__with_libyaml__:
    from yaml.cyaml import CParser  # type: ignore[attr-defined]

    class _FastLoader(Composer, CParser, SafeConstructor, Resolver):
        """A loader that scans and parses in C.

        Trap: libyaml's composer crashes on what is nested deeply, so it has Python's.
        """

        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            for part in (Composer, SafeConstructor, Resolver):
                part.__init__(self)

else:
    _FastLoader = _UniqueKeyLoader  # type: ignore[assignment,misc]


def _unique_mapping(loader: SafeConstructor, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    """Return the mapping of a node. Raise YAMLError for a key that is written twice."""
    merges = [key for key, _ in node.value if key.tag == "tag:yaml.org,2002:merge"]
    if len(merges) > 1:
        line = merges[1].start_mark.line + 1
        raise yaml.YAMLError(f"line {line}: key '<<' is written twice; one list merges several: <<: [*first, *second]")
    own_keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # << may be overridden
    keys = [loader.construct_object(key, deep=deep) for key in own_keys]
    for position, key in enumerate(keys):
        if key in keys[:position]:
            raise yaml.YAMLError(f"line {own_keys[position].start_mark.line + 1}: key {key!r} is written twice")
    return SafeConstructor.construct_mapping(loader, node, deep)


for _loader in (_UniqueKeyLoader, _FastLoader):
    _loader.add_constructor(  # type: ignore[type-var]
        yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping
    )


def document_of(text: str) -> Any:
    """Return the document of a YAML text as Python values; None for an empty text.

    Raises yaml.YAMLError or ValueError for a text that is not valid, writes a key twice, is too large or nested too
    deeply. A refused text is read again by the slow loader, whose messages are the same with and without libyaml.
    """
    try:
        try:
            return _construct_document(_FastLoader(text))
        except (yaml.YAMLError, ValueError, RecursionError):
            return _construct_document(_UniqueKeyLoader(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _construct_document(loader: Any) -> Any:
    """Return the document that a loader reads; None for an empty text.

    Raises YAMLError if aliases stand for too many values.
    """
    node = loader.get_single_node()
    limits.refuse_yaml_bombs(node)
    return None if node is None else loader.construct_document(node)
