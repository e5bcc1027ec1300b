"""A tokenizer from a Hugging Face folder: ``tokenizer.json`` and related small files.

Plain byte-level BPE is read into packed tables. The ``tokenizers`` package then only normalizes
text and splits it into words, with a vocabulary of the 256 bytes and the added tokens. The package
handles every other tokenizer whole, errors included. Decoding is done here, byte by byte, so that
it can stream. Four optional files say which tokens are special and which end a generation.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from localrt.common.errors import StorageError, TokenizerError, UnsupportedModelError
from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers.base import (
    Pieces,
    Vocabulary,
    VocabularyTokenizer,
    Watch,
    is_package_error,
    package_errors,
    read_file,
    read_json,
    token_name,
)
from localrt.models.tokenizers.bpe import BYTE_TO_CHAR, ByteLevelTokenizer, piece_bytes
from localrt.models.tokenizers.tables import MergeTable, PieceTable

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
_LARGEST_ID = 1 << 22
_EXTRAS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
)
# Look-behinds and anchors: with these, words depend on where a text begins.
_LOOKS_BACK = re.compile(r"\(\?<[=!]|(?<![\[\\])\^|\\[bBAGK]")
_STEPS = {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "ByteLevel"}


def read_packed(
    path: Path,
    declared: Mapping[int, object],
    describe: Callable[[Backend, PieceTable], Vocabulary],
    special: Iterable[str] = (),
) -> ByteLevelTokenizer | None:
    """The tokenizer.json at ``path``, or None where it is not plain byte-level BPE.

    Also None if the file lacks added tokens that are ``declared`` (by id) elsewhere, or ``special``
    ones. ``describe`` makes the vocabulary from the file without its vocabulary and merges, and the
    pieces.
    """
    from tokenizers import Tokenizer as Backend  # needed by tokenizer.json alone

    try:
        spec = json.loads(read_file(path))
        model, added = spec["model"], spec["added_tokens"]
        vocab = model["vocab"]
        if not (_is_plain(spec) and _are_ids(vocab) and _is_numbered(added, vocab)):
            return None
        names = {entry["content"]: entry["id"] for entry in added}
        if not declared.keys() <= set(names.values()) or not names.keys() >= set(special):
            return None
        packed = _packed_merges(model.pop("merges"))
        words, pieces = _tables(vocab, names)
        merges = MergeTable(words, packed)
        known = {char: vocab[char] for char in BYTE_TO_CHAR} | names
        spec["model"] = {"type": "BPE", "vocab": known, "merges": []}
        spec["truncation"] = spec["padding"] = None
        whole_words = bool(model.get("ignore_merges"))
        del model, vocab
        backend = Backend.from_str(json.dumps(spec))
    except StorageError:
        raise
    except BaseException as error:
        if not is_package_error(error):
            raise
        return None  # malformed: the package's own error says how
    return ByteLevelTokenizer(
        describe(backend, pieces),
        words=words,
        merges=merges,
        whole_words=whole_words,
        added=names,
        normalizer=backend.normalizer,
        pre_tokenizer=backend.pre_tokenizer,
        cut_long=_can_be_cut(spec),
    )


def _is_plain(spec: Mapping[str, Any]) -> bool:
    """Whether it is BPE without extras over words in the byte alphabet.

    Added tokens must match the unchanged text, all in one pass.
    """
    model = spec["model"]
    if model["type"] != "BPE" or any(model.get(key) for key in _EXTRAS):
        return False
    kinds = _kinds(spec["pre_tokenizer"], "pretokenizers")
    if kinds[-1] != "ByteLevel" or not set(kinds) <= _STEPS:
        return False
    if "ByteLevel" not in _kinds(spec["decoder"], "decoders"):
        return False
    added = spec["added_tokens"]
    if any(entry["lstrip"] or entry["rstrip"] or entry["single_word"] for entry in added):
        return False
    late = {bool(entry["normalized"]) for entry in added}
    return late <= {False} or (late == {True} and spec["normalizer"] is None)


def _can_be_cut(spec: Mapping[str, Any]) -> bool:
    """Whether a text can be split at any word without changing words (``ByteLevelTokenizer``)."""
    if spec["normalizer"] is not None and _kinds(spec["normalizer"], "normalizers") != ["NFC"]:
        return False
    return all(
        not step.get("add_prefix_space")
        and step.get("behavior", "Isolated") in ("Isolated", "Removed")
        and not _LOOKS_BACK.search(step.get("pattern", {}).get("Regex", ""))
        for step in _steps(spec["pre_tokenizer"], "pretokenizers")
    )


def _kinds(part: Mapping[str, object], steps: str) -> list[str]:
    """The types of a component's steps."""
    return [step["type"] for step in _steps(part, steps)]


def _steps(part: Mapping[str, Any], steps: str) -> list[Mapping[str, Any]]:
    """A component's steps; a sequence lists them under ``steps``."""
    return part[steps] if part["type"] == "Sequence" else [part]


def _are_ids(vocab: Mapping[str, object]) -> bool:
    """Whether ids are unique and each byte is a piece."""
    ids = vocab.values()
    return (
        all(type(token) is int and 0 <= token < _LARGEST_ID for token in ids)
        and len(set(ids)) == len(vocab)
        and all(char in vocab for char in BYTE_TO_CHAR)
    )


def _is_numbered(added: list[Mapping[str, Any]], vocab: Mapping[str, int]) -> bool:
    """Whether added tokens have the ids that the package would give them."""
    numbered: dict[str, int] = {}
    following = len(vocab)
    for entry in added:
        name = entry["content"]
        if name not in numbered:
            numbered[name] = vocab.get(name, following)
            following += name not in vocab
        # After gaps in the vocabulary, versions of the package number tokens differently
        gaps = name in vocab and vocab[name] >= len(vocab)
        if not name or gaps or entry["id"] != numbered[name]:
            return False
    return True


def _tables(vocab: dict[str, int], names: dict[str, int]) -> tuple[PieceTable, PieceTable]:
    """Tables of the pieces of words, without and with the added tokens."""
    pieces = [""] * (max(*vocab.values(), *names.values()) + 1)
    in_words, known = np.zeros(len(pieces), np.bool_), np.zeros(len(pieces), np.bool_)
    for piece, token in (vocab | names).items():
        pieces[token] = piece
    in_words[list(vocab.values())] = True
    known[[*vocab.values(), *names.values()]] = True
    table = PieceTable(PackedStrings.of(pieces))
    return table.only(in_words), table.only(known)


def _packed_merges(merges: list[str] | list[list[str]]) -> PackedStrings:
    """The merges as GGUF has them: two pieces and the space between them.

    Raises:
        ValueError: a merge is not two pieces.
    """
    spelled = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    for merge in spelled:
        if merge.count(" ") != 1 or merge.startswith("#version"):
            raise ValueError(merge)
    return PackedStrings.of(spelled)


_BEGINNING = 1 << 14  # characters
_USUAL = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How pieces spell bytes. ``space`` is the character that stands for a space."""

    kind: Literal["byte-level", "space", "word-pieces"]
    space: str = "▁"
    byte_fallback: bool = False
    strip_space: bool = False


class HuggingFaceTokenizer(VocabularyTokenizer):
    """A tokenizer whose ``backend`` encodes; added tokens decode to their names."""

    def __init__(self, backend: Backend, vocabulary: Vocabulary, decoder: TokenDecoder) -> None:
        super().__init__(vocabulary)
        self._backend = backend
        self._lock = threading.Lock()  # the backend has a flag for parsing control tokens
        self._added = frozenset(backend.get_added_tokens_decoder())
        self._decoder = decoder
        pieces = vocabulary.pieces
        self._longest = pieces.longest if isinstance(pieces, BackendPieces) else 0

    def least_tokens(self, text: str) -> int:
        return -(-len(text) // self._longest) if self._longest else 0

    def _encode_text(self, text: str, parse_special: bool, watch: Watch) -> list[int]:
        # The package encodes a text at once, with some 150 bytes per token: its beginning is
        # counted first, so that ``watch`` can refuse the rest.
        size = _BEGINNING
        while size < len(text):
            watch(len(self._encoded(text[:size], parse_special)))
            size *= 4
        return self._encoded(text, parse_special)

    def _encoded(self, text: str, parse_special: bool) -> list[int]:
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            with package_errors("the model's tokenizer cannot encode this text"):
                ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _byte_id(self, byte: int) -> int | None:
        find = self._vocabulary.pieces.find
        if self._decoder.kind == "byte-level":
            return find(BYTE_TO_CHAR[byte])
        found = find(f"<0x{byte:02X}>")
        return find(chr(byte)) if found is None and byte < 128 else found

    def token_bytes(self, token: int) -> bytes:
        """The bytes of ``token``: an added token's name, nothing for an unknown id."""
        piece = self.token_text(token)
        if self._decoder.kind == "byte-level":
            return piece.encode() if token in self._added else piece_bytes(piece)
        if self._decoder.kind == "word-pieces" and token not in self._added:
            return piece[2:].encode() if piece.startswith("##") else f" {piece}".encode()
        may_be_byte = self._decoder.byte_fallback and token not in self._added
        if may_be_byte and (found := _BYTE.fullmatch(piece)):
            return bytes.fromhex(found[1])
        return piece.replace(self._decoder.space, " ").encode()


class BackendPieces:
    """``Pieces`` of a vocabulary that the package holds.

    ``longest`` is the most characters that one token stands for; 0: no bound.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        vocab = backend.get_vocab(with_added_tokens=True)
        self._count = max(vocab.values(), default=-1) + 1
        self.longest = max(map(len, vocab), default=0) if _keeps_characters(backend) else 0

    def __len__(self) -> int:
        return self._count

    def text(self, token: int) -> str:
        return self._backend.id_to_token(token) or "" if 0 <= token < self._count else ""

    def find(self, text: str) -> int | None:
        try:
            found: int | None = self._backend.token_to_id(text)
        except UnicodeEncodeError:  # a lone surrogate is not a piece
            return None
        return found


def hf_tokenizer(folder: Path, *, eos: int | Iterable[int] | None = None) -> VocabularyTokenizer:
    """The tokenizer of a model folder; ``eos`` are the EOS ids of its configs.

    Raises:
        TokenizerError: the folder has none, or a broken one.
        UnsupportedModelError: its decoder is of an unknown type.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"this model has no tokenizer: {_what_is_there(folder)}")
    config = read_json(folder / "tokenizer_config.json")
    names = read_json(folder / "special_tokens_map.json") | config

    def describe(backend: Backend, pieces: Pieces, strip_space: bool = False) -> Vocabulary:
        return _vocabulary(backend, pieces, names, _id_list(eos), strip_space)

    special = _special(names)
    if (packed := read_packed(path, _declared(config), describe, special)) is not None:
        return packed
    backend = _read_whole(path, config, special)
    decoder = _decoder(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
    vocabulary = describe(backend, BackendPieces(backend), decoder.strip_space)
    return HuggingFaceTokenizer(backend, vocabulary, decoder)


def _what_is_there(folder: Path) -> str:
    if (folder / "tokenizer.model").is_file():
        return (
            f"{folder} holds tokenizer.model but no tokenizer.json; save it once with "
            "transformers' AutoTokenizer to get one, or use token_ids"
        )
    return f"{folder} holds no tokenizer.json, so only token_ids can be used"


def _read_whole(path: Path, config: Mapping[str, object], special: Iterable[str]) -> Backend:
    """Read the file by the package, and add tokens that only the other files declare."""
    from tokenizers import AddedToken  # needed by tokenizer.json alone
    from tokenizers import Tokenizer as Backend

    data = read_file(path)
    with package_errors(f"{path} cannot be read as a tokenizer"):
        backend: Backend = Backend.from_buffer(data)
    backend.no_truncation()
    backend.no_padding()
    present = backend.get_added_tokens_decoder()
    for token, entry in _declared(config).items():
        name = token_name(entry)
        if name is None or token in present:
            continue
        flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
        given = {flag: bool(entry[flag]) for flag in flags if flag in entry}
        with package_errors(f"tokenizer_config.json declares {name!r:.60}, which cannot be added"):
            backend.add_tokens([AddedToken(name, **given)])
    added = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    missing = [AddedToken(name, special=True) for name in special if name not in added]
    with package_errors(f"{path.parent} names special tokens that cannot be added"):
        backend.add_special_tokens(missing)
    return backend


def _special(names: Mapping[str, object]) -> tuple[str, ...]:
    """The special tokens that the files beside tokenizer.json name, as transformers numbers those
    that it lacks: the usual ones, those of the model (any key that ends in ``_token``), the rest.
    """
    own = {key: name for key, name in names.items() if key.endswith("_token")}
    extra = names.get("extra_special_tokens") or names.get("additional_special_tokens")
    for more in (names.get("model_specific_special_tokens"), extra):
        own |= more if isinstance(more, Mapping) else {}
    usual = [names.get(key) for key in _USUAL]
    others = [name for key, name in own.items() if key not in _USUAL]
    found = map(token_name, (*usual, *others, *(extra if isinstance(extra, list) else ())))
    # A lone surrogate is no token.
    return tuple(
        dict.fromkeys(
            name for name in found if name and name.encode(errors="ignore").decode() == name
        )
    )


def _declared(config: Mapping[str, object]) -> dict[int, Any]:
    """The tokens that tokenizer_config.json declares, by id."""
    declared = config.get("added_tokens_decoder")
    if not isinstance(declared, Mapping):
        return {}
    return {int(key): entry for key, entry in sorted(declared.items()) if key.isdecimal()}


def _vocabulary(
    backend: Backend,
    pieces: Pieces,
    names: Mapping[str, object],
    eos: frozenset[int],
    strip_space: bool,
) -> Vocabulary:
    def named(key: str) -> int | None:
        name = token_name(names.get(key))
        return None if name is None else pieces.find(name)

    bos, eos_id = named("bos_token"), named("eos_token")
    special = {
        token for token, entry in backend.get_added_tokens_decoder().items() if entry.special
    }
    ends = eos | ({eos_id} if eos_id is not None else set())
    special |= {token for token in (bos, *ends) if token is not None}
    prefix, suffix, _ = _around(backend)
    return Vocabulary(
        pieces=pieces,
        bos=bos,
        unknown=named("unk_token"),
        eos=frozenset(token for token in ends if token < len(pieces)),
        special=frozenset(special),
        prefix=prefix,
        suffix=suffix,
        between=_around(backend, "a")[1],
        strip_space=strip_space,
    )


def _around(backend: Backend, second: str | None = None) -> list[tuple[int, ...]]:
    """The tokens that the post-processor adds before a text, after it, and after a second.

    As in transformers, ``add_bos_token`` and ``add_eos_token`` of tokenizer_config.json are ignored
    if there is a tokenizer.json.
    """
    with package_errors("the model's tokenizer cannot be used"):
        encoded = backend.encode("a", second, add_special_tokens=True)
    runs, at = [tuple[int, ...]()] * 3, 0
    for token, text in zip(encoded.ids, encoded.sequence_ids, strict=True):
        at = at if text is None else text + 1
        runs[at] += (token,) if text is None else ()
    return runs


def _id_list(value: object) -> frozenset[int]:
    """An id, a list of ids or nothing, as configs write them."""
    if isinstance(value, int):
        return frozenset([value])
    if isinstance(value, Iterable):
        return frozenset(token for token in value if isinstance(token, int))
    return frozenset()


def _decoder(spec: Mapping[str, Any] | None) -> TokenDecoder:
    """Read the ``decoder`` of a tokenizer.json; only decoders that can stream are supported."""
    steps = [spec] if spec else []
    if spec and spec.get("type") == "Sequence":
        steps = list(spec.get("decoders", ()))
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return TokenDecoder("byte-level")
    if kinds == ["WordPiece"] and steps[0].get("prefix") == "##":
        return TokenDecoder("word-pieces", strip_space=True)
    space, strip = "", False
    for step in steps:
        match step:
            case {"type": "Metaspace"}:
                space = step.get("replacement", "▁")
                strip = step.get("prepend_scheme", "always") != "never"
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": " "}:
                space = pattern
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                strip = start == 1
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                space = ""
                break
    if not space:
        raise UnsupportedModelError(
            f"the tokenizer.json's decoder {kinds or None} is not known; known are "
            "ByteLevel, WordPiece, Metaspace, Replace with ByteFallback"
        )
    return TokenDecoder("space", space, "ByteFallback" in kinds, strip)


def _keeps_characters(backend: Backend) -> bool:
    """Whether encoding keeps every character, so that piece lengths bound a token's text."""
    normalizer = json.loads(backend.normalizer.__getstate__()) if backend.normalizer else {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    return (
        all(step["type"] == "Prepend" or _replaces_one(step) for step in steps)
        and (backend.pre_tokenizer is None or type(backend.pre_tokenizer).__name__ == "Metaspace")
        and bool(getattr(backend.model, "byte_fallback", False))
        and not any(
            entry.lstrip or entry.rstrip for entry in backend.get_added_tokens_decoder().values()
        )
    )


def _replaces_one(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer's step replaces single characters."""
    return (
        step["type"] == "Replace"
        and len(step["pattern"].get("String", "")) == 1
        and bool(step["content"])
    )
