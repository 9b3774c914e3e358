"""What the kit needs to know of a target, from its config.json alone."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.hub import Repository, named
from ..findings import KitError
from .dialects import number

MOST = 4 << 20  # bytes of a config


@dataclass(frozen=True)
class TargetInfo:
    """What the kit needs to know of a target, from its config.json alone."""

    architecture: str
    hidden: int
    vocab: int
    layers: int
    tie: bool
    max_positions: int | None
    config: Mapping[str, Any]
    path: str = ""
    hub: Repository | None = field(default=None, repr=False, compare=False)  # where the config came from, if not here

    @classmethod
    def of(cls, path: str | Path) -> TargetInfo:
        """Read a model folder, a config.json or a hub id's; the text part of multimodal wrappers is found by name."""
        hub = named(path)
        file = hub / "config.json" if hub else Path(path, "config.json") if os.path.isdir(path) else Path(path)
        try:
            if not hub and not os.path.isfile(file):
                raise OSError(errno.ENOENT, "there is no such file")
            if (size := file.size() if hub else file.stat().st_size) > MOST:
                raise ValueError("it is larger than any config")
            whole = json.loads((file.read(0, size) if hub else file.read_bytes()).decode("utf-8"))
            text = next((whole[k] for k in ("text_config", "language_config", "llm_config") if k in whole), whole)
            return cls(
                architecture=str((whole.get("architectures") or [""])[0]),
                hidden=_size(text, "hidden_size"),
                vocab=_size(text, "vocab_size"),
                layers=_size(text, "num_hidden_layers"),
                tie=bool(whole.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
                max_positions=int(number(text.get("max_position_embeddings")) or 0) or None,
                config=text,
                path=str(path),
                hub=hub,
            )
        except OSError as error:
            raise KitError(f"Cannot read the target's {file}: {error.strerror}; give a model folder.") from None
        except KeyError as error:
            raise KitError(f"The target's {file} has no {error}; is it a language model's config?") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise KitError(f"The target's {file} is not a model config ({error}); give a model folder.") from None


def _size(text: Mapping[str, Any], name: str) -> int:
    """A positive whole number of the config."""
    if (value := number(text[name])) is None or value != int(value):
        raise ValueError(f"{name} is {text[name]!r}")
    return int(value)
