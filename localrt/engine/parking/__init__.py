"""KV caches of conversations that wait: how long they stay in memory, and where they go."""
