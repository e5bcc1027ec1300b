"""Chat templates: a conversation as one text. They do not know which model is loaded.

Templates are code from the internet. They are rendered by Jinja2's immutable sandbox in a process
of their own (``jinja_sandbox.py``; ``sandbox.py`` starts it), which imports Jinja2 alone, 12 MB
that count as this process's. It bounds itself by the kernel's limits: a second of the processor,
128 MB, and more in proportion to what it is given. When a template exceeds them, its process ends
and another one is started. No template can hold up the interpreter here, whatever it calls.
MiniJinja's fuel was tried instead: of 275 published cases it wrote 19 differently, and comparing,
showing and adding nested lists took it minutes. A packaged program has no interpreter to start, so
its templates are rendered within it, without limits.

Text in a message that spells a control token is disguised while it goes through the template
(``chat_template.py``) and becomes ordinary tokens. A pasted ``<|im_end|>`` cannot end a turn.
``go_template.py`` translates Ollama's templates to Jinja2.
"""
