"""The options of ``/set`` and the settings with their help, and how messages spell options."""

from __future__ import annotations

from localrt.common.option_names import flag_value, on_command_line

OPTIONS = {
    "temperature": "Randomness: 0 always takes the most likely token, 0.8 is varied.",
    "top_p": "Keep the most likely tokens up to this total probability; 1 keeps all.",
    "top_k": "Keep this many of the most likely tokens; 0 keeps all.",
    "min_p": "Keep tokens at least this likely, relative to the best one; 0 keeps all.",
    "typical_p": "Keep the most typical tokens up to this total probability; 1 keeps all.",
    "max_tokens": "The longest answer, in tokens.",
    "seed": "A number: the same seed and text give the same answer.",
    "stop": 'End the answer at this text, or at one of several: ["a", "b"].',
    "repetition_penalty": "Above 1: tokens that occurred already become less likely.",
    "frequency_penalty": "Above 0: a token becomes less likely each time it occurs.",
    "presence_penalty": "Above 0: tokens that occurred at all become less likely.",
    "dry_multiplier": "Above 0: earlier passages are not repeated (DRY); try 0.8.",
    "dry_base": "DRY: how fast the penalty grows with each repeated token.",
    "dry_allowed_length": "DRY: this many repeated tokens are free.",
    "dry_penalty_last_n": "DRY: look back this many tokens; -1: the whole text.",
    "dry_sequence_breakers": 'DRY: a repetition ends at these texts: ["\\n", ":"].',
    "xtc_probability": "How often XTC leaves out the most likely tokens: 0 never, 0.5 is usual.",
    "xtc_threshold": "XTC leaves out tokens at least this likely, except the least likely of them.",
    "logit_bias": 'Added to tokens\' scores, by id: {"42": -5}.',
    "overflow": "When the context is full: error, or drop_oldest, which forgets old turns.",
    "draft": "Speculation: auto, off, ngram, mtp, or a smaller model or a head.",
    "tree_budget": "Draft tokens per pass, 1 to 2048; unset: tuned while it runs.",
    "tree_depth": "How many tokens ahead to draft, 1 to 64; unset: tuned while it runs.",
    "json_schema": 'Answers are JSON of this schema: {"type": "object"}; true: any JSON.',
    "regex": "The whole answer matches this regular expression.",
    "grammar": 'Answers follow this GBNF grammar, such as root ::= "yes" | "no".',
    "thinking": "on, off, or an effort: low, medium, high; unset: the model's own default.",
    "thinking_tokens": "The longest thinking, in tokens; then the answer begins. 0 is off.",
    "adapter": 'One of the model\'s adapters, or several: {"a": 0.7, "b": 0.3}; see /adapter.',
    "ignore_eos": "true: go on where the model would end its answer.",
}


def in_app(name: str, value: object) -> str:
    """An option as the app spells it: ``/set max_tokens 100``, or ``max_tokens``.

    Options that only the command line sets are spelled as there.
    """
    if name not in OPTIONS:
        return on_command_line(name, value)
    return name if value is None else f"/set {name} {flag_value(value)}"
