"""Real models and real text without a model hub: a catalog, the fetcher, the loader and the built-in documents."""
