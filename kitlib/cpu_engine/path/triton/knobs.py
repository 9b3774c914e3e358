"""Import stub of triton.knobs: it has no hooks, since no kernel is ever loaded."""
