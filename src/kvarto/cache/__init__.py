"""Where pages live: the books (pool.py, no torch) and the bytes (slab.py)."""
