"""A model behind a server that speaks OpenAI's dialect, with the face of a local one."""

from localrt.client.model import RemoteModel, connect

__all__ = ["RemoteModel", "connect"]
