"""The fixture's routing of text that it has not learnt, token by token: a trace for moe_cache.py.

    .venv/bin/python benchmarks/fixture_trace.py FOLDER OUT.npz [--tokens 2000]

Decoded as it stands rather than generated: greedy text of a small model repeats itself, and its
routing with it.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from tokenizers import Tokenizer  # noqa: E402

from benchmarks.fixture_gguf import fixture_model  # noqa: E402
from benchmarks.fixture_text import encode, read_texts  # noqa: E402
from localrt.answering.core import open_core  # noqa: E402
from localrt.engine.native.routing import RoutingRecorder  # noqa: E402
from localrt.loading.parts import LoadOptions  # noqa: E402

PROMPT, LENGTH = 64, 512  # of each stretch of text


def main() -> int:
    """Record and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args()
    ids = encode(Tokenizer.from_file(str(args.folder / "tokenizer.json")), read_texts().held_out)
    path = fixture_model(args.folder)
    core = open_core(str(path), LoadOptions(ctx=LENGTH), draft="off")
    with closing(core):
        recorder = RoutingRecorder(core.engine, path)
        for start in range(0, args.tokens, LENGTH):
            session = core.new_session()
            text = ids[start : start + min(LENGTH, args.tokens - start)].tolist()
            session.extend(text[:PROMPT])
            for token in text[PROMPT:]:
                session.extend([token])
            session.close()
    print(f"wrote the routing of {recorder.save(args.out)} tokens to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
