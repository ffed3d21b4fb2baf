"""Are we ready to go live with a quantized KV cache? The go-live checklist as checks that run: `kvarto doctor`."""
