"""Chat templates: a conversation as one text, in Jinja's sandbox."""
