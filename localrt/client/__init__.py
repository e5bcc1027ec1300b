"""A model behind a server with OpenAI's protocol, used like a local one."""

from localrt.client.model import RemoteModel, connect

__all__ = ["RemoteModel", "connect"]
