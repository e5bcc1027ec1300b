"""The options that ``/set`` takes, each with a line of help, and how messages name them."""

from __future__ import annotations

from localrt.option_names import flag_value, on_command_line

__all__ = ["OPTIONS", "in_app"]

OPTIONS = {
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
    "dry_multiplier": "Above 0: passages that came before are not said again (DRY); try 0.8.",
    "dry_base": "DRY: each further repeated token weighs so many times more.",
    "dry_allowed_length": "DRY: so many repeated tokens cost nothing.",
    "dry_penalty_last_n": "DRY: only so many of the last tokens count; -1: all.",
    "dry_sequence_breakers": 'DRY: no repetition reaches across these texts: ["\\n", ":"].',
    "xtc_probability": "How often the likeliest tokens are left out (XTC): 0 never, 0.5 is usual.",
    "xtc_threshold": "XTC leaves out tokens with this share, but for the least likely of them.",
    "logit_bias": 'Added to tokens\' scores, by id: {"42": -5}.',
    "overflow": "When the context is full: error, or drop_oldest, which forgets old turns.",
    "draft": "What guesses ahead: auto, off, ngram, or a smaller model of the same vocabulary.",
    "tree_budget": "Guesses in one pass, 1 to 2048; unset lets it be tuned.",
    "tree_depth": "How far ahead guesses may be, 1 to 64; unset lets it be tuned.",
    "json_schema": 'Answers are JSON of this schema: {"type": "object"}; true is any JSON.',
    "regex": "Answers match this regular expression as a whole.",
    "grammar": 'Answers follow this GBNF grammar, such as root ::= "yes" | "no".',
    "thinking": "on, off, or how much: low, medium, high; unset is as the model does.",
    "thinking_tokens": "The longest thinking, in tokens; the answer then begins. 0 is off.",
    "adapter": 'One of the model\'s adapters, or several: {"a": 0.7, "b": 0.3}; see /adapter.',
    "ignore_eos": "true: go on where the model would end its answer.",
}


def in_app(name: str, value: object) -> str:
    """An option as the app's reader knows it: ``/set max_tokens 100``, or ``max_tokens``.

    What only the command line sets is spelled as there.
    """
    if name not in OPTIONS:
        return on_command_line(name, value)
    return name if value is None else f"/set {name} {flag_value(value)}"
