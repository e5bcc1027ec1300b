"""What an answer's text means: tool calls, thinking, structured answers. It knows no engine.

Read ``template_syntax.py`` first. How a model writes calls is found by probing its chat template:
calls with names and values that occur nowhere else are rendered, the text around them gives the
marks and the notation of the arguments, and what was found counts only if it reads the probes back
(``call_probe.py``). ``known_syntaxes.py`` has the published syntaxes, for templates that write no
calls and for what models write beside their template's own way. Both are described in
``notations.py``, and ``parser.py`` reads an answer by them as it comes: it sees the text before
stop strings do, and takes out calls and thinking. gpt-oss writes in channels.

How a model is told to think, and what it writes when it ends a thought, is found in the same way:
variables count if they change what the template writes. ``localrt/service/thinking.py`` joins it
with the options. Tokens that end a thinking which is too long come in place of sampled ones, so
draft tokens, batches and streams stay exact; nothing is drafted where a token is forced. If a model
ends its turn within a thought while a schema or a call is still to come, the thought is ended for
it. ``thinking.py`` is the one rule of where an answer's thinking ends.

A schema, an expression or a grammar bounds an answer through llguidance (``structured.py``,
``gbnf.py``). Beside tools, the grammar of a schema is "schema or calls" (``call_grammar.py``); how
a second call follows a first is probed, too. A schema that llguidance cannot follow is tried
keyword by keyword, so no list of what it can do grows old. Text in tags becomes numbers, lists or
strings by the tool's schema (``argument_types.py``).

What a template is told is made presentable first. Tools (``messages.py``) get names of usual
letters, which are mapped back in calls, a description and properties, or stand in plain words in
the system prompt where a template has no place for them or refuses them. Histories that it refuses
(a late system message, two messages of a role in a row) or shows in part are rewritten
(``histories.py``). ``infill.py`` makes the prompts for a gap in a text.
"""
