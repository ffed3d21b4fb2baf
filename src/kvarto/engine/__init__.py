"""Many requests on one model: continuous batching over packed pages under one memory budget."""
