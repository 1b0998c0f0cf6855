"""``python -m attn_testkit`` is ``attn-testkit``."""

import sys

from .cli import main

sys.exit(main())
