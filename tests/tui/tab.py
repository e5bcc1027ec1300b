"""The app over a fake model, as ``localrt chat --browser`` starts it for a tab."""

import sys

from localrt.tui import run_chat
from tests.tui.fakes import FakeLoader, FakeModel

if __name__ == "__main__":
    loader = FakeLoader(FakeModel())
    sys.exit(run_chat(loader, model_name="tiny-model", system=None, options={}))
