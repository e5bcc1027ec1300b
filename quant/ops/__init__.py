"""The compute room: one protocol, and its native, torch and Triton implementations."""
