"""A model behind a server that speaks OpenAI's dialect, with the face of a local one."""

from localrt.remote.model import RemoteModel, connect

__all__ = ["RemoteModel", "connect"]
