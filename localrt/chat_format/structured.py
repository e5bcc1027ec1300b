"""Constrains answers to a JSON schema, a regex or a grammar, using llguidance.

A tokenizer is prepared once per model (under a second, 30 MB), a grammar once per schema. Knows
tokenizers and grammars. It says which tokens are allowed; the engine's loop samples from them.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from localrt.chat_format.call_grammar import call_grammar
from localrt.chat_format.gbnf import gbnf_to_lark
from localrt.chat_format.json_schemas import can_end, closed, parameters_of
from localrt.chat_format.parser import MARK, CallSyntax
from localrt.common.errors import LocalrtError, MissingExtraError, OptionError
from localrt.common.forks import free_in_child
from localrt.common.option_names import option
from localrt.engine.options import Options
from localrt.engine.request import MakeConstraint
from localrt.offload.account import constraint_nbytes
from localrt.offload.memory import current_rss

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from localrt.models.tokenizers import Tokenizer

_MOST = 200  # keywords of a schema to try one by one
_SECONDS = 1.0  # the time for trying them
_NESTED = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALWAYS = (
    *("type", "required", "enum", "const", "$ref", "$id", "$schema", "$comment"),
    *("title", "description", "default", "examples", "deprecated"),
)


_EXPRESSION = ("pattern", "minLength", "maxLength")  # of a string, compiled together

Reduced = tuple[Any, tuple[str, ...]]
"""A schema that can be followed, and the keywords left out of it."""


def loosened(schema: object, fits: Callable[[Any], bool]) -> Reduced:
    """Return ``schema`` reduced to what ``fits``, and the keywords that were left out."""
    for one_of in (True, False):
        work = _Loosening(fits, one_of=one_of)
        found = work.schema(schema)
        if fits(found):
            break
    return found, tuple(sorted(work.left_out))


def outline(schema: object) -> Reduced:
    """Return ``schema`` reduced to types, names and enums."""
    work = _Loosening(lambda part: False, one_of=False, lists=("anyOf", "oneOf"))
    return work.schema(schema), tuple(sorted(work.left_out))


def _expression(schema: Mapping[str, object]) -> dict[str, object]:
    return {"type": "string", **{key: schema[key] for key in _EXPRESSION if key in schema}}


def _expressions(schema: object) -> Iterator[object]:
    """Yield the schema of each string that has to match a pattern."""
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            if isinstance(each.get("pattern"), str):
                yield _expression(each)
            left += each.values()
        elif isinstance(each, list):
            left += each


class _Loosening:
    def __init__(
        self, fits: Callable[[Any], bool], *, one_of: bool, lists: Sequence[str] = _LISTS
    ) -> None:
        self.left_out: set[str] = set()
        self._fits = fits
        self._one_of = one_of
        self._lists = lists
        self._until = time.monotonic() + _SECONDS
        self._tried: dict[str, bool] = {}

    def schema(self, schema: object) -> object:
        if not isinstance(schema, Mapping):
            return schema
        found: dict[str, object] = {}
        for key, value in schema.items():
            if key in _NESTED and isinstance(value, Mapping):
                inner = {name: self.schema(each) for name, each in value.items()}
                if key == "patternProperties":
                    inner = {name: each for name, each in inner.items() if self._may(key, name, {})}
                found[key] = inner
            elif key in self._lists and isinstance(value, list):
                found[key] = [self.schema(each) for each in value]
            elif key in ("items", "additionalProperties"):
                found[key] = self.schema(value)
            elif key in _ALWAYS or self._may(key, value, schema):
                found[key] = value
        reference = found.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            self.left_out.add("$ref")
            del found["$ref"]
        if "oneOf" in found and not self._one_of:
            self.left_out.add("oneOf")
            found.setdefault("anyOf", found["oneOf"])
            del found["oneOf"]
        return found

    def _may(self, key: str, value: object, schema: Mapping[str, object]) -> bool:
        """Whether a keyword of ``schema`` fits, alone or with only the keywords that it needs."""
        alone = {key: {value: {}} if key == "patternProperties" else value}
        if key == "pattern":
            alone = _expression(schema)
        elif "type" in schema:
            alone["type"] = schema["type"]
        text = json.dumps(alone)
        if text not in self._tried:
            may_try = len(self._tried) < _MOST and time.monotonic() < self._until
            self._tried[text] = may_try and self._fits(alone)
        if not self._tried[text]:
            self.left_out.add(key)
        return self._tried[text]


_T = TypeVar("_T")

_KEPT = 16  # grammars
_LONGEST = 128 << 10  # characters; reading takes time quadratic in a schema's properties
# A long grammar may have thousands of rules, each leading to the next. llguidance follows them by
# recursion, and a stack overflow would end the process.
_STACK_NBYTES = 128 << 20  # address space: only the pages in use take memory
_STACK = free_in_child(
    threading.Lock()
)  # the stack size of new threads is a setting of the whole process
# One space, or a new line and its indentation: a model must not write spaces for ever.
SPACES = r"(\n[ \t]{0,24}|[ ])?"


class Grammars:
    """Makes the constraints of one model. Thread-safe.

    ``take_ram`` takes the bytes for preparing the tokenizer from the memory budget; a negative
    number returns bytes that were not needed.
    """

    def __init__(self, tokenizer: Tokenizer, take_ram: Callable[[int], None] | None = None) -> None:
        self._tokenizer = tokenizer
        self._take_ram = take_ram or (lambda nbytes: None)
        self._prepared: LLTokenizer | None = None
        self._matcher = lru_cache(_KEPT)(self._compiled)
        self.followed = lru_cache(_KEPT)(self._followed)
        self._compiles = lru_cache(_MOST)(self._tried)
        self._lock = threading.Lock()

    def constraint(self, options: Options) -> MakeConstraint | None:
        """Return a function that makes an answer's constraint; None if the options ask for none.

        Raises:
            OptionError: the schema, regex or grammar is malformed, or uses an unsupported
                feature.
            MissingExtraError: llguidance is not installed.
            MemoryBudgetError: the budget has no room for it.
        """
        return None if options.bound_by is None else self._made(*options.bound_by)

    def _followed(self, schema: str) -> tuple[str, tuple[str, ...]]:
        """Return the closed schema reduced to what answers can follow, and the keywords left out.

        Raises:
            OptionError, MissingExtraError, MemoryBudgetError: as ``constraint``.
        """
        _check_length("json_schema", schema)
        whole = json.loads(schema)
        _check_end("json_schema", whole)
        for given in (closed(whole), whole):  # closed, it may be too long, or its parts entangled
            for loosen in (self._whole, lambda given: loosened(given, self._fits)):
                try:
                    found, left_out = loosen(given)
                    text = json.dumps(found, ensure_ascii=False)
                    self._made("json_schema", text)
                    return text, left_out
                except OptionError as error:
                    reason = error
        raise reason

    def call(
        self,
        syntax: CallSyntax,
        functions: Sequence[Mapping[str, object]],
        *,
        several: bool = False,
        answer: tuple[str, str] | None = None,
    ) -> tuple[MakeConstraint, tuple[str, ...]]:
        """Return a function that makes the constraint to a call of one of ``functions``, spelled as
        in ``syntax``. ``several`` allows more calls, ``answer`` (mark, schema) an answer instead.

        Parts of a tool's schema that cannot be followed are left out, since other tools may be
        called; their keywords are returned, too.

        Raises:
            OptionError, MissingExtraError, MemoryBudgetError: as ``constraint``.
        """
        spelling = syntax.spelling
        assert spelling is not None, "no other call can be forced"
        schemas = [closed(each.get("parameters")) for each in functions]
        other = None if answer is None else (answer[0], json.loads(_readable(answer[1])))

        def made(reduce: Callable[[Any], Reduced]) -> tuple[MakeConstraint, tuple[str, ...]]:
            left_out: set[str] = set()
            given = []
            for each, schema in zip(functions, schemas, strict=True):
                parameters, lost = reduce(schema)
                _check_end("tools", parameters)
                given.append({"name": each["name"], "parameters": parameters})
                left_out.update(lost)
            lark, unbound = call_grammar(
                spelling, given, self._terminal, spaces=SPACES, several=several, answer=other
            )
            return self._made("tool_choice", lark), tuple(sorted(left_out | unbound))

        for reduce in (self._whole, self._parameters, outline):
            with suppress(OptionError, RecursionError):  # a schema may contain itself
                return made(reduce)
        return made(_names_alone)

    def _whole(self, schema: object) -> Reduced:
        """Return ``schema`` if all of its regexes can be compiled.

        Raises:
            OptionError: a regex is too complex, which a grammar shows only on reaching it.
        """
        if not all(map(self._fits, _expressions(schema))):
            raise OptionError(f"{option('json_schema')} has a pattern that is too complex")
        return schema, ()

    def _parameters(self, schema: object) -> Reduced:
        """Return the schema of a tool's parameters, reduced to what can be followed."""
        try:
            found, left_out = self.followed(json.dumps(schema))
            return json.loads(found), left_out
        except OptionError:
            return outline(schema)

    def _fits(self, schema: object) -> bool:
        return self._compiles(json.dumps(schema))

    def _tried(self, schema: str) -> bool:
        try:
            with self._lock:
                self._compiled("json_schema", schema)
        except OptionError:
            return False
        return True

    def _terminal(self, text: str) -> str:
        """Return ``text`` as terminals of a grammar: strings, and ids for its control tokens."""
        special, found, at = self._tokenizer.special_ids, [], 0
        for mark in MARK.finditer(text):
            token = self._tokenizer.token_id(mark[0])
            if token in special:
                found += [text[at : mark.start()], f"<[{token}]>"]
                at = mark.end()
        found.append(text[at:])
        strings = (json.dumps(part, ensure_ascii=False) for part in found[::2])
        tokens = [*found[1::2], ""]
        pairs = zip(strings, tokens, strict=True)
        return " ".join(part for pair in pairs for part in pair if part not in ("", '""'))

    def _made(self, name: str, text: str) -> MakeConstraint:
        _check_length(name, text)
        with self._lock:
            matcher = self._matcher(name, text)
        vocab = self._tokenizer.vocab_size
        return lambda: _GrammarConstraint(name, matcher.deep_copy(), vocab)

    def _grammar(self, name: str, text: str) -> str:
        """Convert the value of option ``name`` for llguidance; ``tool_choice`` is Lark already."""
        from llguidance import LLMatcher

        if name == "regex":
            return LLMatcher.grammar_from_regex(text)
        if name == "json_schema":
            return LLMatcher.grammar_from_json_schema(
                _readable(text), overrides={"whitespace_pattern": SPACES}
            )
        lark = gbnf_to_lark(text, self._tokenizer.token_id) if name == "grammar" else text
        return LLMatcher.grammar_from_lark(lark)

    def _compiled(self, name: str, text: str) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise MissingExtraError(
                f"{option(name)} needs llguidance, which cannot be imported: pip install llguidance"
            ) from error
        try:
            grammar = self._grammar(name, text)
        except OptionError:
            raise
        except ValueError as error:
            raise _refused(name, str(error)) from error
        if self._prepared is None:
            self._prepared = self._prepare()
        # Items are the parser's partial parses; it compares each with all others. Schemas need few
        # items for their size, a user's grammar may need any number.
        own = name == "grammar"
        limits = LLParserLimits(
            initial_lexer_fuel=200_000,  # the largest regex takes one second, not ten
            max_items_in_row=1_000 if own else 20_000,  # enough for thousands of properties
            step_max_items=20_000 if own else 500_000,  # takes a quarter of a second
        )
        prepared = self._prepared
        # A string's regex is only built after its opening quote.
        quote = self._tokenizer.token_id('"') if name == "json_schema" else None

        def compiled() -> tuple[LLMatcher, LLMatcher]:
            matcher = LLMatcher(prepared, grammar, log_level=0, limits=limits)
            first = matcher.deep_copy()
            if not matcher.is_error():
                first.compute_bitmask()
                first.try_consume_tokens([] if quote is None else [quote])
            return matcher, first

        matcher, first = _on_a_large_stack(compiled)
        if matcher.is_error():
            raise _refused(name, matcher.get_error())
        if first.is_error():
            raise _failed(name, first)
        if first.is_stopped() and not first.is_accepting():
            raise OptionError(f"{option(name)} allows no answer that this model could write")
        return matcher

    def _prepare(self) -> LLTokenizer:
        asked = constraint_nbytes(self._tokenizer.vocab_size)
        self._take_ram(asked)
        taken, before = 0, current_rss()
        try:
            prepared = _prepared(self._tokenizer)
            taken = min(asked, max(0, current_rss() - before))
        finally:
            self._take_ram(taken - asked)
        return prepared


class _GrammarConstraint:
    """See ``Constraint``."""

    def __init__(self, name: str, matcher: LLMatcher, vocab_size: int) -> None:
        self._name = name
        self.ends_early = name == "tool_choice"  # a further call only if the model prefers one
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> npt.NDArray[np.bool_]:
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise _failed(self._name, self._matcher)
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        return bits.astype(np.bool_)

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise _failed(self._name, self._matcher)

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def done(self) -> bool:
        return self._matcher.is_stopped()


class _Wrapped:
    """Adapts a tokenizer to llguidance. Its end token is an extra id after the vocabulary, because
    each request decides which tokens end its answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self.eos_token_id = size
        self.bos_token_id = None
        self.tokens = [*map(tokenizer.token_bytes, range(size)), b"<end>"]
        self.special_token_ids = [*sorted(tokenizer.special_ids), size]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), add_special=False)


def _prepared(tokenizer: Tokenizer) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    from localrt.system import return_free_memory

    wrapped = _Wrapped(tokenizer)
    # Without slices: they would save a tenth of a millisecond per token, but take 40 MB.
    wrapper = TokenizerWrapper(wrapped)
    prepared = LLTokenizer(wrapper, n_vocab=tokenizer.vocab_size + 1, slices=[])
    wrapped.tokens = wrapper.tokens = []
    return_free_memory()
    return prepared


def _on_a_large_stack(work: Callable[[], _T]) -> _T:
    """Run ``work`` in a new thread with a large stack, and return its result."""
    with ThreadPoolExecutor(1, thread_name_prefix="localrt-grammar") as pool:
        with _STACK:
            before = threading.stack_size(_STACK_NBYTES)
            try:
                result = pool.submit(work)
            finally:
                threading.stack_size(before)
        return result.result()


def _names_alone(schema: object) -> Reduced:
    properties, required = parameters_of(schema)
    free: dict[str, object] = {key: {} for key in properties}
    return {"type": "object", "properties": free, "required": [*required]}, outline(schema)[1]


def _check_length(name: str, text: str) -> None:
    if len(text) > _LONGEST:
        raise OptionError(
            f"{option(name)} is too large: {len(text)} characters, {_LONGEST} at most"
        )


def _check_end(name: str, schema: object) -> None:
    if not can_end(schema):
        raise OptionError(
            f"{option(name)} allows no answer that ends: each value has to contain another one"
        )


def _readable(schema: str) -> str:
    """Replace a schema such as ``true`` by ``{}``: llguidance accepts only objects."""
    value: object = json.loads(schema)
    return schema if isinstance(value, Mapping) else "{}"


def _refused(name: str, reason: str) -> OptionError:
    # A report may be long: show only the line that names the error.
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return OptionError(
        f"{option(name)} cannot be used: {(errors or lines or ['it is malformed'])[0]:.500}"
    )


def _failed(name: str, matcher: LLMatcher) -> LocalrtError:
    reason = " ".join(matcher.get_error().partition("<state>")[0].split())
    if "satisfy the grammar" in reason:  # a token that was not allowed
        return LocalrtError(f"the answer cannot be kept within its grammar: {reason:.500}")
    if name == "grammar" and re.search("too many items|current row has", reason, re.IGNORECASE):
        return OptionError(
            f"{option('grammar')} can be read in too many ways: repeat a rule in one place, not "
            "both within it and around it"
        )
    return OptionError(f"{option(name)} is too complex: {reason:.500}")
