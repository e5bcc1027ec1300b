"""Sequences that share passes.

``schedule.py`` decides what a pass holds, and runs sequences one after another where an engine
cannot share passes. ``batch.py`` has all prompts from the start; ``live.py`` is a thread that
requests join and leave, with clients in turn. A sequence that is alone speculates as in ``stream``;
of several, ``speculation.py`` verifies the likeliest draft tokens. What a sequence says does not
depend on the others: sampling, stops and limits are the loop's.
"""
