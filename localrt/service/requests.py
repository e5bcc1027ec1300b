"""Turn what a caller passes into a ``Request``: chat template, options, tools, constraints.

One prompt, a batch and a server all use it. It knows the model's parts, and no sessions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import index

from localrt.chat_format.call_syntaxes import TURN_ENDS
from localrt.chat_format.chat_template import Segment, SharedPrefixes, encode_chat
from localrt.chat_format.gbnf import gbnf_to_lark
from localrt.chat_format.histories import HistoryRenderer, rules_first
from localrt.chat_format.infill import Infill
from localrt.chat_format.messages import NO_TOOLS, Offer, Offers, check_text_only, functions_to_call
from localrt.chat_format.pictures import (
    new_mark,
    pictures_of,
    put_in,
    shows_pictures,
    without_pictures,
)
from localrt.chat_format.structured import Grammars
from localrt.chat_format.template_syntax import TemplateSyntax, turn_ends
from localrt.chat_format.thinking import CLOSE, split_thinking
from localrt.common.errors import (
    CancelledError,
    ContextOverflowError,
    OptionError,
    TemplateError,
    TokenizerError,
)
from localrt.common.option_names import option
from localrt.common.progress import ProgressCallback
from localrt.drafts.selection import Drafts
from localrt.engine.options import Options, read_options
from localrt.engine.request import MakeConstraint, Request
from localrt.engine.types import Message, Tools
from localrt.loading.load import LoadedModel
from localrt.models.tokenizers.base import Tokenizer, Watch, ignore_count
from localrt.service.adapters import Adapters
from localrt.service.arguments import (
    check_call,
    check_flag,
    check_list,
    check_messages,
    check_tools,
)
from localrt.service.thinking import ThinkingControl

# Without max_tokens, a trimmed conversation keeps this share of the context free for the answer.
_ANSWER_SHARE = 4
# Reading stops this many tokens beyond the context: up to there the message has the exact length.
_TOLD = 8192


def _with_system(messages: Sequence[Message], system: str | None) -> Sequence[Message]:
    """Put the model's own system prompt first, if a conversation does not begin with one."""
    if system is None or rules_first(messages):
        return messages
    return [{"role": "system", "content": system}, *messages]


def whole_ids(ids: Sequence[int], what: str) -> list[int]:
    """Return token ids as plain integers; numpy integers are allowed.

    Raises:
        OptionError: they are not a list of integers.
    """
    try:
        found = [index(token) for token in ids]
    except TypeError:
        found = None
    if found is None or any(isinstance(token, bool) for token in ids):
        raise OptionError(f"{what} must be a list of integers, is {ids!r:.80}")
    return found


class RequestBuilder:
    """Builds requests for the model with ``parts``, drafting by ``drafts``. Thread-safe.

    ``defaults`` are the options of requests that do not set them.
    """

    def __init__(
        self,
        parts: LoadedModel,
        defaults: Mapping[str, object],
        drafts: Drafts | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._parts = parts
        self._adapters = adapters
        self._defaults = defaults
        self._drafts = drafts
        self._engine = parts.engine
        self._tokenizer = parts.tokenizer
        self._template = parts.template
        self._grammars: Grammars | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            TokenizerError: it has none.
        """
        if self._tokenizer is None:
            raise TokenizerError(self._parts.tokenizer_problem)
        return self._tokenizer

    def check(self, options: Mapping[str, object]) -> None:
        """Raise an error unless a conversation can have these options.

        Raises:
            OptionError: an unknown name, an impossible value, a malformed grammar, or thinking of a
                model that has none; or the model writes no text.
        """
        if self._parts.mute:
            raise OptionError(self._parts.mute)
        chosen = read_options(self._defaults, options)
        if self._adapters is not None:
            self._adapters.mix(chosen.adapter)
        if self._tokenizer is not None:
            self._thinking.variables(chosen)
            if chosen.grammar is not None:
                gbnf_to_lark(chosen.grammar, self._tokenizer.token_id)

    def check_messages(self, messages: object) -> None:
        """Raise an error unless this can be a conversation with the model.

        Raises:
            OptionError: not a list of messages, or a role unknown to the chat template.
        """
        check_messages(messages, self._template.tool_source)

    def make(
        self,
        prompt: str | Sequence[Message] | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        raw: bool = False,
        suffix: str | None = None,
        files: Sequence[tuple[str, str]] = (),
        tools: Tools | None = None,
        private: bool = False,
        cancel: threading.Event | None = None,
        on_progress: ProgressCallback | None = None,
        **options: object,
    ) -> Request:
        """Return the request for the arguments of ``Model.stream``, and ``LiveModel.submit``.

        Raises:
            LocalrtError: the prompt or an option cannot be used.
        """
        if self._parts.mute:
            raise OptionError(self._parts.mute)
        chosen = read_options(self._defaults, options)
        check_call(cancel=cancel, on_progress=on_progress)
        check_flag("raw", raw)
        check_flag("private", private)
        plan = self._engine.plan
        if private and plan is not None and "ssd" in plan.placement.kv:
            raise OptionError("this model keeps keys and values on the SSD: nothing can be private")
        if tools is not None:
            tools = None if chosen.tool_choice == "none" else check_tools(tools)
        offer = self._offered(tools)
        cancel = cancel or threading.Event()
        ends = self._parts.eos_ids
        if suffix is not None or files:
            if not isinstance(prompt, str) or token_ids is not None:
                raise OptionError(
                    f"{option('suffix')} needs what stands before it as a string, in prompt"
                )
            ids, begun = self._gap_ids(prompt, suffix, files, chosen, cancel), 0
            raw, ends = True, ends | self._infill.ends
        else:
            watch = self._watch(cancel)
            ids, begun = self._prompt_ids(prompt, token_ids, raw, tools, chosen, watch)
        chat = not raw and token_ids is None
        if chat:
            ends = self._chat_ends
        # In a plain chat format, the text that begins the next turn ends an answer.
        stops = (*chosen.stop, *self._template.stop_strings) if chat else chosen.stop
        if (stops or chosen.lines is not None) and self._tokenizer is None:
            raise TokenizerError("stop strings need a tokenizer, and the model has none")
        if chosen.forces_a_call and not chat:
            raise OptionError(f"{option('tool_choice')} needs messages: a raw prompt has no tools")
        asked = ids[: len(ids) - begun]
        constraint, left_out = self._constraint(chosen, offer if chat else NO_TOOLS)
        return Request(
            prompt=ids,
            begun=begun,
            repeated=self._prefixes.lengths(ids) if chat and self._engine.recurrent else (),
            sampling=chosen.sampling,
            max_tokens=_answer_tokens(chosen, len(ids)),
            stop=stops,
            eos_ids=frozenset() if chosen.ignore_eos else ends,
            lines=chosen.lines,
            fills_gap=suffix is not None and not chosen.ignore_eos,
            logprobs=chosen.logprobs,
            exactness=self._engine.info.exactness,
            speculation=None if self._drafts is None else self._drafts.speculation(chosen),
            constraint=constraint,
            left_out=left_out,
            parser=self._thinking.parser(asked, offer, chosen) if chat else None,
            thinking_limit=self._thinking.limit(chosen, tools=bool(tools)) if chat else None,
            mix=() if self._adapters is None else self._adapters.mix(chosen.adapter),
            private=private,
            cancel=cancel,
            on_progress=on_progress,
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        watch: Watch = ignore_count,
        options: Options | None = None,
    ) -> list[int]:
        """Return the conversation's ids, as the chat template renders it before an answer.

        Of the ``options``, only those for thinking matter. A last assistant message with
        ``"prefix": True`` is the beginning of the answer, which continues it without thinking; with
        ``"token_ids"`` too, the answer continues as the model began it.

        Raises:
            OptionError: the given beginning is not text, or the answer is bound.
        """
        return self._rendered(messages, tools, watch, options)[0]

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        watch: Watch = ignore_count,
        options: Options | None = None,
    ) -> tuple[list[int], int]:
        """Return the ids of ``render``, and how many of the last ones are a continued answer's."""
        options = options or Options()
        messages, begun, written = _beginning(_with_system(messages, self._parts.system))
        if begun and not written:
            if options.is_bound:
                raise OptionError(
                    "the answer has to follow a schema or to be a call, and its beginning is given:"
                    " leave one of them out"
                )
            thought = written is not None and bool(split_thinking(begun).thinking)
            thinks = thought and (options.thinking or None)
            options = replace(options, thinking=thinks, thinking_tokens=None)
        told = self._thinking.variables(options)
        offer = self._offered(tools)
        given = self._thinking.shaped(offer.shown(messages))
        tokenizer = self.tokenizer
        names = list(map(tokenizer.token_text, tokenizer.special_ids))

        def segments(messages: Sequence[Message]) -> list[Segment]:
            return self._histories.segments(
                messages, control_tokens=names, tools=offer.tools, **told
            )

        ids = self._with_pictures(given, segments, watch)
        ids += self._thinking.begun(ids, options, tools=bool(tools))
        if written is None:
            return ids + (tokenizer.encode(begun, add_special=False) if begun else []), 0
        written = written or self._thinking.rewritten(begun, ids, tools=bool(tools))
        return ids + written, len(written)

    def _with_pictures(
        self,
        messages: Sequence[Message],
        segments: Callable[[Sequence[Message]], list[Segment]],
        watch: Watch,
    ) -> list[int]:
        """Encode the messages; a picture's rows have the ids that ``VisionState`` makes."""
        vision, tokenizer = self._engine.vision, self.tokenizer
        if vision is None or not (pictures := pictures_of(messages)):
            sees = vision is not None
            check_text_only(messages, pictures=sees, blind=self._parts.vision_problem)
            return encode_chat(tokenizer, segments(messages), watch)
        encoder = vision.encoder
        prompt_pictures = [vision.prompt_picture(picture) for picture in pictures]
        row = encoder.row_token or encoder.placeholder
        texts = [
            encoder.number.format(number)
            + "".join(p if isinstance(p, str) else p * row for p in picture.prepared.pieces)
            for number, picture in enumerate(prompt_pictures)
        ]
        shown: list[Segment] | None = None
        if self._shows_pictures:
            plain = without_pictures(messages)
            check_text_only(plain, pictures=True)
            shown = put_in(segments(plain), encoder.placeholder, texts, control=True)
        if shown is None:  # the template has no place for them, or not for all
            mark, written = new_mark(), encoder.picture_text or encoder.placeholder
            plain = without_pictures(messages, mark)
            check_text_only(plain, pictures=True)
            texts = [written.replace(encoder.placeholder, text) for text in texts]
            shown = put_in(segments(plain), mark, texts, control=False)
        if shown is None:
            raise TemplateError("the chat template leaves a picture out, or repeats it")
        ids = encode_chat(tokenizer, shown, watch)
        rows = iter([row for picture in prompt_pictures for row in picture.ids])
        seen = [next(rows, None) if token == vision.token else token for token in ids]
        if None in seen or next(rows, None) is not None:
            raise TemplateError("the chat template leaves a picture out, or repeats it")
        return [token for token in seen if token is not None]

    @cached_property
    def _shows_pictures(self) -> bool:
        vision = self._engine.vision
        return vision is not None and shows_pictures(self._template, vision.encoder.placeholder)

    # -- parts -----------------------------------------------------------------------------------

    @cached_property
    def _prefixes(self) -> SharedPrefixes:
        return SharedPrefixes(self._template, self.tokenizer)

    @cached_property
    def _syntax(self) -> TemplateSyntax:
        """The syntax of answers that the chat template shows; found on first use."""
        return TemplateSyntax.of(self._template, self._tokenizer)

    @cached_property
    def _histories(self) -> HistoryRenderer:
        return HistoryRenderer(self._template, as_text=self._syntax.calls.as_text)

    @cached_property
    def _offers(self) -> Offers:
        return Offers(self._template)

    def _offered(self, tools: Tools | None) -> Offer:
        return self._offers.of(None if tools is None else check_tools(tools))

    def _watch(self, cancel: threading.Event, *, bounded: bool = True) -> Watch:
        """Return a check that stops the reading of a prompt that is cancelled or, if ``bounded``,
        too long.
        """

        def watch(count: int) -> None:
            if cancel.is_set():
                raise CancelledError("the request was cancelled")
            if bounded:
                self._check_length(count, 2 * self._parts.ctx + _TOLD)

        return watch

    def _check_length(self, count: int, most: int) -> None:
        if count > most:
            raise ContextOverflowError(
                f"the prompt has {count} tokens or more and the context holds {self._parts.ctx}: "
                f"shorten it, raise {option('ctx')}, or use {option('overflow', 'drop_oldest')}",
                tokens=count,
                ctx=self._parts.ctx,
            )

    def _least_tokens(self, message: object) -> int:
        """Return the fewest tokens of a message: templates trim texts and drop earlier thoughts."""
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else [content]
        texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
        return sum(
            self.tokenizer.least_tokens(text.rpartition(CLOSE)[2].strip())
            for text in texts
            if isinstance(text, str)
        )

    @cached_property
    def _chat_ends(self) -> frozenset[int]:
        """The ids that end a turn, of which a model's files do not always declare all."""
        tokenizer = self._tokenizer
        if tokenizer is None or not self._template.tool_source:
            return self._parts.eos_ids
        found = {tokenizer.token_id(name) for name in TURN_ENDS}
        found |= turn_ends(self._template, tokenizer)
        return self._parts.eos_ids | (tokenizer.special_ids & found)

    @cached_property
    def _infill(self) -> Infill:
        return Infill(self.tokenizer)

    def _gap_ids(
        self,
        before: str,
        behind: str | None,
        files: Sequence[tuple[str, str]],
        options: Options,
        cancel: threading.Event,
    ) -> list[int]:
        """Return the prompt for the gap between two texts, cut if the options ask for it."""
        if not isinstance(behind, str):
            raise OptionError(f"{option('suffix')} must be a string, is {behind!r:.80}")
        check_list("files", files, "pairs of a name and a text")
        if not all(_is_pair(file) for file in files):
            raise OptionError("files must be a list of pairs of a name and a text")
        if options.overflow == "drop_oldest":
            most, watch = self._room(options), self._watch(cancel, bounded=False)
            return self._infill.prompt(before, behind, files, most=most, watch=watch)
        texts = (before, behind, *(text for _, text in files))
        self._check_length(sum(map(self.tokenizer.least_tokens, texts)), self._parts.ctx)
        return self._infill.prompt(before, behind, files, watch=self._watch(cancel))

    def _constraint(
        self, options: Options, offer: Offer
    ) -> tuple[MakeConstraint | None, tuple[str, ...]]:
        """Return the answer's constraint (a schema, an expression, or a required tool call), and
        the schema keywords that it does not enforce.
        """
        if not options.is_bound:
            return None, ()
        if self._grammars is None:
            engine = self._engine
            take_ram = engine.take_ram if engine.info.streamed else None
            self._grammars = Grammars(self.tokenizer, take_ram)
        grammars, syntax = self._grammars, self._syntax
        if options.forces_a_call:
            choice = offer.named(options.tool_choice)
            functions = functions_to_call(choice, offer.functions)
            several = choice == "required" and options.parallel_tool_calls
            return grammars.call(syntax.forced, functions, several=several)
        if options.json_schema is None:
            return grammars.constraint(options), ()
        schema, left_out = grammars.followed(options.json_schema)
        if not offer.functions:
            return grammars.constraint(replace(options, json_schema=schema)), left_out
        answer = (syntax.answer, schema)
        several = options.parallel_tool_calls
        made, lost = grammars.call(syntax.forced, offer.functions, several=several, answer=answer)
        return made, (*left_out, *(name for name in lost if name not in left_out))

    @cached_property
    def _thinking(self) -> ThinkingControl:
        return ThinkingControl(self._template, self._syntax, self.tokenizer)

    def _prompt_ids(
        self,
        prompt: str | Sequence[Message] | None,
        token_ids: Sequence[int] | None,
        raw: bool,
        tools: Tools | None,
        options: Options,
        watch: Watch,
    ) -> tuple[list[int], int]:
        """Return the prompt's ids, and how many of the last ones are a continued answer's."""
        begun = 0
        if (prompt is None) == (token_ids is None):
            raise OptionError("give either a prompt or token_ids")
        if token_ids is not None:
            ids = whole_ids(token_ids, "token_ids")
        elif isinstance(prompt, str):
            if not prompt:
                raise OptionError("the prompt is empty: write something to answer")
            if raw:
                self._check_length(self.tokenizer.least_tokens(prompt), self._parts.ctx)
                ids = self.tokenizer.encode_raw(prompt, watch)
            else:
                turn: list[Message] = [{"role": "user", "content": prompt}]
                ids, _ = self._short_enough(turn, tools, watch, options)
        else:
            assert prompt is not None
            if raw:
                raise OptionError("raw takes a string, not a list of messages")
            self.check_messages(prompt)
            if not prompt:
                raise OptionError("the list of messages is empty")
            ids, begun = self._fitted(prompt, tools, options, watch)
        if not ids:
            raise OptionError("the prompt is empty: there is nothing to continue")
        return ids, begun

    def _short_enough(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        watch: Watch,
        options: Options,
    ) -> tuple[list[int], int]:
        """Call ``_rendered``, unless the messages are certainly too long for the context."""
        self._check_length(sum(map(self._least_tokens, messages)), self._parts.ctx)
        return self._rendered(messages, tools, watch, options)

    def _room(self, options: Options) -> int:
        """Return the most tokens of a prompt, if the oldest turns may be dropped."""
        ctx = min(self._parts.ctx, options.context_tokens or self._parts.ctx)
        return ctx - min(options.max_tokens or ctx, max(1, ctx // _ANSWER_SHARE))

    def _fitted(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        options: Options,
        watch: Watch,
    ) -> tuple[list[int], int]:
        """Return the ids of ``_rendered``, without the oldest turns if the options ask for it."""
        if options.overflow == "error":
            return self._short_enough(messages, tools, watch, options)
        ctx, room = self._parts.ctx, self._room(options)
        head = rules_first(messages)
        start, shown = head, messages
        while True:
            try:
                ids, begun = self._short_enough(shown, tools, watch, options)
                size, count = len(ids), f"{len(ids)} tokens"
            except ContextOverflowError as error:
                ids, size, count = None, error.tokens or 0, "too many tokens"
            if ids is not None and len(ids) <= room:
                return ids, begun
            # A turn begins at a user message: tool results and answers go with it.
            start = next(
                (i for i in range(start + 1, len(messages)) if messages[i]["role"] == "user"),
                len(messages),
            )
            if start >= len(messages):
                if ids is not None and len(ids) <= ctx - ctx // _ANSWER_SHARE:
                    return ids, begun  # it only leaves less room than planned
                raise ContextOverflowError(
                    f"the last message alone has {count} with the system prompt and the context "
                    f"holds {ctx}: shorten it or raise {option('ctx')}",
                    tokens=size,
                    ctx=ctx,
                )
            shown = [*messages[:head], *messages[start:]]


def _answer_tokens(options: Options, prompt: int) -> int | None:
    """Return the most tokens of an answer to a prompt of ``prompt`` tokens."""
    if options.context_tokens is None or prompt >= options.context_tokens:
        return options.max_tokens
    left = options.context_tokens - prompt
    return left if options.max_tokens is None else min(left, options.max_tokens)


def _beginning(
    messages: Sequence[Message],
) -> tuple[Sequence[Message], str, list[int] | None]:
    """Return ``messages`` without the given beginning of the answer, that text or "", and its
    tokens; None if the answer does not repeat it.

    Raises:
        OptionError: it is not text, or there is no other message.
    """
    last = messages[-1] if messages else None
    if not (isinstance(last, Mapping) and last.get("role") == "assistant" and last.get("prefix")):
        return messages, "", None
    if not isinstance(last["content"], str) or last.get("tool_calls"):
        raise OptionError("the beginning of an answer (prefix) must be text, and nothing else")
    if len(messages) == 1:
        raise OptionError("the beginning of an answer (prefix) must follow another message")
    written = last.get("token_ids")
    ids = None if written is None else whole_ids(written, "token_ids")
    return messages[:-1], last["content"], ids


def _is_pair(file: object) -> bool:
    return isinstance(file, list | tuple) and list(map(type, file)) == [str, str]
