"""What a KV format buys before anything is measured: bytes per token and sequence, room, speed bounds, prefix hits, advice. No torch.

config.json --families--> CachedModel --formats--> bytes --memory--> tokens, sequences --speed--> bounds --advice--> what to do
"""
