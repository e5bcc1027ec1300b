"""``python -m localrt``: the same as the ``localrt`` command."""

import sys

from localrt.cli import main

sys.exit(main())
