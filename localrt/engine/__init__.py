"""The generation loop, sampling and sessions, and the engines behind one protocol."""
