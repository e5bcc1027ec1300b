"""Where localrt keeps things and how it reaches the hub: the one place that reads the environment.

Read once at the edge (the CLI, ``localrt.load``) and passed down as one value. The hub's own
variables (``HF_HOME``, ``HF_TOKEN``, ...) keep their meaning, so that models are shared with other
tools. Imports only the standard library, and little of it: every command starts with this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from localrt import system

ENDPOINT_KEY, SERVE_KEY = "OPENAI_API_KEY", "LOCALRT_API_KEY"  # for help texts too
KV_DISK = "LOCALRT_KV_DISK"
CRASH_REPORT = "crash-report.txt"  # the app's, in ``data_dir``

DEFAULT_CONTEXT = 4096
"""Tokens of a conversation to reckon with where no context was asked for."""

_OLLAMA_SERVICES = (  # where Ollama's system service on Linux keeps its downloads
    Path("/usr/share/ollama/.ollama/models"),
    Path("/var/lib/ollama/.ollama/models"),
)
_TRUE = frozenset({"1", "on", "yes", "true"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Folders, hub access and the offline switch. Folders need not exist yet.

    ``hub_cache`` is the folder shared by all tools of the hub, ``cache_dir`` localrt's own (it may
    be deleted at any time), ``data_dir`` holds chats and stores, ``config_dir`` preferences.
    ``kv_disk`` is the most that saved KV caches may take in ``cache_dir``, or ``"off"``.
    ``ollama_dirs``, ``lm_studio_dirs`` and ``llama_cpp_dirs`` are where other programs keep models.
    ``endpoint_key`` is sent to the server of ``--endpoint``, ``serve_key`` protects our own.
    """

    hub_endpoint: str
    hub_cache: Path
    hub_token_file: Path | None
    offline: bool
    cache_dir: Path
    data_dir: Path
    config_dir: Path
    hub_token: str | None = field(default=None, repr=False)
    kv_disk: str = "8GB"
    endpoint_key: str | None = field(default=None, repr=False)
    serve_key: str | None = field(default=None, repr=False)
    ollama_dirs: tuple[Path, ...] = ()
    lm_studio_dirs: tuple[Path, ...] = ()
    llama_cpp_dirs: tuple[Path, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """The settings of ``environ``, by default of this process."""
        env = os.environ if environ is None else environ
        home = system.home_folder()
        xdg_cache = _folder(env, "XDG_CACHE_HOME") or home / ".cache"
        cache, data, config = system.own_folders(home)
        hf_home = _folder(env, "HF_HOME") or xdg_cache / "huggingface"
        implicit_token = not _flag(env, "HF_HUB_DISABLE_IMPLICIT_TOKEN")
        return cls(
            hub_endpoint=(env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
            hub_cache=_folder(env, "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE") or hf_home / "hub",
            hub_token_file=(_folder(env, "HF_TOKEN_PATH") or hf_home / "token")
            if implicit_token
            else None,
            offline=_flag(env, "LOCALRT_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
            cache_dir=_folder(env, "LOCALRT_CACHE")
            or _own(env, "XDG_CACHE_HOME", home / ".cache", cache),
            data_dir=_own(env, "XDG_DATA_HOME", home / ".local" / "share", data),
            config_dir=_own(env, "XDG_CONFIG_HOME", home / ".config", config),
            hub_token=_first(env, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if implicit_token else None,
            kv_disk=_first(env, KV_DISK) or "8GB",
            endpoint_key=_first(env, ENDPOINT_KEY),
            serve_key=_first(env, SERVE_KEY),
            ollama_dirs=_folders(
                _folder(env, "OLLAMA_MODELS") or home / ".ollama" / "models", *_OLLAMA_SERVICES
            ),
            lm_studio_dirs=_folders(
                home / ".lmstudio" / "models", xdg_cache / "lm-studio" / "models"
            ),
            llama_cpp_dirs=_folders(_folder(env, "LLAMA_CACHE") or xdg_cache / "llama.cpp"),
        )

    def read_hub_token(self) -> str | None:
        """The environment's token, or the one that ``hf auth login`` stored, or None."""
        if self.hub_token or self.hub_token_file is None:
            return self.hub_token
        try:
            return self.hub_token_file.read_text(encoding="utf-8").strip() or None
        except (OSError, UnicodeDecodeError):
            return None


def _first(env: Mapping[str, str], *names: str) -> str | None:
    return next((value for name in names if (value := env.get(name, "").strip())), None)


def _flag(env: Mapping[str, str], *names: str) -> bool:
    return any(env.get(name, "").strip().lower() in _TRUE for name in names)


def _folder(env: Mapping[str, str], *names: str) -> Path | None:
    value = _first(env, *names)
    if value is None:
        return None
    expanded = os.path.expanduser(os.path.expandvars(value))  # noqa: PTH111  Path's fails on "~nobody"
    return Path(expanded).absolute()


def _own(env: Mapping[str, str], variable: str, before: Path, own: Path) -> Path:
    """A folder of localrt's: where the variable says, or ``own``. Earlier versions made it in
    ``before`` on every system: if it is there, it stays.
    """
    if (named := _folder(env, variable)) is not None:
        return named / "localrt"
    return before / "localrt" if (before / "localrt").exists() else own


def _folders(*folders: Path) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(folders))
