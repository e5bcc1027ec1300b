"""Answer a file of prompts on all machines of a Ray cluster; run it again and it goes on.

    pip install "localrt[ray]"
    python ray_batch.py prompts.jsonl answers --workers 4

Each line of the file is such as {"id": "1", "prompt": "Why is the sky blue?"}.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray

import localrt


def main() -> None:
    """Read the arguments, and write a file of answers for each block of prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path, help="a folder that all machines see")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--workers", type=int, default=1, help="processes with a model each")
    parser.add_argument("--ram", default="8GB", help="for each of them")
    parser.add_argument("--threads", type=int, default=4, help="for each of them")
    args = parser.parse_args()

    data = ray.data.read_json(str(args.prompts.resolve()))
    answered = data.map_batches(
        localrt.Batch,
        fn_constructor_args=[args.model],
        fn_constructor_kwargs={
            "kept": args.answers.resolve() / "kept",
            "load": {"ram": args.ram, "threads": args.threads},
            "max_tokens": 200,
            "temperature": 0,
        },
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        num_cpus=args.threads,
    )
    answered.write_json(str(args.answers.resolve() / "done"))


if __name__ == "__main__":
    main()
