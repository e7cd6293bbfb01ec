"""``python -m frugalvit.cli``."""

import sys

from frugalvit.cli.main import main

sys.exit(main())
