"""A mix: several applications that use language models on one machine at the same time.

A TOML file says which applications there are, how their requests arrive and which goals they have.
See ``mix`` for its values, ``apps`` for the applications' requests, ``runner`` for how servers are
measured.
"""
