"""What the settings screen changes: the conversation's options and system prompt, presets, and what
new conversations begin with.

It knows the desk, the two files, and what each option is for; no widget. Problems are
``LocalrtError`` whose message is one line to show.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from localrt.errors import OptionError
from localrt.tui.desk import Usual
from localrt.tui.preferences import PreferencesFile, check_options
from localrt.tui.presets import Preset, Presets

if TYPE_CHECKING:
    from localrt.tui.desk import Desk
    from localrt.tui.session import Session

__all__ = ["OPTION_HELP", "SettingsWork"]

OPTION_HELP = {
    "temperature": "How much chance decides: 0 always takes the likeliest token, 0.8 is lively.",
    "top_p": "Only the likeliest tokens that together have this share; 1 takes all.",
    "top_k": "Only so many of the likeliest tokens; 0 takes all.",
    "min_p": "Only tokens at least this likely, relative to the best one; 0 takes all.",
    "typical_p": "Only tokens about as surprising as usual, with this share; 1 takes all.",
    "max_tokens": "The longest answer, in tokens.",
    "seed": "A number: the same seed and text give the same answer.",
    "stop": 'End the answer at this text, or at one of several: ["a", "b"].',
    "repetition_penalty": "Above 1: tokens of prompt and answer become less likely again.",
    "frequency_penalty": "Above 0: the more often a token came, the less likely it becomes.",
    "presence_penalty": "Above 0: a token that came at all becomes less likely.",
    "logit_bias": 'Added to tokens\' scores, by id: {"42": -5}.',
    "overflow": "When the context is full: error, or drop_oldest, which forgets old turns.",
    "draft": "What guesses ahead: auto, off, ngram, or a smaller model of the same vocabulary.",
    "tree_budget": "Guesses in one pass, 1 to 2048; unset lets it be tuned.",
    "tree_depth": "How far ahead guesses may be, 1 to 64; unset lets it be tuned.",
    "json_schema": 'Answers are JSON of this schema: {"type": "object"}; true is any JSON.',
    "regex": "Answers match this regular expression as a whole.",
    "ignore_eos": "true: go on where the model would end its answer.",
}


class SettingsWork:
    """``desk`` is where the present conversation lies."""

    def __init__(self, desk: Desk, file: PreferencesFile, presets: Presets) -> None:
        self._desk = desk
        self.file = file
        self.presets = presets

    # -- this conversation -----------------------------------------------------------------------

    @property
    def options(self) -> dict[str, Any]:
        """Those that were chosen."""
        session = self._desk.session
        return dict(self._desk.talk.options if session is None else session.chat.options)

    def default(self, name: str) -> Any:
        """What an option is where nobody chose."""
        session = self._desk.session
        if session is not None and session.model.defaults.get(name) is not None:
            return session.model.defaults[name]
        return _library_defaults().get(name)

    def set(self, name: str, text: str) -> None:
        """Choose an option by what was typed; nothing, or ``none``, takes the default again.

        Raises:
            OptionError: it cannot be that.
        """
        self._session.set(f"{name} {text.strip() or 'none'}")

    @property
    def system(self) -> str:
        """The system prompt; empty without one."""
        return self._desk.talk.system or ""

    def set_system(self, text: str) -> None:
        """Another one; empty removes it."""
        self._session.system(text.strip() or "none")

    # -- presets ---------------------------------------------------------------------------------

    def use(self, preset: Preset) -> None:
        """Have the conversation go on with exactly the preset's options.

        Raises:
            OptionError: the model does not take them; nothing changes then.
        """
        session = self._session
        cleared = dict.fromkeys(session.chat.options)
        session.chat.set(**{**cleared, **preset.options})
        session.talk.set(options=dict(session.chat.options))
        if preset.system is not None:
            self.set_system(preset.system)

    def save(self, name: str) -> None:
        """Keep what the conversation has as a preset.

        Raises:
            LocalrtError: it has nothing, or the file cannot be written.
        """
        self.presets.save(Preset(name.strip(), self.system or None, self.options))

    # -- new conversations -----------------------------------------------------------------------

    def begin_with_these(self) -> None:
        """New conversations begin with what this one has.

        Raises:
            StorageError: the file cannot be written.
        """
        options, system = self.options, self.system or None
        check_options(options)
        self.file.remember_options(options)
        self.file.remember(system=system)
        self._desk.usual = Usual(system, options)

    def begin_plainly(self) -> None:
        """New conversations begin with the model's defaults.

        Raises:
            StorageError: the file cannot be written.
        """
        self.file.remember_options({})
        self.file.remember(system=None)
        self._desk.usual = Usual()

    @property
    def _session(self) -> Session:
        if self._desk.session is None:
            raise OptionError("the model is still loading: its options come with it")
        return self._desk.session


def _library_defaults() -> dict[str, Any]:
    """The library's own, by name."""
    import localrt

    options = localrt.Options()
    found: dict[str, Any] = {}
    for part in (options, options.sampling):
        found |= {each.name: getattr(part, each.name) for each in fields(part)}
    return {name: value for name, value in found.items() if value not in ((), {}, None)}
