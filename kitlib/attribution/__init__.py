"""Where the accept length goes between training and serving: one thing changed at a time, each change measured.

The steps telescope: each begins where the one before ended, so that they add up to the whole, and what a server
accepted beyond the last replay is the residual. A step that could not be measured changes nothing and says why.
"""

from .metric import everywhere, misread, promise_rows, vocabulary
from .parts import Attribution, Counts, Step
from .side import TrainingSide
from .steps import attribute, on_rows

__all__ = [
    "Attribution", "Counts", "Step", "TrainingSide", "attribute", "everywhere", "misread", "on_rows", "promise_rows",
    "vocabulary",
]  # fmt: skip
