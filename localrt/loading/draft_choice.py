"""Which draft a generation uses: from its options to its ``Speculation``.

It loads draft models, and says what is not done for lack of memory. A small model of
the target's family is looked for on this machine, from headers alone: two models are of a family
when their files list the same tokens, byte by byte. It downloads nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from localrt.common.errors import LocalrtError, MemoryBudgetError, OptionError
from localrt.common.option_names import option
from localrt.common.settings import Settings
from localrt.engine.native.engine import NativeEngine
from localrt.engine.options import Options
from localrt.engine.speculation import MakeSource, Speculation
from localrt.hub.files import gguf_variants
from localrt.hub.listing import list_models
from localrt.loading.draft_model import ModelDraft
from localrt.loading.draft_placement import DraftPlace
from localrt.loading.parts import LoadedModel
from localrt.models.checkpoints.base import RangedFile
from localrt.models.checkpoints.gguf.metadata import GgufCursor
from localrt.models.checkpoints.store.checkpoint import GGUF_TEXT_NAME
from localrt.models.registry import ARCHITECTURES
from localrt.speculative.ngram import Archive, NgramSource
from localrt.speculative.source import DEPTH
from localrt.speculative.tuner import TreeSize, Tuner

MOST_SHARE = 0.5
"""A draft has at most this share of its target's bytes: a larger one seldom pays."""
_MOST_PAIRS = 1 << 12
_MOST_TOKENS = 1 << 24
_LONGEST_TEXT = 1 << 16
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True, slots=True)
class FamilyDraft:
    """A model that may draft. ``name`` is what ``resolve`` takes, ``nbytes`` its files' size."""

    name: str
    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Where a file lists its tokens: ``count`` of them from byte ``start`` on.

    Of a ``tokenizer.json`` it is the whole file, and ``count`` its bytes.
    """

    architecture: str
    file: Path
    start: int
    count: int

    def nbytes(self) -> int:
        """Bytes of the list."""
        if self.start == 0:
            return self.count
        with closing(RangedFile(self.file)) as file:
            cursor = GgufCursor(file)
            cursor.skip(self.start, "the header")
            cursor.skip_strings(self.count, _TOKENS)
            return cursor.position - self.start

    def read(self, nbytes: int) -> bytes:
        """The list's first ``nbytes``; fewer where the file ends."""
        with closing(RangedFile(self.file)) as file:
            return file.read(self.start, min(nbytes, file.size - self.start)).tobytes()


def find_family_draft(target: Path, settings: Settings) -> FamilyDraft | None:
    """The smallest model of the target's vocabulary, of its own architecture where there is one.

    ``target`` is a GGUF file or a folder. Files that cannot be read are passed over.
    """
    ours = _vocabulary(target)
    if ours is None:
        return None
    most = MOST_SHARE * _nbytes(target)
    found = []
    for draft in _small_models(target, settings, most):
        theirs = _vocabulary(draft.path)
        if theirs is None or theirs.architecture not in ARCHITECTURES:
            continue
        if (theirs.start == 0, theirs.count) != (ours.start == 0, ours.count):
            continue
        found.append((theirs.architecture != ours.architecture, draft, theirs))
    if not found:
        return None
    size = ours.nbytes()
    words = ours.read(size)
    for _, draft, theirs in sorted(found, key=lambda each: (each[0], each[1].nbytes)):
        if theirs.read(size) == words:
            return draft
    return None


def _small_models(target: Path, settings: Settings, most: float) -> Iterator[FamilyDraft]:
    """Other models on this machine of at most ``most`` bytes, each once."""
    seen = {target.resolve()}
    try:
        listed = [FamilyDraft(m.name, m.path, m.bytes) for m in list_models(settings)]
    except OSError:  # a folder that may not be read, or a file that goes away meanwhile
        listed = []
    for draft in [*listed, *_beside(target)]:
        if draft.nbytes <= most and draft.path.resolve() not in seen:
            seen.add(draft.path.resolve())
            yield draft


def _beside(target: Path) -> Iterator[FamilyDraft]:
    """GGUF models in the target's folder, where it is such a file itself."""
    if not target.is_file():
        return
    try:
        names = [entry.name for entry in target.parent.iterdir()]
    except OSError:
        return
    for variant in gguf_variants(names):
        files = [target.parent / name for name in variant.files]
        if variant.complete:
            yield FamilyDraft(str(files[0]), files[0], sum(_size(file) for file in files))


def _nbytes(model: Path) -> int:
    if model.is_dir():
        return sum(_size(file) for file in model.iterdir())
    whole = next((v for v in _beside(model) if v.path == model), None)
    return _size(model) if whole is None else whole.nbytes


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # a broken link
        return 0


def _vocabulary(model: Path) -> _Vocabulary | None:
    """Where a model lists its tokens; None where that is not to be found."""
    try:
        if model.is_file():
            return _gguf_vocabulary(model)
        if (text := model / GGUF_TEXT_NAME).is_file():
            return _gguf_vocabulary(text)
        words = model / "tokenizer.json"
        names = json.loads((model / "config.json").read_text(encoding="utf-8"))["architectures"]
        return _Vocabulary(str(names[0]), words, 0, words.stat().st_size)
    except (LocalrtError, OSError, ValueError, LookupError, TypeError):
        return None


def _gguf_vocabulary(path: Path) -> _Vocabulary | None:
    """The header up to its tokens, which commonly come after a few short pairs."""
    with closing(RangedFile(path)) as file:
        cursor = GgufCursor(file)
        if cursor.take(4, "the magic") != b"GGUF" or cursor.u32("the version") not in (2, 3):
            return None
        cursor.u64("the number of tensors")
        architecture = ""
        for _ in range(min(cursor.u64("the number of metadata keys"), _MOST_PAIRS)):
            key = cursor.text(_LONGEST_TEXT, "a metadata key")
            kind = cursor.u32(key)
            if kind == _STRING and key == "general.architecture":
                architecture = cursor.text(_LONGEST_TEXT, key)
            elif kind == _ARRAY and key == _TOKENS:
                if cursor.u32(key) != _STRING:
                    return None
                count = cursor.u64(key)
                cursor.check_count(count, 8, _MOST_TOKENS, "tokens")
                return _Vocabulary(architecture, path, cursor.position, count)
            elif not _skip(cursor, kind, key):
                return None
    return None


def _skip(cursor: GgufCursor, kind: int, what: str) -> bool:
    """Step over a value; False of a kind that no header has before its tokens."""
    count = 1
    if kind == _ARRAY:
        kind, count = cursor.u32(what), cursor.u64(what)
    if kind == _STRING:
        cursor.skip_strings(count, what)
    elif kind in _SIZES:
        cursor.skip(count * _SIZES[kind], what)
    else:
        return False
    return True


# Loads the model of that name; its notes are for the user.
LoadDraft = Callable[[str], LoadedModel]
PLUS_NGRAM = "+ngram"
_LOOKUP = "ngram"
_Loaded = tuple[ModelDraft | None, str]  # a draft, or why it is not used


class Drafts:
    """The drafts of one loaded model. Thread-safe; they are loaded once, when first used.

    ``load`` makes a draft model's parts. It raises ``MemoryBudgetError`` where the draft does not
    fit what is left: the answer is the same without it.
    """

    def __init__(self, target: LoadedModel, load: LoadDraft) -> None:
        self._target = target
        self._load = load
        self._lock = threading.Lock()
        self._drafts: dict[str, _Loaded] = {}
        self._tuners: dict[str, Tuner] = {}
        self._made: dict[tuple[str, int | None, int | None, float], Speculation] = {}
        self.archive = Archive()

    def speculation(self, options: Options) -> Speculation | None:
        """How to speculate under ``options``; None: not at all.

        Raises:
            OptionError: an explicit draft that cannot be this model's.
        """
        name, engine = options.draft, self._target.engine
        if name == "off":
            return None
        if not isinstance(engine, NativeEngine):
            if name == "auto":
                return None
            raise OptionError(
                f"{option('draft', name)} needs the native engine; this model runs on "
                f"{engine.info.engine}: leave {option('draft')} out"
            )
        if name == "auto":
            # Elsewhere a row's bits depend on how many are computed together, and so may a token.
            if engine.ops_name != "native":
                return None
            name = self._family or _LOOKUP
        with self._lock:
            key = (name, options.tree_budget, options.tree_depth, options.sampling.temperature)
            known = self._made.get(key)
            if known is None:
                known = self._made[key] = self._make(name, engine, options)
            return known

    def add(
        self,
        name: str,
        parts: LoadedModel | None,
        note: str = "",
        place: DraftPlace | None = None,
    ) -> None:
        """A draft model that was loaded already, or could not be; ``place`` is what was planned.

        Raises:
            OptionError: it has another vocabulary; it is closed.
        """
        draft = None if parts is None else ModelDraft(name, parts, self._target, place)
        with self._lock:
            self._drafts[name] = draft, note

    def close(self) -> None:
        """Free all of them."""
        with self._lock:
            drafts, self._drafts = self._drafts, {}
            self._made.clear()
        for draft, _ in drafts.values():
            if draft is not None:
                draft.close()

    # -- parts -----------------------------------------------------------------------------------

    @cached_property
    def _family(self) -> str | None:
        """What ``auto`` drafts with beside lookups."""
        return family_draft(self._target)

    def _make(self, name: str, engine: NativeEngine, options: Options) -> Speculation:
        guesser = name.removesuffix(PLUS_NGRAM)
        lookups = guesser == _LOOKUP
        draft, note = (None, "") if lookups else self._draft(guesser, options)
        explicit = options.draft != "auto" and options.tree_budget is not None
        makers: dict[str, MakeSource] = {}
        levels = {_LOOKUP: 0.0}
        lookup = draft is None or name != guesser or not explicit
        if lookup:
            makers[_LOOKUP] = lambda _: NgramSource(self.archive)
        if draft is not None:
            makers[draft.kind] = lambda session: draft.source(session, options)
            levels[draft.kind] = draft.level_share
        tuner = self._tuners.setdefault(
            guesser,
            Tuner(levels, streamed=engine.counts() is not None, mixture=engine.is_mixture),
        )
        size = None
        if explicit:
            assert options.tree_budget is not None
            size = TreeSize(options.tree_budget, options.tree_depth or DEPTH)
        archive = self.archive if lookup else None
        return Speculation(makers, tuner, fixed=size, archive=archive, note=note)

    def _draft(self, name: str, options: Options) -> _Loaded:
        known = self._drafts.get(name)
        if known is None:
            known = self._drafts[name] = self._load_model(name, asked=options.draft != "auto")
        return known

    def _load_model(self, name: str, *, asked: bool) -> _Loaded:
        """A draft model; that one is of no use that nobody ``asked`` for is no error."""
        try:
            draft = ModelDraft(name, self._load(name), self._target)
        except MemoryBudgetError as error:
            hint = "" if asked else "; named as the draft when loading, it would be given room"
            return None, f"draft {name} is not used: {error.marked}{hint}"
        except LocalrtError as error:
            if asked:
                raise
            told = isinstance(error, OptionError)  # with the draft's name
            return None, error.marked if told else f"draft {name} is not used: {error.marked}"
        return draft, "" if asked else f"draft {name} was found on this machine"


def family_draft(target: LoadedModel) -> str | None:
    """A small model of the target's family among those on this machine, to draft with unasked.

    Only where weights are streamed: where all is resident, a second model in memory would be a
    surprise, and its guesses cost a CPU about what they save.
    """
    if not target.engine.info.streamed:
        return None
    found = find_family_draft(target.path, Settings.from_environment())
    return None if found is None else found.name
