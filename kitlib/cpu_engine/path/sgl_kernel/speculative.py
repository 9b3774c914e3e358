"""The name under which SGLang's NGRAM worker looks its one kernel up."""

from __future__ import annotations

from .trees import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
