"""A mix: several applications that use language models on one machine at once, measured together.

A TOML file says which applications there are, how their requests arrive and which goals they have.
Read ``mix`` for its values, ``apps`` for what the applications send, ``runner`` for how servers
are measured.
"""
