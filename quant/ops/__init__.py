"""The compute room: one protocol, and its implementations (torch today)."""
