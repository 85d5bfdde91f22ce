"""The order of rows in weights whose rotary embedding is not the reference's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.core.case.case import Case

if TYPE_CHECKING:
    import numpy as np


def halves(case: Case) -> dict[str, np.ndarray]:
    """Return by fqn of wq and wk the order of rows of a trainer that turns halves of a head. It is an adapter's `rows`.

    Its rotary embedding turns entry i of a head with entry i + head_dim / 2. The reference turns an entry with its
    neighbour.
    """
    import numpy as np

    size = case.model.head_dim
    shapes = case.model.parameter_shapes()
    head = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
    turned = [fqn for fqn in shapes if fqn.endswith(("attention.wq.weight", "attention.wk.weight"))]
    return {fqn: (np.arange(0, shapes[fqn][0], size)[:, None] + head).reshape(-1) for fqn in turned}
