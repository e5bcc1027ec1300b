"""The native engine: our decoders behind the engine contract."""
