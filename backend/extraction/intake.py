"""From what the capture hook staged to what is written: every record is checked before it is believed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from backend.extraction.bfloat16 import bfloat16_words
from backend.extraction.engines import States
from backend.extraction.writer import BadStates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from backend.extraction.staging import Staged


def states_of(staged: Staged, ids: Sequence[int], hidden_size: int, points: Sequence[int]) -> States:
    """Return a request's states as bfloat16 words, mapped where they already are. Raises BadStates.

    Whether values are finite is for the writer to see, which reads them all (writer.check_states).
    """
    if staged.ids.size != len(ids):
        raise BadStates(f"{staged.ids.size} rows were captured of {len(ids)} tokens")
    if not np.array_equal(staged.ids, np.asarray(ids, np.int64)):
        first = int(np.argmax(staged.ids != np.asarray(ids, np.int64)))
        raise BadStates(f"the rows are of other tokens, from place {first} on: {staged.ids[first]}, not {ids[first]}")
    for what, found, wanted in (
        ("capture points", staged.points, list(points)),
        ("effective layers", staged.effective_layers, list(points)),
    ):
        if found is not None and list(found) != wanted:
            raise BadStates(f"the {what} are {found}, not {wanted}")
    if staged.last.shape[1] != hidden_size or staged.aux.shape[1] != len(points) * hidden_size:
        raise BadStates(
            f"the rows are {staged.aux.shape[1]} and {staged.last.shape[1]} wide, not "
            f"{len(points) * hidden_size} and {hidden_size}"
        )
    return States(_words(staged.aux), _words(staged.last))


def _words(values: NDArray[Any]) -> NDArray[np.uint16]:
    return values if values.dtype == np.uint16 else bfloat16_words(values)
