"""`python -m fastsac`, for where the `fastsac` script is not on the path."""

import sys

from fastsac.cli import main

sys.exit(main())
