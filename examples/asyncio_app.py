"""Several conversations at once in one asyncio program, and a clock that never stops.

python asyncio_app.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

import localrt

QUESTIONS = (
    "Why is the sky blue?",
    "Name three rivers.",
    "What is a prime number?",
)


async def answer(live: localrt.LiveModel, number: int, question: str, tokens: int) -> str:
    """One answer; all that run at the same time share each pass over the weights."""
    text = ""
    async with aclosing(live.astream(question, max_tokens=tokens)) as chunks:
        async for chunk in chunks:
            text += chunk.text
    print(f"[{number}] {question}\n{text.strip()}\n")
    return text


async def tick(period_s: float = 0.05) -> int:
    """Count as long as the event loop is free."""
    ticks = 0
    try:
        while True:
            await asyncio.sleep(period_s)
            ticks += 1
    except asyncio.CancelledError:
        return ticks


async def main(
    model: str = "smollm2", *, tokens: int = 60, period_s: float = 0.05
) -> tuple[list[str], int]:
    """Load, ask, and tell how often the clock ticked meanwhile."""
    clock = asyncio.create_task(tick(period_s))
    await asyncio.sleep(0)
    loaded = await asyncio.to_thread(localrt.load, model, ctx=1024)
    with loaded, loaded.live() as live:
        texts = await asyncio.gather(
            *(answer(live, number, text, tokens) for number, text in enumerate(QUESTIONS, 1))
        )
    clock.cancel()
    return list(texts), await clock


if __name__ == "__main__":
    _, ticks = asyncio.run(main(*sys.argv[1:2]))
    print(f"The event loop went round {ticks} times meanwhile.")
