"""Chat templates turn a conversation into one text. They do not know which model is loaded.

Templates are code from the internet. Jinja2's immutable sandbox renders them in a separate process
(``jinja_sandbox.py``; ``sandbox.py`` starts it), which imports only Jinja2; its 12 MB count as this
process's. It limits itself by the kernel: to a second of CPU time and 128 MB, and more in
proportion to its input. When a template exceeds the limits, its process ends and another one is
started. No template can hold up this process's interpreter, whatever it calls.
MiniJinja's fuel was tried instead: it rendered 19 of 275 published cases differently, and took
minutes to compare, show and add nested lists. A packaged program that has no helpers
(``localrt/common/processes.py``) renders its templates in its own process, without limits.

Text in a message that spells a control token is disguised while it goes through the template
(``chat_template.py``) and becomes ordinary tokens. A pasted ``<|im_end|>`` cannot end a turn.
"""
