"""What a vLLM server tells: Prometheus counters of all requests, so a run is the difference of two readings.

Counter names: vllm v1/spec_decode/metrics.py (SpecDecodingProm), as documented for 0.9.2 to 0.33; from the
documentation, not run. Nobody else may ask the server during a run. Its accept length includes the bonus token.
"""

from __future__ import annotations

from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from ..findings import KitError
from ..logs import Counts
from .client import Client

COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "v",
    "vllm:spec_decode_num_accepted_tokens_total": "a",
    "vllm:spec_decode_num_draft_tokens_total": "proposed",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "position",
}


def reading(client: Client) -> dict[str, float]:
    """The counters now, all engines together: "v", "a", "proposed", and "position 0", … (joint, from the first)."""
    told: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(client.text("/metrics")):
            for sample in family.samples:
                if name := COUNTERS.get(sample.name):
                    name += f" {sample.labels.get('position')}" if name == "position" else ""
                    told[name] = told.get(name, 0.0) + sample.value
    except ValueError:
        raise KitError(f"{client.url}/metrics is no Prometheus text; is this a vLLM server?") from None
    return told


def difference(before: dict[str, float], after: dict[str, float]) -> Counts:
    """Counts of what ran between two readings; empty where the server does not speculate."""
    gone = {name: int(value - before.get(name, 0)) for name, value in after.items()}
    v, a = gone.get("v"), gone.get("a")
    if not v:
        return Counts(v, a, caveat="no verify round was counted: speculation is off, or nothing was drafted")
    steps = sum(name.startswith("position ") for name in gone)
    reached = [v, *(gone.get(f"position {i}", 0) for i in range(steps)), 0]
    histogram = tuple(x - y for x, y in pairwise(reached)) if steps else ()
    proposed = gone.get("proposed", 0) // v
    caveat = "counters of the whole server: other traffic would be counted, too"
    return Counts(v, a, proposed + 1 if proposed else None, steps or None, histogram, caveat)


def model(client: Client) -> str:
    """The name under which the model is served."""
    try:
        return str(client.get("/v1/models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise KitError(f"{client.url}/v1/models names no model; is this a vLLM server?") from None
