"""Set-up of the server's worker process: one process, threads as OMP_NUM_THREADS says."""

from __future__ import annotations

import torch


def init_cpu_threads_env(cpu_ids: str) -> str:
    """Return a description of the threads; upstream pins them to `cpu_ids`, here nothing is pinned."""
    return f"kitlib CPU engine: {torch.get_num_threads()} threads, not pinned (offered: {cpu_ids})"


def initialize(size: int, rank: int) -> None:
    """Accept a single worker; upstream sets up shared memory between workers here.

    Raises NotImplementedError for a tensor-parallel size other than 1.
    """
    if size != 1:
        raise NotImplementedError(
            f"torch.ops.sgl_kernel.initialize: the kit's CPU engine does not have tensor parallelism ({size})"
        )
