"""One token for every Ray cluster of the session: Ray reads it once, when it is imported."""

import os
import secrets

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
