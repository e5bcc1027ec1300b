"""Prompts and answers as text: tool calls, thinking, structured answers. Knows no engine.

Read ``template_syntax.py`` first. A model's syntax for calls is a row of the table in
``call_syntaxes.py``: its chat template renders one call with a unique name and value, and the row
that spells it so is taken. Templates that write no calls are searched for the marks of the rows. A
syntax that no row has is unknown: calls stay text, which ``localrt show`` says. ``notations.py``
reads what is between marks.
``parser.py`` parses an answer as it streams, before stop strings are applied, and takes out calls
and thinking, also from the channels of gpt-oss.

The template's variables for thinking, and the text that ends a thought, are found in the same way:
a variable counts if it changes the prompt. ``localrt/service/thinking.py`` joins them with the
options. When thinking is too long, forced tokens that end it replace sampled ones, so draft tokens,
batches and streams stay exact; nothing is drafted where a token is forced. If a model ends its turn
within a thought while a schema or a call is still to come, the thought is closed for it. Only
``thinking.py`` decides where an answer's thinking ends.

A schema, a regular expression or a grammar constrains an answer through llguidance
(``structured.py``, ``gbnf.py``). With tools, the grammar of a schema is "schema or calls"
(``call_grammar.py``), in the spelling of the template's row. A schema that
llguidance cannot follow is tried keyword by keyword, so no list of its features can grow old. Text
in tags becomes numbers, lists or strings by the tool's schema (``json_schemas.py``).

Text in a message that spells a control token is disguised while it goes through the template
(``chat_template.py``) and becomes ordinary tokens. A pasted ``<|im_end|>`` cannot end a turn.
Templates are code from the internet, which ``sandbox.py`` confines.

Input for a template is normalized first. Tools (``messages.py``) get plain ASCII names, which are
mapped back in calls, a description and properties. If a template does not support tools or refuses
them, the system prompt lists them. Histories that it refuses (a late system message, two messages
of a role in a row) or shows in part are rewritten in a fixed order (``histories.py``).
``infill.py`` makes fill-in-the-middle prompts.
"""
