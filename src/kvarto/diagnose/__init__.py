"""Is the KV cache the bottleneck? An engine's own metrics, read over a window, tell: `kvarto diagnose`."""
