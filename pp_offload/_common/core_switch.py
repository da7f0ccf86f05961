"""Whether groups leave through the new core, ``_core``, or through ``_transfer`` and ``_groups``.

Until the new core has replaced them, ``PP_OFFLOAD_CORE=1`` runs everything on it, so that both can
be tested by the same programs. It is no option for users.
"""

from __future__ import annotations

import os

IS_CORE = os.environ.get("PP_OFFLOAD_CORE") == "1"
