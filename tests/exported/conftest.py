"""Every assembly and option, exported and compiled: minutes of work, so `make test-export` alone
runs it."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("BRICKWORK_EXPORTS") else ["*"]
