"""An HTTP server that speaks OpenAI's protocol, for programs in other languages or places.

It stands on the public API (``Model.live``, ``Model.embed``) and on Starlette and uvicorn, which
the extra ``server`` brings; ``localrt serve`` starts it.
"""
